"""ExecuTorch packages against the eager decoder, and what their exporter refuses."""

from __future__ import annotations

import hashlib
import signal
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, changed, needs, write_checkpoint
from eager import TOLERANCE, expect, walk_session
from edge_qkv import InputError, Session, attention
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.description import DESCRIPTION, FINGERPRINT, OPERATOR
from edge_qkv.estimate import estimate
from edge_qkv.export import export_package, operator
from edge_qkv.export.progress import silent
from edge_qkv.layer import LayerSpec, biases
from edge_qkv.model import Decoder
from edge_qkv.package import Package
from edge_qkv.targets import stored_as
from mixed_models import MIXED

SMALL = changed(TINY, layers=1)
# Nothing in it is whole groups of 32: neither the width, nor that of the heads, nor that of the MLP.
ODD = changed(
    TINY,
    layers=1,
    width=40,
    head_dim=12,
    mlp_width=56,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    tied_head=False,
    norm_bias=True,
    biases=biases(attention=True, mlp=True),
)
WIDE = changed(TINY, layers=1, width=64)  # its embedding has 4 bits, and groups of 64 are longer than some rows


def _of_kinds(config: ModelConfig, *pattern: str, **changes: object) -> ModelConfig:
    """Fewer layers: seconds less for each."""
    kinds = {name: config.kinds[name] for name in pattern}
    return replace(config, kinds=kinds, pattern=pattern, **changes)


# The second layer reads the first's rows; both have embeddings of their own, of 4 bits in one table.
SHARED = _of_kinds(MIXED["rows of an earlier layer"], "local", "late_local", input_embeddings=16)


@pytest.fixture(autouse=True)
def _executorch():
    needs("executorch")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", SMALL)


def _export(checkpoint: Path, output: Path, **options) -> dict:
    return export_package("executorch", str(checkpoint), output, **{"weights": "fp32", "parity": False} | options)


def _altered(checkpoint: Path, name: str) -> Checkpoint:
    """The checkpoint with one value of a tensor that is not finite."""
    read = read_checkpoint(str(checkpoint))
    tensor = read.tensors[name]().clone()
    tensor.view(-1)[3] = torch.nan
    return replace(read, tensors={**read.tensors, name: lambda: tensor})


# ---- what is computed ----


@pytest.mark.parametrize(
    ("config", "weights", "block", "allowed"),
    [
        pytest.param(ODD, "8da4w", None, 0.3, id="padded, 8da4w"),
        pytest.param(ODD, "8da8w", None, 0.03, id="padded, 8da8w", marks=pytest.mark.slow),
        pytest.param(WIDE, "8da4w", 64, 0.3, id="embedding of 4 bits, 8da4w", marks=pytest.mark.slow),
        # Two layers of 4 bits, and a table of 4 bits for each of them.
        pytest.param(SHARED, "8da4w", 32, 0.5, id="rows of an earlier layer, 8da4w", marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_are_those_of_torchao(random_package, tmp_path, config, weights, block, allowed):
    """Logits are those of the quantised decoder, run eagerly: its error, `allowed` of their deviation, is no other."""
    from edge_qkv.export.executorch import weights as executorch_weights

    decoder, package = random_package("executorch", config, weights=weights, block_size=block)
    exact = expect(decoder, config.max_positions)
    how = stored_as("executorch", weights, block)[1]
    read = read_checkpoint(str(write_checkpoint(tmp_path / "checkpoint", config)))
    quantised = expect(executorch_weights.load(read, attention.attend, how, silent), config.max_positions)
    error = quantised.logits - exact.logits
    assert 0 < error.std() < allowed * exact.logits.std()
    with Session(package, config.max_positions, prefill_chunk=16) as session:
        logits = session.score(exact.ids)
    # An activation in the middle of two codes may be rounded to either.
    assert (logits - quantised.logits).std() < 0.1 * error.std()
    np.testing.assert_allclose(logits, quantised.logits, atol=0.5 * np.abs(error).max())


def test_a_package_for_fewer_tokens_computes_the_same(random_package):
    decoder, package = random_package("executorch", ODD, chunk=2, capacity=20)
    expected = expect(decoder, 20)
    opened = Package.open(package)
    assert opened.config.max_positions == 20 and opened.manifest["prefill_chunk"] == 2
    with Session(package, 20) as session:
        np.testing.assert_allclose(session.score(expected.ids), expected.logits, atol=TOLERANCE)
    with pytest.raises(InputError, match=r"context = 21: .* 20, the most this model allows"):
        Session(package, 21)


@pytest.fixture
def _eager_operators():
    """The operators of a traced program as the reference has them, so that it can be evaluated."""
    names = {"unified_kv_attention": operator.INPUTS}
    names["unified_kv_read_attention"] = tuple(name for name in operator.INPUTS if name not in ("kv", "value"))
    positions = {"conjugate": "rotary-conjugate", "on_read": "rotary-on-read", "none": "none"}

    def implementation(inputs: tuple[str, ...]):
        def attend(*arguments: object) -> torch.Tensor:
            found = dict(zip((*inputs, *operator.ATTRIBUTES), arguments, strict=True))
            cache, separate = found["cache"], found["value_cache"] is not None
            spec = LayerSpec(
                heads=found["num_heads"],
                head_dim=cache.shape[-1],
                kv_heads=cache.shape[1],
                mlp_width=1,
                sharing="qkv" if separate else "q-k=v",
                attention_scale=found["scale"],
                positions=positions[found["rotary"]],
                key_weight=found["key_weight"] is not None,
                **{name: found[name] for name in ("rotary_dim", "rotary_offset", "value_dim", "window", "sinks")},
            )
            caches = (cache, found["value_cache"], found["cache_scale"], found["value_cache_scale"])
            tables = None if found["cos"] is None else (found["cos"], found["sin"])
            caches = tuple(tensor for tensor in caches if tensor is not None)
            rest = caches, found["past"], tables, found["key_weight"]
            return attention.attend(spec, found["query"], found.get("kv"), found.get("value"), *rest)[0]

        return attend

    with torch.library._scoped_library("edge_qkv", "IMPL") as library:
        for name, inputs in names.items():
            library.impl(name, implementation(inputs), "CPU")
        yield


@pytest.mark.parametrize(("name", "cache"), zip(MIXED, (*CACHE_BYTES, *CACHE_BYTES), strict=True))
def test_the_program_of_layers_that_differ_is_the_decoder(_eager_operators, name, cache, tmp_path):
    """Before it is lowered, with the reference in the operators' places."""
    from edge_qkv.export.executorch import program as executorch_program
    from edge_qkv.export.executorch import weights as executorch_weights

    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "checkpoint", MIXED[name])))
    expected, chunk = expect(checkpoint.load(), 40, cache), 8
    how = stored_as("executorch", "fp32")[1]
    decoder = executorch_weights.load(checkpoint, executorch_program.attend, how, silent)
    traced = executorch_program.trace(decoder, cache, chunk).module()
    for start in range(0, 40, chunk):
        part = slice(start, start + chunk)
        with torch.no_grad():
            logits = traced(torch.tensor(expected.ids[part])[None], torch.tensor(start), torch.arange(chunk))[0]
        np.testing.assert_allclose(
            logits, expected.logits[part], atol=TOLERANCE if cache == "fp32" else expected.tolerance
        )


@pytest.mark.parametrize(
    ("config", "cache"),
    [
        (_of_kinds(MIXED["mla"], "layer"), "int8"),
        (_of_kinds(MIXED["gemma 4"], "local", "global"), "fp32"),
        *(
            pytest.param(config, cache, marks=pytest.mark.slow)
            for config, cache in zip(MIXED.values(), ("fp16", "int8", "fp32") * 2, strict=True)
        ),
    ],
    ids=["mla, a layer", "gemma 4, two layers", *MIXED],
)
def test_a_session_of_layers_that_differ_matches_the_decoder(random_package, config, cache):
    decoder, package = random_package("executorch", config, cache)
    expected = expect(decoder, 40, cache)
    with Session(package, 40, prefill_chunk=16) as session:
        walk_session(session, expected, 16)


@pytest.mark.parametrize("cache", CACHE_BYTES)
@pytest.mark.parametrize("name", MIXED)
def test_the_rows_of_every_cache_are_whole_pages(name, cache):
    from edge_qkv.export.executorch.program import PAGE_BYTES, cache_rows

    tensors, rows = MIXED[name].cache_tensors(cache), cache_rows(MIXED[name], cache)
    assert rows >= MIXED[name].max_positions
    assert all(rows * tensor.row_bytes % PAGE_BYTES == 0 for tensor in tensors)
    assert any(rows // 2 * tensor.row_bytes % PAGE_BYTES for tensor in tensors), "fewer would do"


class Reads(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        logits, caches = super().forward(input_ids, past, caches, logit_rows)
        return logits + caches[0][0].sum(), caches


class Writes(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        caches[0][0].mul_(0.5)
        return super().forward(input_ids, past, caches, logit_rows)


@pytest.mark.parametrize("kind", [Reads, Writes])
def test_a_program_that_copies_a_cache_is_noticed(kind):
    from edge_qkv.export.executorch import program as executorch_program

    with pytest.raises(RuntimeError, match=r"caches are touched by other operators: .*kv_0"):
        executorch_program.lower(kind(SMALL, executorch_program.attend), "fp32", 16, {})


def test_rows_are_read_after_they_are_written(random_package):
    from edge_qkv.export.executorch.program import cache_users, check

    program = _program(random_package("executorch", SHARED, weights="8da4w", block_size=32)[1])
    users = cache_users(SHARED, "fp32")
    both = ["edge_qkv::unified_kv_attention", "edge_qkv::unified_kv_read_attention"]
    assert users == {"key_0": both, "value_0": both}
    check(program, users)
    plan = next(plan for plan in program.execution_plan if plan.name == "forward")
    instructions = plan.chains[0].instructions
    calls = [(i, call.instr_args) for i, call in enumerate(instructions) if hasattr(call.instr_args, "op_index")]
    first, second = (i for i, call in calls if plan.operators[call.op_index].name in both)
    instructions[first], instructions[second] = instructions[second], instructions[first]
    with pytest.raises(RuntimeError, match=r"caches are touched by other operators: .*key_0"):
        check(program, users)


# ---- what is written ----


def _program(package: Path):
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary((package / "model.pte").read_bytes()).program


def _texts(package: Path) -> dict[str, str]:
    """By which the program describes itself."""
    plans = (plan for plan in _program(package).execution_plan if plan.name != "forward")
    return {plan.name: plan.values[plan.outputs[0]].val.string_val for plan in plans}


def _facts(description: str) -> dict[str, list[str]]:
    """The lines of a description by name."""
    found: dict[str, list[str]] = {}
    for line in description.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("8da4w", marks=pytest.mark.slow),
        pytest.param("8da8w", marks=pytest.mark.slow),
        "rows of an earlier layer, 8da4w",
    ],
)
def test_an_estimate_knows_what_an_export_writes(random_package, bundled_checkpoint, tmp_path, weights):
    """Of the bundled model, without --slow of its first layer, which takes a ninth of the time to lower."""
    from edge_qkv.export.executorch import program as executorch_program
    from edge_qkv.export.executorch.exporter import export_executorch

    if weights in ("8da4w", "8da8w"):
        whole, package, block = read_checkpoint(str(bundled_checkpoint)), tmp_path / "package", None
        if weights == "8da8w":
            whole = replace(whole, config=replace(whole.config, pattern=whole.config.pattern[:1]))
        export_executorch(whole, package, weights=weights, run_parity=False)
        chunk, cache = 0, "fp16"
    else:
        weights, block, chunk, cache = "8da4w", 32, 16, "fp32"
        package = random_package("executorch", SHARED, weights=weights, block_size=block)[1]
    texts, opened = _texts(package), Package.open(package, verify=False)
    assert set(texts) == {DESCRIPTION, FINGERPRINT}
    estimated = estimate(opened.config, weights, block, "executorch", chunk, cache)
    expected, found = _facts(estimated.description), _facts(texts[DESCRIPTION])
    rows = str(executorch_program.cache_rows(opened.config, cache))
    own = {"cache_rows": [rows], "operator": [str(OPERATOR)], "executorch": [version("executorch")]}
    assert found == expected | own
    if block is None:  # of a real size
        assert estimated.weight_bytes == pytest.approx((package / "model.pte").stat().st_size, rel=0.005)


@pytest.mark.slow
def test_equal_exports_have_the_same_fingerprint_and_others_another(random_package, checkpoint, tmp_path):
    _export(checkpoint, tmp_path / "again", cache="fp32", prefill_chunk=16)
    packages = [
        random_package("executorch", SMALL)[1],
        tmp_path / "again",
        random_package("executorch", SMALL, seed=1)[1],
    ]
    prints = [_texts(package)[FINGERPRINT] for package in packages]
    assert prints[0] == prints[1] != prints[2]
    content = (packages[0] / "model.pte").read_bytes()
    assert hashlib.sha256(content.replace(prints[0].encode(), b"0" * 64)).hexdigest() == prints[0]


# ---- what is refused, and what is left behind ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_chunk": 1}, r"--prefill-chunk 1 .* from 2 to 96 tokens"),
        ({"prefill_chunk": 0}, r"--prefill-chunk 0 "),
        ({"prefill_chunk": 97}, r"--prefill-chunk 97 "),
        ({"capacity": 50, "prefill_chunk": 51}, r"--prefill-chunk 51 .* from 2 to 50 tokens"),
        ({"capacity": 97}, r"--capacity = 97: .* 96, the most this model allows"),
        ({"capacity": 1}, r"--capacity 1: .* at least 2"),
        ({"weights": "int3"}, r"--weights int3: must be one of fp32, 8da8w, 8da4w for the target executorch"),
        ({"weights": "8da4w", "block_size": 48}, r"--block-size 48: must be one of 32, 64, 128"),
        ({"weights": "8da8w", "block_size": 32}, r"--block-size 32: 8da8w weights take none"),
        ({"cache": "int4"}, r"--cache int4: must be one of fp32, fp16, int8"),
        ({"tokenizer": Path("no-such-tokenizer.json")}, r"no-such-tokenizer\.json"),
    ],
)
def test_wrong_options_are_named_before_any_work(checkpoint, tmp_path, monkeypatch, options, words):
    def work(*_):
        raise AssertionError("weights are read")

    with monkeypatch.context() as patch:
        patch.setattr("edge_qkv.export.executorch.weights.load", work)
        with pytest.raises(InputError, match=words):
            _export(checkpoint, tmp_path / "package", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_call_takes_no_more_tokens_than_buffers_can_be_planned_for(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", changed(TINY, layers=1, max_positions=8192))
    with pytest.raises(InputError, match=r"--prefill-chunk 4097 .* from 2 to 4,096 tokens"):
        _export(checkpoint, tmp_path / "package", prefill_chunk=4097)


@pytest.mark.parametrize("weights", ["fp32", "8da8w"])
@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.mlp.down.weight", "layers.0.mlp_norm.weight"])
def test_weights_that_are_not_finite_are_named(checkpoint, tmp_path, weights, name):
    from edge_qkv.export.executorch.exporter import export_executorch

    with pytest.raises(InputError, match=f"^{name} holds values that are not finite"):
        export_executorch(_altered(checkpoint, name), tmp_path / "package", weights=weights, run_parity=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_an_interrupted_export_leaves_nothing(checkpoint, tmp_path, after):
    """Seconds after lowering began; what was at its place before stays there."""
    old = tmp_path / "package"
    old.mkdir()
    (old / "edge_qkv.json").write_text('{"files": {}}')

    def progress(what: str, *_: int) -> None:
        if what.startswith("Lowering"):
            signal.setitimer(signal.ITIMER_REAL, after or 1e-6)
        elif what.startswith("Writing"):  # it was fast
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGALRM)

    handlers = {
        signal.SIGALRM: lambda *_: signal.raise_signal(signal.SIGINT),
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt):
            _export(checkpoint, old, progress=progress)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "package"]
    assert [path.name for path in old.iterdir()] == ["edge_qkv.json"]
    assert (old / "edge_qkv.json").read_text() == '{"files": {}}'
