"""Core ML packages, read back and run in numpy, against the eager decoder; and what their exporter refuses."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("coremltools", reason="coremltools is not installed")

from test_every_variant import VARIANTS

from conftest import TINY, changed, write_checkpoint
from eager import Expected, expect, walk
from edge_qkv import InputError
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.commands.inspect import describe, inspect
from edge_qkv.description import DESCRIPTION, FINGERPRINT
from edge_qkv.engines.coreml import StateCache, states
from edge_qkv.estimate import estimate
from edge_qkv.export import export_package
from edge_qkv.export.progress import quiet, silent
from edge_qkv.layer import biases
from edge_qkv.model import Decoder, RMSNorm
from edge_qkv.package import Package
from edge_qkv.targets import stored_as
from mixed_models import MIXED

with quiet():
    import coremltools as ct

    from edge_qkv.export.coreml import program as coreml_program
    from edge_qkv.export.coreml import weights as coreml_weights
    from edge_qkv.export.coreml.evaluator import interpreter as coreml_evaluator

CAPACITY, CHUNK = 40, 16
SMALL = changed(TINY, layers=1, max_positions=CAPACITY)
LEARNED = changed(TINY, norm="layernorm", positions="learned")
BLOBS = "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
PROGRAM = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
# One result of an fp16 program is off by 1 in 2,048 at most. The logits of these models are the work of some dozens of
# such roundings; as measured they err by at most 1 in 650 of the largest logit.
TOLERANCE = 1 / 300

# With one layer; two are in tests/sessions. Each two of positions, rows and windows; caches are fp16 whatever a
# variant says.
CONVERTED = [name for name in VARIANTS if name.rpartition(", ")[0] not in MIXED]
USUAL = ("2606 Q-MQA, biases, untied", "2510 residual_gelu", "learned, one row", "rotary-on-read, keys and values")
_SLOW = pytest.mark.slow


def _export(source: Path | str, output: Path, **options) -> dict:
    return export_package("coreml", str(source), output, **{"weights": "fp16", "parity": False} | options)


class Runs:
    """A conversation with an exported program."""

    def __init__(self, package: Path) -> None:
        opened = Package.open(package)
        self.functions = functools.cache(lambda name: coreml_evaluator.load(package / "model.mlpackage", name))
        self.cache = StateCache(opened.config, opened.manifest["prefill_chunk"], self.functions)
        self.past = 0

    def rewind(self, length: int) -> None:
        self.past = length

    def score(self, tokens: Sequence[int], chunk: int) -> np.ndarray:
        parts = []
        for start in range(0, len(tokens), min(chunk, self.cache.most_tokens)):
            part = np.array(tokens[start : start + min(chunk, self.cache.most_tokens)], np.int32)
            parts.append(self.cache.evaluate(part, self.past, every=True))
            last = self.cache.evaluate(part, self.past, every=False)  # prefill's row of logits is the same as score's
            np.testing.assert_allclose(last[0], parts[-1][-1], rtol=0, atol=TOLERANCE * np.abs(parts[-1]).max())
            self.past += len(part)
        return np.concatenate(parts)


def _expected(decoder: Decoder, count: int) -> Expected:
    expected = expect(decoder, count)
    return replace(expected, tolerance=TOLERANCE * np.abs(expected.logits).max())


def _spec(package: Path):
    return ct.proto.Model_pb2.Model.FromString((package / PROGRAM).read_bytes())


def _operations(package: Path, function: str):
    (block,) = _spec(package).mlProgram.functions[function].block_specializations.values()
    return block.operations


def _offsets(package: Path, function: str) -> dict[int, int]:
    """Where the constants of a function are in the file of weights -> how many times it has each."""
    found: dict[int, int] = {}
    for call in _operations(package, function):
        values = [bound.value for argument in call.inputs.values() for bound in argument.arguments]
        for value in (*values, call.attributes["val"]) if "val" in call.attributes else values:
            if value.HasField("blobFileValue"):
                found[value.blobFileValue.offset] = found.get(value.blobFileValue.offset, 0) + 1
    return found


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", SMALL)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A package with int4 weights."""
    folder = tmp_path_factory.mktemp("small")
    config = changed(SMALL, width=64, mlp_width=72, vocab_size=1000)
    _export(write_checkpoint(folder / "checkpoint", config), folder / "package", weights="int4", prefill_chunk=CHUNK)
    return folder / "package"


# ---- what is computed ----


def _check(source: Path, package: Path, tolerance: float = TOLERANCE, **window: int) -> None:
    """Exports a checkpoint and compares the program with the eager decoder, and its states with the plan."""
    _export(source, package, prefill_chunk=CHUNK, capacity=CAPACITY, **window)
    config, runs = Package.open(package).config, Runs(package)
    expected = expect(replace(read_checkpoint(str(source)), config=config).load(), CAPACITY)
    expected = replace(expected, tolerance=tolerance * np.abs(expected.logits).max())
    walk(runs.score, runs.rewind, expected, CHUNK)
    found = {name: runs.functions("decode").states[name].shape for name in runs.functions("decode").states}
    assert found == states(config)
    rows = config.with_layers(window=0, sinks=0).cache_bytes(CAPACITY, "fp16")
    assert sum(2 * np.prod(shape) for shape in found.values()) == rows == runs.cache.bytes
    assert runs.functions("decode").states == runs.functions("prefill").states == runs.functions("score").states


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith(USUAL) else _SLOW) for name in CONVERTED]
)
def test_every_variant_is_what_the_decoder_computes(name, tmp_path):
    VARIANTS[name].write(tmp_path / "checkpoint", layers=1)
    _check(tmp_path / "checkpoint", tmp_path / "package", **VARIANTS[name].window)


def _rounding(source: Path) -> float:
    """How far fp16 weights alone take logits from the checkpoint's, of the largest."""
    read = read_checkpoint(str(source))
    from edge_qkv import attention

    expected = expect(read.load(), CAPACITY).logits
    rounded = expect(coreml_weights.load(read, attention.attend, stored_as("coreml", "fp16")[1], silent), CAPACITY)
    return np.abs(rounded.logits - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("mla", "rows of an earlier layer") else _SLOW) for name in MIXED]
)
def test_layers_that_differ_are_what_the_decoder_computes(name, tmp_path):
    """Some of these models make much of a rounding: scores that are not scaled, norms of what was added. All that a
    program rounds is some times what its weights are."""
    source = write_checkpoint(tmp_path / "checkpoint", MIXED[name])
    _check(source, tmp_path / "package", max(TOLERANCE, 5 * _rounding(source)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_softcap", 1e-9), ("embedding_scale", 1e6), ("logit_scale", 1e-9), ("attention_scale", 7e4)],
)
def test_factors_that_fp16_has_not_are_named(field, value, tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", changed(SMALL, **{field: value}))
    with pytest.raises(InputError, match=f"^config field {field} = .*: fp16, in which Core ML computes"):
        _export(source, tmp_path / "package")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_HIDDEN", 0.0),  # later rows are seen, and rows of an earlier conversation
        ("_rotate", lambda spec, x, cos, sin, right=coreml_program._rotate: right(spec, x, cos, -sin)),
    ],
)
def test_a_wrong_lowering_is_noticed(name, wrong, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(coreml_program, name, wrong)
    _export(checkpoint, tmp_path / "package", prefill_chunk=CHUNK)
    runs = Runs(tmp_path / "package")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        walk(runs.score, runs.rewind, _expected(read_checkpoint(str(checkpoint)).load(), CAPACITY), CHUNK)


@pytest.mark.parametrize(
    ("config", "weights", "block"),
    [
        (changed(SMALL, width=64, mlp_width=72), "int4", None),  # blocks of 32, 16 for the heads, rows of 8 bits for 72
        (changed(LEARNED, layers=1, max_positions=CAPACITY, mlp="gelu", tied_head=False), "int4", 64),
        (changed(SMALL, biases=biases(attention=True, mlp=True), norm_bias=True), "int8", None),
    ],
)
def test_quantised_weights_are_those_that_were_stored(config, weights, block, tmp_path):
    """Logits are those of the quantised decoder, run eagerly: its error is no other."""
    source = write_checkpoint(tmp_path / "checkpoint", config)
    _export(source, tmp_path / "package", weights=weights, block_size=block, prefill_chunk=CHUNK)
    read = read_checkpoint(str(source))
    how = stored_as("coreml", weights, block)[1]
    from edge_qkv import attention

    quantised = _expected(coreml_weights.load(read, attention.attend, how, silent), CAPACITY)
    error = quantised.logits - expect(read.load(), CAPACITY).logits
    assert 0 < error.std() < 0.3 * quantised.logits.std()
    runs = Runs(tmp_path / "package")
    walk(runs.score, runs.rewind, quantised, CHUNK)


def test_a_residual_stream_whose_squares_fp16_has_not(tmp_path):
    read = read_checkpoint(str(write_checkpoint(tmp_path / "plain", SMALL)))
    large = read.tensors["embedding.weight"]() * 2000
    assert large.abs().max() > 900  # the square of 256 is above the largest fp16
    source = replace(read, tensors={**read.tensors, "embedding.weight": lambda: large})
    from edge_qkv.export.coreml.exporter import export_coreml

    export_coreml(source, tmp_path / "package", weights="fp16", prefill_chunk=CHUNK, run_parity=False)
    expected = _expected(source.load(), CAPACITY)
    np.testing.assert_allclose(
        Runs(tmp_path / "package").score(expected.ids, CHUNK), expected.logits, atol=expected.tolerance
    )


@pytest.mark.parametrize("scale", [1e-4, 1.0, 60_000.0])
def test_the_scaled_norm_is_the_norm(scale):
    norm = RMSNorm(48, 1e-5, bias=True)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    x = x / x.abs().max() * scale
    torch.testing.assert_close(coreml_weights.ScaledRMSNorm(norm)(x), norm(x), rtol=2e-5, atol=1e-6)


class Reads(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        logits, caches = super().forward(input_ids, past, caches, logit_rows)
        return logits + caches[0][1].float().sum(), caches


class Writes(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        caches[0][1].mul_(0.5)
        return super().forward(input_ids, past, caches, logit_rows)


class Copies(Decoder):
    """Attends over a second copy of the rows, one for each product."""

    def __init__(self, config, attend):
        def twice(spec, query, key, value, caches, past, tables, key_weight):
            out, _ = attend(spec, query, key, value, caches, past, tables, key_weight)
            return out + caches[1].float().repeat(1, 2, 1, 1)[0, 1, :1, :1], caches

        super().__init__(config, twice)


@pytest.mark.parametrize("kind", [Decoder, Reads, Writes, Copies])
def test_a_program_that_copies_a_state_is_noticed(kind, tmp_path):
    decoder = kind(SMALL, coreml_program.attend)
    lower = functools.partial(coreml_program.lower, decoder.eval(), CHUNK, "", tmp_path / "model.mlpackage", silent)
    if kind is Decoder:
        lower()
        return
    with pytest.raises(RuntimeError, match="does not update the state kv_0 in place: "):
        lower()


# ---- what is written ----


def test_functions_have_the_contract_of_the_engine(small):
    spec, config = _spec(small), Package.open(small).config
    shapes = {
        function.name: (
            {given.name: list(given.type.multiArrayType.shape) for given in function.input},
            {given.name: list(given.type.multiArrayType.shape) for given in function.output},
            {state.name: list(state.type.stateType.arrayType.shape) for state in function.state},
        )
        for function in spec.description.functions
    }
    states, vocabulary = {"kv_0": [1, 1, CAPACITY, 8]}, config.vocab_size
    assert shapes == {
        "decode": ({"input_ids": [1, 1], "past": [1]}, {"logits": [1, 1, vocabulary]}, states),
        "prefill": ({"input_ids": [1, CHUNK], "past": [1], "logit_row": [1]}, {"logits": [1, 1, vocabulary]}, states),
        "score": ({"input_ids": [1, CHUNK], "past": [1]}, {"logits": [1, CHUNK, vocabulary]}, states),
    }
    assert spec.description.defaultFunctionName == "decode" and spec.specificationVersion == 9  # of iOS 18
    facts = spec.description.metadata.userDefined
    assert set(facts) >= {DESCRIPTION, FINGERPRINT} and len(facts[FINGERPRINT]) == 64
    assert not {name for name in facts if name.startswith("edge_qkv.")} - {DESCRIPTION, FINGERPRINT}
    lines = facts[DESCRIPTION].splitlines()
    planned = estimate(config, "int4", target="coreml")
    assert lines[0] == "format 3" and lines[-1] == "pattern layer"
    for name, value in {
        "cache": "fp16",
        "weight_bits": 4,
        "block_size": 32,
        "matrix_bytes": planned.matrix_bytes,
        "table_bytes": planned.table_bytes,
        "prefill_chunk": CHUNK,
        "cache_rows": CAPACITY,
        "operator": 2,
        "positions": "rotary-conjugate",
    }.items():
        assert f"{name} {value}" in lines


def test_functions_share_their_weights(small):
    """The file has what one function needs, and all functions name the same places of it."""
    decode, prefill, score = (set(_offsets(small, function)) for function in coreml_program.FUNCTIONS)
    # What differs are the numbers of the tokens of a call, which decode has not.
    assert len(decode - score) == 0 and len(prefill ^ score) == 0 and len(score - decode) <= 2
    needed = estimate(Package.open(small).config, "int4", target="coreml").weight_bytes
    assert (small / BLOBS).stat().st_size < needed  # of one function, and the program


def test_a_tied_embedding_and_head_are_stored_once(tmp_path):
    sizes = {}
    for tied in (True, False):
        config = changed(SMALL, vocab_size=3000, tied_head=tied)
        source = write_checkpoint(tmp_path / f"checkpoint {tied}", config)
        _export(source, tmp_path / f"{tied}", weights="int8")
        sizes[tied] = (tmp_path / f"{tied}" / BLOBS).stat().st_size
    once = 3000 * 32 + 3000 * 2  # codes and scales
    assert once <= sizes[False] - sizes[True] < once + 500
    calls = _operations(tmp_path / "True", "decode")
    made = {output.name for call in calls if call.type.startswith("constexpr") for output in call.outputs}
    taken = {kind: [] for kind in ("gather", "linear")}
    for call in calls:
        if call.type in taken:
            taken[call.type].append(call.inputs["weight" if call.type == "linear" else "x"].arguments[0].name)
    assert taken["linear"][-1] == taken["gather"][-1] and taken["gather"][-1] in made


@pytest.mark.parametrize(
    ("config", "weights", "block"),
    [
        (changed(TINY, vocab_size=4096, width=384, heads=6, head_dim=64, mlp_width=1032), "int4", 64),
        (changed(LEARNED, vocab_size=4096, width=384, tied_head=False), "int8", None),
        (
            changed(
                TINY,
                vocab_size=4096,
                width=384,
                sharing="qkv",
                biases=biases(attention=False, mlp=True),
                max_positions=4096,
            ),
            "fp16",
            None,
        ),
    ],
)
def test_the_plan_knows_the_sizes_before_the_export(config, weights, block, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    manifest = _export(f"random:{tmp_path / 'config.json'}", tmp_path / "package", weights=weights, block_size=block)
    planned = estimate(config, weights, block, "coreml")
    assert planned.weight_bytes == pytest.approx(Package.open(tmp_path / "package").weight_bytes, rel=0.005)
    assert planned.prefill_chunk == manifest["prefill_chunk"] == 32
    assert f"block_size {block or 0}\n" in planned.description and manifest["block_size"] == block


def test_equal_exports_have_equal_weights(checkpoint, tmp_path):
    first, second = (_export(checkpoint, tmp_path / name, weights="int4") for name in ("first", "second"))
    assert first["files"][BLOBS] == second["files"][BLOBS] and first["files"][PROGRAM] == second["files"][PROGRAM]


def test_what_does_not_suit_the_neural_engine_is_reported(tmp_path):
    from edge_qkv.export.coreml.exporter import misfits

    assert misfits(changed(TINY, vocab_size=64, head_dim=32, mlp_width=64), 32) == []
    assert misfits(changed(TINY, head_dim=62, vocab_size=50304, max_positions=32768), 40) == [
        "head_dim 62 is no multiple of 32",
        "mlp_width 48 is no multiple of 32",
        "prefill chunk 40 is no multiple of 32",
        "vocab_size 50304 is above 16384",
        "capacity 32768 is above 16384",
    ]


def test_inspect_says_what_a_package_has(small):
    text = describe(str(small), inspect(str(small)))
    assert "coreml package" in text and "tokens of a call   16" in text
    assert "Neural Engine      head_dim 8 is no multiple of 32; mlp_width 72 is no multiple of 32" in text


def test_the_parity_report_is_of_the_program_as_it_was_written(checkpoint, tmp_path):
    parity = _export(checkpoint, tmp_path / "package", parity=True)["parity"]
    assert parity["engine"] == "edge-qkv's evaluator of Core ML programs"
    assert 0 < parity["max_logit_error"] < 0.02 and parity["top1_agreement"] > 0.98


def test_an_export_is_silent(checkpoint, tmp_path):
    """coremltools draws bars, and warns at import and of versions that it was not tested with."""
    script = (
        "import sys; from pathlib import Path; from edge_qkv.export import export_package; "
        "export_package('coreml', sys.argv[1], Path(sys.argv[2]), parity=False)"
    )
    done = subprocess.run([sys.executable, "-c", script, checkpoint, tmp_path / "package"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---- what is refused, and what is left behind ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"weights": "fp32"},
            r"--weights fp32: Core ML computes and keeps its states in fp16; choose fp16, int8 or int4",
        ),
        ({"weights": "8da4w"}, r"--weights 8da4w: must be one of fp16, int8, int4 for the target coreml"),
        ({"weights": "int4", "block_size": 48}, r"--block-size 48: must be one of 32, 64, 128"),
        ({"weights": "int8", "block_size": 32}, r"--block-size 32: int8 weights take none"),
        ({"cache": "int8"}, r"--cache int8: must be one of fp16 for the target coreml"),
        ({"cache": "fp32"}, r"--cache fp32: must be one of fp16 for the target coreml"),
        ({"cache": "int4"}, r"--cache int4: must be one of fp16 for the target coreml"),
        ({"prefill_chunk": 1}, r"--prefill-chunk 1 .* from 2 to 40 tokens"),
        ({"prefill_chunk": 0}, r"--prefill-chunk 0 "),
        ({"prefill_chunk": 41}, r"--prefill-chunk 41 "),
        ({"capacity": 20, "prefill_chunk": 21}, r"--prefill-chunk 21 .* from 2 to 20 tokens"),
        ({"capacity": 1}, r"--capacity 1: .* at least 2"),
        ({"capacity": 41}, r"--capacity = 41: .* 40, the most this model allows"),
        ({"tokenizer": Path("no-such-tokenizer.json")}, r"no-such-tokenizer\.json"),
    ],
)
def test_wrong_options_are_named_before_any_work(checkpoint, tmp_path, monkeypatch, options, words):
    def work(*_):
        raise AssertionError("weights are read")

    with monkeypatch.context() as patch:
        patch.setattr("edge_qkv.export.coreml.weights.load", work)
        with pytest.raises(InputError, match=words):
            _export(checkpoint, tmp_path / "package", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.mlp.down.weight", "layers.0.mlp_norm.weight"])
def test_weights_that_are_not_finite_are_named(checkpoint, tmp_path, name):
    from edge_qkv.export.coreml.exporter import export_coreml

    read: Checkpoint = read_checkpoint(str(checkpoint))
    tensor = read.tensors[name]().clone()
    tensor.view(-1)[3] = torch.nan
    with pytest.raises(InputError, match=f"^{name} holds values that are not finite"):
        altered = replace(read, tensors={**read.tensors, name: lambda: tensor})
        export_coreml(altered, tmp_path / "package", run_parity=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("step, after", [("Lowering", 0.0), ("Lowering", 0.7), ("Writing", 0.0), ("Writing", 0.02)])
def test_an_interrupted_export_leaves_nothing(checkpoint, tmp_path, monkeypatch, step, after):
    """Seconds after a step began; what was at its place before stays there, and nothing in the system's directory for
    temporary files."""
    old, elsewhere = tmp_path / "package", tmp_path / "temporary"
    old.mkdir()
    elsewhere.mkdir()
    (old / "edge_qkv.json").write_text('{"files": {}}')

    def progress(what: str, *_: int) -> None:
        if what.startswith(step):
            signal.setitimer(signal.ITIMER_REAL, after or 1e-6)
        elif what.startswith("Hashing"):  # it was fast
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    try:
        with pytest.raises(KeyboardInterrupt):
            _export(checkpoint, old, progress=progress)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "package", "temporary"]
    assert [path.name for path in (*old.iterdir(), *elsewhere.iterdir())] == ["edge_qkv.json"]
    assert (old / "edge_qkv.json").read_text() == '{"files": {}}'
