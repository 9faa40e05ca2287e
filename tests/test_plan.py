"""The plan as Python and the command line give it: published tables, packages, devices, and what does not fit."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys

import pytest

from edge_qkv import InputError, Plan, _native
from edge_qkv.cli import main
from edge_qkv.commands.plan import devices
from edge_qkv.config import ModelConfig
from edge_qkv.errors import OverBudget
from edge_qkv.estimate import estimate
from edge_qkv.export import export_package
from edge_qkv.layer import biases
from edge_qkv.package import Package
from edge_qkv.planning import plan
from edge_qkv.presets import preset
from edge_qkv.sizes import parse_size

Q_MQA = preset("1.2B/Q-MQA")


def _json(capsys, *arguments: object):
    capsys.readouterr()
    assert main(["plan", *(str(a) for a in arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", *(str(a) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("edge-qkv: ")
    return captured.err


# ---- published figures ----

TABLES = {
    "300M": [2684354560, 2684354560, 1342177280, 1342177280, 671088640, 167772160, 335544320, 83886080],
    "1.2B": [5905580032, 5905580032, 2952790016, 2952790016, 1476395008, 184549376, 369098752, 92274688],
}


@pytest.mark.parametrize("model", TABLES)
def test_the_published_cache_tables_come_out_exactly(capsys, model):
    found = _json(capsys, model, "--variants")
    assert found["context"] == 32768
    names = ["QKV", "Q=K-V", "Q-K=V", "Q=K=V", "GQA-4" if model == "300M" else "GQA-8", "MQA", "Q-GQA-4", "Q-MQA"]
    assert [row["variant"] for row in found["variants"]] == names
    assert [row["fp16"] for row in found["variants"]] == TABLES[model]
    assert all(row["int8"] * 128 == row["fp16"] * 66 for row in found["variants"])  # 64 values and an fp16 scale


def test_a_plan_of_a_published_size_has_its_exact_cache(capsys):
    assert _json(capsys, "1.2B/Q-MQA", "--context", "32,768")["cache"] == 92_274_688
    assert _json(capsys, "random:1.2B/Q-MQA", "--cache", "int8")["cache"] == 47_579_136


# ---- packages ----

SMALL = dict(vocab_size=4096, max_positions=2048, layers=6, width=384, heads=6, head_dim=64, mlp_width=1024)
LEARNED = SMALL | {"positions": "learned"}
CONFIGS = {
    "unified": ModelConfig.uniform(
        kv_heads=1, sharing="q-k=v", mlp="swiglu", norm="rmsnorm", positions="rotary-conjugate", **SMALL
    ),
    "separate": ModelConfig.uniform(kv_heads=6, biases=biases(True, True), norm_bias=True, **LEARNED),
    "untied": ModelConfig.uniform(kv_heads=2, query="identity", tied_head=False, **LEARNED | {"vocab_size": 9000}),
}  # fmt: skip


@pytest.mark.parametrize("name, weights, block", [("unified", "int4", 32), ("separate", "int8", None),
                                                  ("untied", "int4", None), ("unified", "fp32", None)])  # fmt: skip
def test_the_formula_of_a_config_is_what_an_export_writes(tmp_path, name, weights, block):
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    output = tmp_path / "package"
    checkpoint = f"random:{tmp_path / 'config.json'}"
    export_package("onnx", checkpoint, output, weights=weights, block_size=block, parity=False)
    found = _planned(output)
    formula = estimate(config, weights, block)
    assert found.matrix_bytes == formula.matrix_bytes
    assert found.weight_bytes == sum((output / f).stat().st_size for f in ("model.onnx", "model.onnx.data"))
    assert formula.weight_bytes == pytest.approx(found.weight_bytes, rel=0.005)
    of_package = plan(output, context=2048)
    assert of_package.total == plan(config, context=2048, weights=weights, block_size=block).total
    assert of_package.weight_bytes == Package.open(output).weight_bytes


# Bytes of one layer's matrices, the head, and the embedding of "unified" with 4 bits a weight in groups of 64: worked
# out by hand. Rows: query 384, key 64, output 384, gate and up 1024 each; down 384 of 1024 columns.
@pytest.mark.parametrize("weights, block, layer, head, embedding, bits", [
    ("8da4w", None, (2880 * 384 + 384 * 1024) // 2 + (2880 * 6 + 384 * 16) * 2, 4096 * 388, 4096 * (192 + 48), 4),
    ("int4", 32, (2880 * 384 + 384 * 1024) // 2 + (2880 * 12 + 384 * 32) * 2, 4096 * 388, 4096 * (192 + 48), 4),
    ("int8", None, 2880 * 388 + 384 * 1028, 4096 * 388, 4096 * (192 + 48), 8),
    ("fp32", None, (2880 * 384 + 384 * 1024) * 4, 4096 * 384 * 4, 4096 * 384 * 4, 32),
])  # fmt: skip
def test_the_formula_of_executorch_is_worked_out_by_hand(weights, block, layer, head, embedding, bits):
    config = CONFIGS["unified"]
    found = estimate(config, weights, block, "executorch")
    assert found.matrix_bytes == 6 * layer + head
    rotary, norms = 2 * 2048 * 32 * 4, 13 * 384 * 4
    assert found.table_bytes == embedding + rotary + norms
    assert found.weight_bytes > found.matrix_bytes + found.table_bytes  # tied or not, each is stored
    assert f"\nweight_bits {bits}\nblock_size {({4: block or 64}).get(bits, 0)}\n" in found.description
    assert found.prefill_chunk == 128


def test_executorch_pads_groups_and_keeps_odd_tables_in_float():
    config = ModelConfig.uniform(kv_heads=2, **LEARNED | {"width": 100, "heads": 2, "head_dim": 40, "mlp_width": 130})
    found = estimate(config, "8da4w", 32, "executorch")
    # Padded to 128, 96 and 160 columns; and the inner width of the MLP to 160 rows.
    rows_of_100, rows_of_80, rows_of_130 = 3 * 80 + 160, 100, 100
    layer = rows_of_100 * (64 + 8) + rows_of_80 * (48 + 6) + rows_of_130 * (80 + 10)
    assert found.matrix_bytes == 6 * layer + 4096 * 104
    assert found.table_bytes == 4096 * 400 + 2048 * 104 + 13 * 400  # embedding, learned positions, norms


def test_a_plan_for_executorch_has_its_chunk_and_its_costs():
    made = plan(Q_MQA, target="executorch", context=4096)
    assert made.prefill_chunk == 128 and made.total != plan(Q_MQA, context=4096).total
    assert plan(Q_MQA, target="executorch", context=4096, prefill_chunk=512).prefill_chunk == 512
    assert plan(Q_MQA, target="executorch", context=50).prefill_chunk == 50
    with pytest.raises(OverBudget, match=r"int4 weights"):
        plan(Q_MQA, target="executorch", weights="8da8w", context=4096, memory=made.total + 10_000_000)
    with pytest.raises(InputError, match="target = 'llama': must be one of onnx, executorch"):
        plan(Q_MQA, target="llama")


def _planned(package, **options) -> _native.PlanInfo:
    info = _native.PlanInfo()
    wanted = _native.PlanOptions(**{"context": 64, **options})
    _native.call("eqkv_plan_package", os.fsencode(package), ctypes.byref(wanted), ctypes.byref(info))
    return info


def test_the_engine_of_a_package_is_its_own(tiny_package):
    assert _planned(tiny_package, engine=b"onnxruntime").total == _planned(tiny_package).total
    with pytest.raises(InputError, match='was exported for the engine onnxruntime; leave out engine "executorch"'):
        _planned(tiny_package, engine=b"executorch")
    with pytest.raises(InputError, match='engine must be onnxruntime or executorch, not "torch"'):
        _planned(tiny_package, engine=b"torch")


def test_a_caller_that_knows_no_engine_plans_for_onnxruntime():
    """Its struct ends before the field, whatever lies there."""
    text, info = estimate(Q_MQA).description.encode(), _native.PlanInfo()
    options = _native.PlanOptions(context=64, engine=b"executorch")
    totals = []
    for older in (False, True):
        if older:
            options.struct_size = _native.PlanOptions.engine.offset
        _native.call("eqkv_plan", text, ctypes.byref(options), ctypes.byref(info))
        totals.append(info.total)
    assert totals[0] != totals[1] == plan(Q_MQA, context=64).total


def test_a_package_is_planned_without_reading_its_weights(tiny_package, tmp_path, capsys):
    """The data file is a hole of 1 TB, and no engine is loaded."""
    for name in ("model.onnx", "edge_qkv.json"):
        (tmp_path / name).write_bytes((tiny_package / name).read_bytes())
    manifest = json.loads((tmp_path / "edge_qkv.json").read_text())
    (tmp_path / "model.onnx.data").touch()
    os.truncate(tmp_path / "model.onnx.data", 10**12)
    manifest["files"] = {n: f for n, f in manifest["files"].items() if n == "model.onnx"}
    (tmp_path / "edge_qkv.json").write_text(json.dumps(manifest))
    script = "import sys; from edge_qkv.cli import main; main(['plan', sys.argv[1]]); print(*open('/proc/self/maps'))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (
        "total" in done.stdout
        and "onnxruntime" not in done.stdout
        and "model.onnx" not in done.stdout.split("total")[-1]
    )
    assert "a package has its own" in _refused(capsys, tmp_path, "--weights", "int8")
    assert "a package has its own" in _refused(capsys, tmp_path, "--target", "executorch")


def test_a_model_over_budget_is_refused_before_the_engine_is_opened(tiny_package):
    model = ctypes.c_void_p()
    options = _native.ModelOptions(engine_library=b"/nowhere/libonnxruntime.so", memory=1_000_000, context=64)
    with pytest.raises(OverBudget, match=r"tiny/model\.onnx: A context of 64 tokens needs .* and 1\.0 MB are allowed"):
        _native.call("eqkv_model_open", os.fsencode(tiny_package), ctypes.byref(options), ctypes.byref(model))
    options.memory = 0
    with pytest.raises(InputError, match="ONNX Runtime cannot be opened"):
        _native.call("eqkv_model_open", os.fsencode(tiny_package), ctypes.byref(options), ctypes.byref(model))


def test_python_takes_what_the_command_takes(tiny_package, tiny_checkpoint):
    assert plan("1.2B/Q-MQA") == plan("random:1.2B/Q-MQA") == plan(Q_MQA)
    assert isinstance(plan("1.2B/Q-MQA"), Plan)
    assert plan(tiny_checkpoint) == plan(str(tiny_checkpoint)) == plan(Package.open(tiny_package).config)
    assert plan(tiny_package).cache_type == "fp32"


@pytest.mark.parametrize("option", ["context", "threads", "prefill_chunk"])
@pytest.mark.parametrize("value", [2**64 + 1, "7", 1.5, True, -1])
def test_what_is_no_whole_number_in_range_is_refused(option, value):
    with pytest.raises(InputError, match=re.escape(f"{option} = {value!r}: must be a whole number")):
        plan(Q_MQA, **{option: value})


# ---- budgets ----


def test_the_longest_context_and_the_least_budget_are_inverse(capsys):
    least = _json(capsys, "1.2B/Q-MQA", "--budget", "min", "--context", 20000)
    assert least["memory"] == least["total"] and least["left"] == 0
    assert plan(Q_MQA, memory=least["total"], context="max").context == 20000
    with pytest.raises(OverBudget):
        plan(Q_MQA, memory=least["total"] - 1, context=20000)


def test_parts_add_up_in_json_and_are_all_in_the_table(capsys):
    found = _json(capsys, "1.2B/Q-MQA", "--memory", "1.5GiB", "--packed")
    parts = ("weights_file", "weights_anonymous", "cache", "workspace", "engine_file", "engine_anonymous")
    assert sum(found[p] for p in parts) == found["expected"] == found["total"] - found["margin"]
    assert found["left"] == 1_610_612_736 - found["total"] and found["weights_anonymous"] == 0
    main(["plan", "1.2B/Q-MQA", "--memory", "1.5GiB", "--packed"])
    text = capsys.readouterr().out
    assert all(f"{found[p]:,}" in text for p in parts if found[p])
    assert f"{found['total'] - found['anonymous']:,}" in text and f"{found['left']:,}" in text


def test_what_does_not_fit_is_one_message_with_what_would(capsys):
    fp16, int8 = (plan(Q_MQA, context=32768, cache=c).total for c in ("fp16", "int8"))
    message = _refused(capsys, "1.2B/Q-MQA", "--context", 32768, "--memory", int8 + 1_000_000)
    assert "A context of 32768 tokens needs 1006.8 MB" in message and fp16 < 1_006_800_000
    assert "an int8 cache (" in message and (longest := re.search(r"a context of (\d+) tokens", message))
    assert plan(Q_MQA, memory=int8 + 1_000_000).context == int(longest[1])
    message = _refused(capsys, "1.2B/Q-MQA", "--context", 32768, "--memory", "500MB")
    assert "are needed, for a context of 1 token" in message and "What would fit" not in message
    assert "int4 weights (" in _refused(
        capsys, "1.2B/Q-MQA", "--weights", "int8", "--memory", "1.1GB", "--context", 32768
    )


@pytest.mark.parametrize("arguments, words", [
    (["nowhere"], "nowhere"),
    (["1.2B/Q-XYZ"], "Q-XYZ"),
    (["1.2B/Q-MQA", "--memory", "512 bananas"], "--memory = '512 bananas': is no size"),
    (["1.2B/Q-MQA", "--memory", "0"], "above 0"),
    (["1.2B/Q-MQA", "--context", "0"], "--context 0: must be a number of tokens, or max"),
    (["1.2B/Q-MQA", "--context", "40000"], "at most 32768"),
    (["1.2B/Q-MQA", "--device", "toaster"], "toaster"),
    (["1.2B/Q-MQA", "--weights", "fp32", "--block-size", "32"], "--block-size 32: fp32 weights take none"),
    (["1.2B/Q-MQA", "--weights", "8da4w"], "--weights 8da4w: must be one of fp32, int8, int4 for the target onnx"),
    (["1.2B/Q-MQA", "--target", "executorch", "--weights", "int8", "--block-size", "32"], "8da8w weights take none"),
    (["1.2B/QKV", "--device", "phone-4gb", "--context", "32768"], "phone-4gb"),
    (["1.2B", "--variants", "--device", "all"], "--variants"),
    (["1.2B", "--variants", "--memory", "1GB"], "--memory"),
    (["1.2B", "--device", "all", "--memory", "1GB"], "--memory"),
])  # fmt: skip
def test_bad_input_is_one_sentence(capsys, arguments, words):
    assert words in _refused(capsys, *arguments)


@pytest.mark.parametrize("text, count", [
    ("512MB", 512_000_000), ("1.5GiB", 1_610_612_736), (" 88 mib ", 92_274_688), ("7", 7), ("2k", 2000), (12, 12),
    ("0.5kB", 500), ("1GB", 10**9),
])  # fmt: skip
def test_sizes_as_people_write_them(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1.5.2GB", "1e9", "1 000", "١MB", "9" * 30, "0", -5, 0, None, True, 1.5]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="memory = "):
        parse_size(text)


# ---- devices ----


def test_every_figure_of_every_device_has_a_source():
    known = devices()
    assert {"phone-4gb", "phone-12gb", "raspberry-pi-4", "raspberry-pi-5", "jetson-orin-nano"} <= set(known)
    for device in known.values():
        for figure in ("memory", "app_memory", "cores", "bandwidth"):
            value, source = (device[figure][k] for k in device[figure])
            assert value > 0 and len(source) > 20
        assert device["app_memory"]["bytes"] < device["memory"]["bytes"]


def test_devices_get_the_longest_context_that_their_memory_holds(capsys):
    rows = {row["device"]: row for row in _json(capsys, "1.2B/QKV", "--device", "all")}
    assert set(rows) == set(devices())
    phone = rows["phone-6gb"]
    assert 0 < phone["fp16"]["context"] < phone["int8"]["context"] < 32768
    assert phone["fp16"]["total"] + phone["fp16"]["left"] == phone["app_memory"]
    known = devices()["phone-6gb"]
    held = plan(preset("1.2B/QKV"), memory=phone["app_memory"], threads=known["cores"]["count"])
    assert held.context == phone["fp16"]["context"]
    read = held.matrix_bytes + held.cache
    assert phone["fp16"]["tokens_per_second_bound"] == pytest.approx(known["bandwidth"]["bytes_per_second"] / read)
    assert rows["phone-4gb"]["fp16"]["context"] < phone["fp16"]["context"]


def test_a_package_has_one_cache_on_every_device(tiny_package, capsys):
    assert all(
        "fp32" in row and not {"fp16", "int8"} & set(row) for row in _json(capsys, tiny_package, "--device", "all")
    )
    assert main(["plan", str(tiny_package), "--device", "all"]) == 0
    text = capsys.readouterr().out
    assert "fp32 tokens" in text and "fp16" not in text and "int8" not in text
    assert "--cache int8" in _refused(capsys, tiny_package, "--cache", "int8")
    assert main(["plan", "1.2B/QKV", "--device", "phone-6gb"]) == 0
    heading = re.split(r"  +", capsys.readouterr().out.splitlines()[0])
    columns = [c for cache in ("fp16", "int8") for c in (f"{cache} tokens", "left", "decode at most")]
    assert heading == ["device", "for an app (assumed)", *columns]


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "--budget min --context max" in text and "raspberry-pi-5" in text
