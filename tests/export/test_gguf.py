"""GGUF packages: what is in the file, read back by `gguf` and computed in numpy; tests/llama runs them in llama.cpp."""

from __future__ import annotations

import importlib.util
import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf_variants
from conftest import changed, write_checkpoint
from edge_qkv import InputError, package
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.commands.inspect import inspect
from edge_qkv.estimate import estimate
from edge_qkv.export import export_package
from edge_qkv.layer import biases
from edge_qkv.targets import stored_as
from gguf_graphs import File
from gguf_variants import GPT, LLAMA, PLAIN, VARIANTS
from mixed_models import MIXED

# float32 on one side, float64 on the other, logits of order 1; angles and frequencies are rounded to float32.
TOLERANCE = 2e-5


def _export(checkpoint: Path, output: Path, **options) -> dict:
    return export_package("gguf", str(checkpoint), output, **{"weights": "f32", "parity": False} | options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(config, weights) -> (checkpoint, package, manifest)."""

    def make(config, weights="f32", tokenizer=None, **options):
        folder = tmp_path_factory.mktemp("gguf")
        checkpoint = gguf_variants.write(folder / "checkpoint", config, tokenizer)
        return checkpoint, folder / "package", _export(checkpoint, folder / "package", weights=weights, **options)

    return make


@torch.no_grad()
def _eager(checkpoint: Path, ids: torch.Tensor) -> np.ndarray:
    return read_checkpoint(str(checkpoint)).load()(ids[None])[0][0].numpy()


# ---- what a file computes ----


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_computes_what_the_checkpoint_does(written, name):
    config, architecture = VARIANTS[name]
    checkpoint, output, manifest = written(config)
    file = File.read(output / "model.gguf")
    assert file.architecture == manifest["architecture"] == architecture
    ids = torch.randint(0, config.vocab_size, (config.max_positions,), generator=torch.Generator().manual_seed(1))
    expected = _eager(checkpoint, ids)
    error = np.abs(file.logits(ids.tolist()) - expected)
    assert expected.std() > 0.5
    if config.only.mlp in ("gelu", "geglu"):  # which llama.cpp has in the tanh form only
        assert TOLERANCE < error.max() < 0.01 * expected.std()
    else:
        assert error.max() < TOLERANCE


def test_the_tanh_form_of_gelu_is_as_near_as_said():
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    error = (torch.nn.functional.gelu(x, approximate="tanh") - torch.nn.functional.gelu(x)).abs().max()
    assert 4.6e-4 < error < 4.74e-4


def test_a_shorter_package_has_a_shorter_table(written):
    checkpoint, output, _ = written(GPT, capacity=20)
    file = File.read(output / "model.gguf")
    assert file.get("context_length") == 20 and file.tensors["position_embd.weight"].shape == (20, GPT.width)
    ids = torch.arange(20)
    np.testing.assert_allclose(file.logits(ids.tolist()), _eager(checkpoint, ids), atol=2e-2)


# ---- how weights are stored ----


def _largest_error(stored: np.ndarray, exact: np.ndarray, kind: str) -> float:
    """The largest error in steps of a block, its largest magnitude / 127 or / 8."""
    blocks = exact.reshape(-1, 32)
    steps = np.abs(blocks).max(1, keepdims=True) / {"Q8_0": 127, "Q4_0": 8}[kind]
    return float((np.abs(stored.reshape(-1, 32) - blocks) / np.maximum(steps, 1e-30)).max())


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
@pytest.mark.parametrize("config", [LLAMA, GPT, PLAIN], ids=["llama", "mpt", "deepseek2"])
def test_quantised_weights_are_within_their_steps(written, config, weights):
    checkpoint, output, manifest = written(config, weights)
    exact = File.read(_again(checkpoint, "f32"))
    file = File.read(output / "model.gguf")
    found = set()
    for name, tensor in file.tensors.items():
        kind = file.types[name]
        found.add(kind)
        match kind:
            case "F32":
                np.testing.assert_array_equal(tensor, exact.tensors[name])
            case "F16":
                np.testing.assert_array_equal(tensor, exact.tensors[name].astype(np.float16))
            case "Q8_0":
                assert 0.3 < _largest_error(tensor, exact.tensors[name], kind) < 0.6  # and the scale in fp16
            case "Q4_0":  # 15 codes on one side of 0, 16 with it; the largest of the other side misses by one
                assert 0.3 < _largest_error(tensor, exact.tensors[name], kind) < 1.01
    assert {"F32", weights.upper(), "Q8_0"} <= found
    assert file.types["token_embd.weight"] == "Q8_0"  # the head too
    assert manifest["weights"] == weights
    ids = list(range(90))
    error = file.logits(ids) - exact.logits(ids)
    assert 0 < error.std() < {"q8_0": 0.05, "q4_0": 0.5}[weights] * exact.logits(ids).std()


def _again(checkpoint: Path, weights: str) -> Path:
    output = checkpoint.parent / weights
    _export(checkpoint, output, weights=weights)
    return output / "model.gguf"


def test_half_precision_rounds_matrices_and_nothing_else(written):
    checkpoint, output, _ = written(changed(GPT, biases=biases(True, True)), "f16")
    file, exact = File.read(output / "model.gguf"), File.read(_again(checkpoint, "f32"))
    for name, tensor in exact.tensors.items():
        wanted = tensor.astype(np.float16) if tensor.ndim > 1 else tensor
        np.testing.assert_array_equal(file.tensors[name], wanted)


def test_the_small_part_of_a_residual_query_survives_four_bits(written):
    """Beside ones on the diagonal, 4 bits would leave of most rows nothing else."""
    _, output, _ = written(changed(LLAMA, query="residual"), "q4_0")
    file = File.read(output / "model.gguf")
    assert file.types["blk.0.attn_q.weight"] == "F16" and file.types["blk.0.attn_k.weight"] == "Q4_0"


def test_rows_that_are_no_whole_blocks_stay_float(written):
    _, output, _ = written(changed(LLAMA, mlp_width=72), "q4_0")
    types = File.read(output / "model.gguf").types
    assert types["blk.0.ffn_down.weight"] == "F32" and types["blk.0.ffn_up.weight"] == "Q4_0"


def test_values_beyond_fp16_are_named(tmp_path):
    from edge_qkv.export.gguf.exporter import export_gguf

    checkpoint = read_checkpoint(str(gguf_variants.write(tmp_path / "checkpoint", LLAMA)))
    name = "layers.1.mlp.up.weight"
    large = checkpoint.tensors[name]() * 1e6
    altered = replace(checkpoint, tensors={**checkpoint.tensors, name: lambda: large})
    with pytest.raises(InputError, match=r"--weights q4_0: blk\.1\.ffn_up\.weight .* choose f32"):
        export_gguf(altered, tmp_path / "package", weights="q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("weights", ["f32", "q4_0"])
def test_weights_that_are_not_finite_are_named(tmp_path, weights):
    from edge_qkv.export.gguf.exporter import export_gguf

    checkpoint = read_checkpoint(str(gguf_variants.write(tmp_path / "checkpoint", LLAMA)))
    name = "layers.1.attention.key.weight"
    tensor = checkpoint.tensors[name]().clone()
    tensor.view(-1)[3] = torch.nan
    altered = replace(checkpoint, tensors={**checkpoint.tensors, name: lambda: tensor})
    with pytest.raises(InputError, match=f"^{name} holds values that are not finite"):
        export_gguf(altered, tmp_path / "package", weights=weights, run_parity=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_every_weight_type_has_its_name_of_the_other_targets():
    names = {"fp32": "f32", "fp16": "f16", "int8": "q8_0", "int4": "q4_0", "q4_k": "q4_k"}
    assert {name: stored_as("gguf", name)[0] for name in names} == names


@pytest.mark.parametrize("weights", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("config", [LLAMA, GPT, changed(LLAMA, query="identity")], ids=["llama", "mpt", "identity"])
def test_sizes_are_known_before_the_export(written, config, weights):
    config = changed(config, width=256, heads=4, head_dim=64, mlp_width=512, max_positions=512, vocab_size=1024)
    _, output, _ = written(config, weights)
    planned = estimate(config, weights, target="gguf")
    assert planned.weight_bytes == pytest.approx((output / "model.gguf").stat().st_size, rel=0.003)
    assert planned.description.count("\nrows separate\n") == 1


# ---- what a package says ----


def test_a_package_describes_itself(written, bytes_tokenizer):
    config = changed(LLAMA, kv_heads=2, vocab_size=270)
    _, output, manifest = written(config, "q4_0", bytes_tokenizer, cache="fp16")
    opened = package.Package.open(output)
    assert opened.target == "gguf" and opened.config == config and opened.manifest == manifest
    assert set(manifest["files"]) == {"model.gguf", "tokenizer.json"} and manifest["parity"] is None
    file = File.read(output / "model.gguf")
    facts = {name.removeprefix("edge_qkv."): v for name, v in file.metadata.items() if name.startswith("edge_qkv.")}
    assert facts.keys() == {"description"}
    assert facts["description"].startswith("format 3\n") and "\nkv_heads 2\n" in facts["description"]
    assert file.metadata["tokenizer.ggml.merges"] == ["[none] [none]"]  # of bytes alone; llama.cpp wants some
    llama = {
        "vocab_size": 270,
        "context_length": 96,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }
    assert {name: file.get(name) for name in llama} == llama
    assert file.get("attention.layer_norm_rms_epsilon") == pytest.approx(config.norm_eps)
    assert file.metadata["general.file_type"] == 2  # mostly q4_0


@pytest.mark.parametrize(("config", "rows"), [(LLAMA, 2), (GPT, 2), (PLAIN, 1)], ids=["llama", "mpt", "deepseek2"])
def test_the_cache_is_said_to_cost_what_llama_cpp_takes(written, config, rows):
    """A K and a V, of the same projection, unless llama.cpp keeps one row: twice what the model needs."""
    _, output, manifest = written(config)
    assert manifest["cache_bytes_per_token"] == 2 * rows * config.only.head_dim * 2
    facts = inspect(str(output))
    assert facts["cache_bytes_per_token"] == {"fp32": 2 * rows * 16 * 4, "fp16": 2 * rows * 16 * 2}
    assert facts["cache_bytes"][0]["fp16"] == 1024 * manifest["cache_bytes_per_token"]


def _absent(monkeypatch, module: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))


def test_without_llama_cpp_there_is_no_parity_report_and_that_is_said(tmp_path, monkeypatch):
    _absent(monkeypatch, "llama_cpp")
    said = []
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    manifest = _export(checkpoint, tmp_path / "package", parity=True, progress=lambda what, *_: said.append(what))
    assert manifest["parity"] is None and any(what.startswith("No parity report") for what in said)


# ---- the tokenizer ----

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def test_the_bundled_tokenizer_is_written_whole(written, bundled_checkpoint):
    from tokenizers import Tokenizer

    content = json.loads((bundled_checkpoint / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps(content))
    _, output, _ = written(changed(LLAMA, vocab_size=4100), tokenizer=tokenizer)
    found = File.read(output / "model.gguf").metadata
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert [tokenizer.id_to_token(i) for i in range(4096)] == tokens[:4096] and len(tokens) == len(types) == 4100
    end = tokenizer.token_to_id("<|endoftext|>")
    assert [types[i] for i in (end, 5, 4095, 4096, 4099)] == [3, 1, 1, 5, 5]
    merges = content["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [m if isinstance(m, str) else " ".join(m) for m in merges]
    assert found["tokenizer.ggml.eos_token_id"] == end and not found["tokenizer.ggml.add_bos_token"]


def test_without_a_tokenizer_there_are_token_ids_only(written):
    _, output, _ = written(LLAMA)
    found = File.read(output / "model.gguf").metadata
    assert found["tokenizer.ggml.model"] == "no_vocab" and "tokenizer.ggml.tokens" not in found


def test_a_template_says_which_tokens_open_and_close_a_text(written, bytes_tokenizer):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(bytes_tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = {name: tokenizer.token_to_id(name) for name in ("<s>", "</s>")}
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=list(ids.items()))
    _, output, _ = written(LLAMA, tokenizer=tokenizer)
    found = File.read(output / "model.gguf").metadata
    assert found["tokenizer.ggml.add_bos_token"] and found["tokenizer.ggml.add_eos_token"]
    assert found["tokenizer.ggml.bos_token_id"] == ids["<s>"]
    assert found["tokenizer.ggml.eos_token_id"] == ids["</s>"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer NFC"),
        ({"pre_tokenizer": None}, r"pre-tokenizer without bytes as characters"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer Whitespace"),
        ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "pre-tokenizer ByteLevel with these options"),
        ({"pre_tokenizer": BYTES | {"use_regex": False}}, "pre-tokenizer that splits by nothing"),
        (
            {"post_processor": {"type": "BertProcessing", "sep": ["!", 0], "cls": ["!", 0]}},
            "post-processor BertProcessing",
        ),
    ],
)
def test_what_llama_cpps_tokenizer_has_not_is_named(tmp_path, bytes_tokenizer, change, words):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(bytes_tokenizer.to_str()) | change))
    with pytest.raises(InputError, match=rf"tokenizer\.json: llama.cpp's tokenizer has no {words}"):
        _export(checkpoint, tmp_path / "package", tokenizer=tokenizer)
    assert not (tmp_path / "package").exists()


# ---- what is refused, and what is left behind ----


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"positions": "rotary-conjugate"},
            "no rotation that is undone on the output in ",
        ),
        ({"query": "residual_gelu"}, r"no query x \+ gelu\(xW\) "),
        ({"window": 20}, "no window of every layer"),
        ({"positions": "learned"}, "no architecture with rmsnorm, swiglu and positions learned together"),
        ({"mlp": "gelu"}, "no architecture with rmsnorm, gelu and positions rotary-on-read together"),
        ({"norm_bias": True}, r"no norm bias in its architecture .* \(llama\)"),
        ({"mlp": "geglu", "biases": biases(False, True)}, r"no mlp bias in its architecture .* \(gemma\)"),
        ({"mlp": "geglu", "tied_head": False}, r"no head of its own .* \(gemma\)"),
        ({"norm": "layernorm", "mlp": "geglu"}, "no architecture with layernorm, geglu "),
        ({"norm": "layernorm", "head_dim": 20}, r"no width other than heads \* head_dim \(80\) .* \(stablelm\)"),
        ({"positions": "none", "kv_heads": 2, "head_dim": 15}, r"no odd head_dim .* \(llama\)"),
    ],
)
def test_a_model_that_llama_cpp_has_not_is_refused_before_any_work(tmp_path, monkeypatch, fields, words):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", changed(LLAMA, **fields))
    monkeypatch.setattr("edge_qkv.export.gguf.exporter.write_package", None)
    with pytest.raises(InputError, match=rf"^--target gguf: llama\.cpp has {words}.*; export to onnx or executorch$"):
        _export(checkpoint, tmp_path / "package")


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_its_graphs_have_not_are_refused_by_name(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", MIXED[name])
    with pytest.raises(InputError, match=r"^--target gguf: no graph of llama.cpp .* export to onnx or executorch$"):
        _export(checkpoint, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_window_that_hides_nothing_is_no_window(written):
    _, output, _ = written(changed(LLAMA, window=LLAMA.max_positions))
    assert File.read(output / "model.gguf").architecture == "llama"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int3"}, "--weights int3: must be one of f32, f16, q8_0, q4_0, q4_k for the target gguf"),
        ({"weights": "q4_0", "block_size": 32}, "--block-size 32: q4_0 weights take none"),
        ({"cache": "int8"}, "--cache int8: must be one of fp32, fp16 for the target gguf"),
        ({"prefill_chunk": 64}, "--prefill-chunk 64: a package for gguf takes any number of tokens"),
        ({"tokenizer": Path("no-such-tokenizer.json")}, r"no-such-tokenizer\.json"),
    ],
)
def test_wrong_options_are_named_before_any_work(tmp_path, monkeypatch, options, words):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    monkeypatch.setattr("edge_qkv.export.gguf.exporter.write_package", None)
    with pytest.raises(InputError, match=words):
        _export(checkpoint, tmp_path / "package", **options)


def test_quantising_with_llama_cpp_needs_it(tmp_path, monkeypatch):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    _absent(monkeypatch, "llama_cpp")
    with pytest.raises(InputError, match=r"--weights q4_k: needs llama-cpp-python, .* or choose q4_0"):
        _export(checkpoint, tmp_path / "package", weights="q4_k")


def test_gguf_itself_may_be_missing(tmp_path, monkeypatch):
    _absent(monkeypatch, "gguf")
    with pytest.raises(InputError, match=r"--target gguf needs gguf; install it: pip install gguf$"):
        _export(tmp_path, tmp_path / "package")


def test_a_full_disk_is_noticed_before_the_weights_are_written(tmp_path, monkeypatch):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    usage = namedtuple("usage", "total used free")(0, 0, 100_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"has 100,000 bytes free, the package needs 297,216; free some"):
        _export(checkpoint, tmp_path / "package")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError])
def test_an_export_that_ends_early_leaves_nothing(tmp_path, error):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    old = tmp_path / "package"
    _export(checkpoint, old)
    before = (old / "model.gguf").read_bytes()

    def progress(what: str, done: int, total: int) -> None:
        if what == "Writing the weights" and done > total / 2:
            raise error("enough")

    with pytest.raises(error):
        _export(checkpoint, old, weights="q8_0", progress=progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "package"]
    assert (old / "model.gguf").read_bytes() == before


def test_equal_exports_are_equal(tmp_path):
    checkpoint = gguf_variants.write(tmp_path / "checkpoint", LLAMA)
    for name in ("a", "b"):
        _export(checkpoint, tmp_path / name, weights="q4_0")
    assert (tmp_path / "a" / "model.gguf").read_bytes() == (tmp_path / "b" / "model.gguf").read_bytes()


# ---- llama.cpp ----


def test_llama_cpp_runs_what_is_written(written):
    """One of many in tests/llama, so that a run without llama-cpp-python says that it was without."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not built: run `make test-llama`")
    from llama_file import opened

    checkpoint, output, _ = written(LLAMA)
    ids = torch.arange(90)
    with opened(output / "model.gguf") as file:
        np.testing.assert_allclose(file.score(ids.tolist()), _eager(checkpoint, ids), atol=1e-4)
