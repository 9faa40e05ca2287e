"""ONNX packages in plain ONNX Runtime against the eager decoder that they were exported from."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edge_qkv import files, package
from edge_qkv.attention import quantize_rows
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.config import ModelConfig
from edge_qkv.description import DESCRIPTION, FINGERPRINT
from edge_qkv.errors import InputError
from edge_qkv.estimate import estimate
from edge_qkv.export import export_package
from edge_qkv.export.onnx import stock as onnx_stock
from edge_qkv.export.onnx.exporter import export_onnx
from edge_qkv.export.onnx.function import OUTPUTS, op_types, seen_alike
from edge_qkv.export.operator import INPUTS
from edge_qkv.export.quantize import dequantize, quantize
from edge_qkv.layer import LayerSpec, biases
from edge_qkv.model import Decoder
from mixed_models import MIXED

CHUNK, CAPACITY = 10, 24
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)

_BASE = dict(
    vocab_size=131,
    max_positions=40,
    positions="learned",
    layers=2,
    width=48,
    heads=4,
    head_dim=12,
    kv_heads=4,
    mlp_width=56,
)
# Fields that differ from those. Between them: the eight sharings, query modes, positions (whole and partial rotation),
# MLPs, norms, biases, heads.
CASES: dict[str, dict] = {
    "QKV": dict(norm_bias=True, biases=biases(attention=True, mlp=True)),
    "Q=K-V": dict(sharing="q=k-v", positions="rotary-conjugate", norm="rmsnorm", mlp="swiglu", tied_head=False),
    "Q-K=V": dict(
        sharing="q-k=v",
        positions="rotary-conjugate",
        norm="rmsnorm",
        norm_bias=True,
        mlp="geglu",
        biases=biases(attention=False, mlp=True),
    ),
    "Q=K=V": dict(sharing="q=k=v", positions="rotary-on-read", mlp="gelu_tanh", tied_head=False),
    "GQA": dict(kv_heads=2, positions="rotary-on-read", rotary_dim=6, query="residual", mlp="swiglu"),
    "MQA": dict(kv_heads=1, positions="none", query="identity", attention_scale=0.2),
    "Q-GQA": dict(sharing="q-k=v", kv_heads=2, positions="rotary-on-read", rotary_dim=8, query="residual_gelu"),
    "Q-MQA": dict(
        sharing="q-k=v", kv_heads=1, positions="rotary-conjugate", rotary_dim=6, norm="rmsnorm", mlp="swiglu"
    ),
    "Q-MQA, head_dim 62": dict(
        sharing="q-k=v", kv_heads=1, width=744, heads=12, head_dim=62, query="identity", norm_bias=True, layers=1
    ),
}


def config_of(case: str, **changes) -> ModelConfig:
    """A model of `CASES` with other fields, or one of `MIXED`."""
    if case in MIXED:
        return MIXED[case]
    return ModelConfig.uniform(**_BASE | CASES[case] | changes)


def random_checkpoint(config: ModelConfig, tokenizer: Path | None = None) -> Checkpoint:
    """Weights large enough that every part of the model shows in the logits, which are of order 1."""
    decoder = Decoder(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            std = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(std=std, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    state = decoder.state_dict()
    return of_tensors(config, {name: state[name] for name in decoder.weight_names()}, tokenizer)


def of_tensors(config: ModelConfig, tensors: dict[str, torch.Tensor], tokenizer: Path | None = None) -> Checkpoint:
    return Checkpoint(config, {n: (lambda t=t: t) for n, t in tensors.items()}, "test", None, tokenizer)


def some_tokens(config: ModelConfig, count: int = CAPACITY, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


@torch.no_grad()
def eager(decoder: Decoder, tokens: list[int], dtype: torch.dtype | None = None) -> np.ndarray:
    """Logits [n, V]; `dtype`: through a cache of that type, else as one sequence."""
    caches = None if dtype is None else decoder.new_caches(len(tokens), dtype)
    return decoder(torch.tensor([tokens]), 0, caches)[0][0].numpy()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(case, **options) -> (checkpoint, package path), each made once."""
    made: dict[tuple, tuple[Checkpoint, Path]] = {}

    def export(case: str, **options) -> tuple[Checkpoint, Path]:
        key = (case, *sorted(options.items()))
        if key not in made:
            checkpoint, path = random_checkpoint(config_of(case)), tmp_path_factory.mktemp("onnx") / "package"
            export_onnx(checkpoint, path, **{"run_parity": False, **options})
            made[key] = checkpoint, path
        return made[key]

    return export


# ---- fp32: the lowering ----


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_decoders(exported, case):
    """1e-4: logits of order 1 to 5 from float32 sums of at most 744 products, in another order."""
    checkpoint, path = exported(case, weights="fp32", cache="fp32")
    decoder, tokens = checkpoint.load(), some_tokens(checkpoint.config)
    other = some_tokens(checkpoint.config, seed=6)
    close = dict(rtol=0, atol=1e-4)
    expected = eager(decoder, tokens)  # causal: row i of any prefix is row i of the whole
    assert expected.std() > 0.3
    session = onnx_stock.StockSession(path, CAPACITY, threads=1)
    for length in LENGTHS:  # the first rounds run over rows of NaN, which no result may show
        session.rewind(0)
        np.testing.assert_allclose(session.evaluate(tokens[:length]), expected[:length], **close)
    session.rewind(0)
    np.testing.assert_allclose(session.score(tokens, CHUNK, decode=0), expected, **close)
    session.rewind(0)
    np.testing.assert_allclose(session.score(tokens, CHUNK, decode=CAPACITY - 3), expected, **close)
    session.rewind(5)  # another ending over the old one's rows
    mixed = tokens[:5] + other[5:]
    np.testing.assert_allclose(session.score(mixed[5:], CHUNK, decode=2), eager(decoder, mixed)[5:], **close)
    np.testing.assert_array_equal([session.past], [CAPACITY])


def test_only_the_asked_rows_have_logits(exported):
    checkpoint, path = exported("Q-MQA", weights="fp32", cache="fp32")
    tokens = some_tokens(checkpoint.config)
    expected = eager(checkpoint.load(), tokens)
    for rows in ([CAPACITY - 1], [0], [3, 17, 4], list(range(CAPACITY))):
        session = onnx_stock.StockSession(path, CAPACITY, threads=1)
        np.testing.assert_allclose(session.evaluate(tokens, rows), expected[rows], rtol=0, atol=1e-4)


def test_the_cache_holds_the_operators_rows(exported):
    """Another engine, or a snapshot, may read them: the new rows at `past`, everything else untouched."""
    checkpoint, path = exported("Q-MQA", weights="fp32", cache="fp32")
    tokens = some_tokens(checkpoint.config, 9)
    decoder = checkpoint.load()
    with torch.no_grad():
        _, caches = decoder(torch.tensor([tokens]), 0, decoder.new_caches(9))
    session = onnx_stock.StockSession(path, CAPACITY, threads=1)
    session.score(tokens, 4, decode=1)
    for (reference,), cache in zip(caches, session.caches.values(), strict=True):
        np.testing.assert_allclose(cache[:, :, :9], reference.numpy(), rtol=0, atol=1e-5)
        assert np.isnan(cache[:, :, 9:]).all()


# ---- fp16 cache ----


@pytest.mark.parametrize("case", ["Q=K-V", "GQA", "Q-MQA"])
def test_fp16_cache(exported, case):
    """Against a decoder that rounds the same rows to fp16.

    What differs is a row whose float32 value lies within 1e-7 of the middle of two fp16 neighbours: it may be
    rounded to either. One such value moves by 2^-10 of itself at most, and with it one of the D terms of a score
    or an output; a logit, made of them with gains of about 1, by less than 2^-10 of the largest logit.
    """
    checkpoint, path = exported(case, weights="fp32", cache="fp16")
    tokens = some_tokens(checkpoint.config)
    expected = eager(checkpoint.load(), tokens, torch.float16)
    session = onnx_stock.StockSession(path, CAPACITY, threads=1)
    assert {c.dtype for c in session.caches.values()} == {np.dtype(np.float16)}
    actual = session.score(tokens, CHUNK, decode=5)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2**-10 * np.abs(expected).max())
    assert np.abs(actual - eager(checkpoint.load(), tokens)).max() > 1e-5  # the cache was in fact rounded


def test_fp16_cache_saturates(tmp_path):
    """A row beyond fp16's range becomes its largest number: an infinity would turn every later logit into NaN."""
    checkpoint = random_checkpoint(config_of("Q-MQA"))
    tensors = {name: load() for name, load in checkpoint.tensors.items()}
    tensors["layers.0.attention.key.weight"] = tensors["layers.0.attention.key.weight"] * 1e6
    checkpoint = of_tensors(checkpoint.config, tensors)
    export_onnx(checkpoint, tmp_path / "package", weights="fp32", cache="fp16", run_parity=False)
    session = onnx_stock.StockSession(tmp_path / "package", CAPACITY, threads=1)
    assert np.isfinite(session.score(some_tokens(checkpoint.config), CHUNK)).all()
    assert np.nanmax(np.abs(session.caches["kv.0"])) == 65504


# ---- int8 cache ----


@pytest.mark.parametrize(
    "case, window, sinks", [*((case, 0, 0) for case in ("QKV", "Q=K-V", "GQA", "Q=K=V", "Q-MQA")), ("Q=K-V", 7, 3)]
)
def test_int8_cache(case, window, sinks, tmp_path):
    """Against a decoder that rounds the same rows to the same codes.

    What differs is a value within 1e-7 of the middle between two codes, which may be rounded to either: one of
    thousands of errors of its kind. They may make a fifth of what all rounding together makes, in the mean square.
    """
    checkpoint = random_checkpoint(config_of(case, window=window, sinks=sinks))
    export_onnx(checkpoint, tmp_path / "package", weights="fp32", cache="int8", run_parity=False)
    tokens, decoder = some_tokens(checkpoint.config), checkpoint.load()
    expected, unrounded = eager(decoder, tokens, torch.int8), eager(decoder, tokens)
    rounding = np.sqrt(np.square(expected - unrounded).mean())
    assert 1e-3 < rounding < 0.02 * unrounded.std()  # rows not turned back would be off by more than all of it
    session = onnx_stock.StockSession(tmp_path / "package", CAPACITY, threads=1)
    for chunk, decode in ((CHUNK, 5), (CAPACITY, 0)):
        session.rewind(0)
        difference = session.score(tokens, chunk, decode) - expected
        assert np.sqrt(np.square(difference).mean()) < rounding / 5


def test_the_int8_cache_holds_the_operators_rows(exported):
    checkpoint, path = exported("Q=K-V", weights="fp32", cache="int8")
    tokens, decoder = some_tokens(checkpoint.config, 9), checkpoint.load()
    with torch.no_grad():
        _, caches = decoder(torch.tensor([tokens]), 0, decoder.new_caches(9, torch.int8))
    session = onnx_stock.StockSession(path, CAPACITY, threads=1)
    session.score(tokens, 4, decode=1)
    expected = [tensor.numpy() for layer in caches for tensor in layer]
    for reference, (name, cache) in zip(expected, session.caches.items(), strict=True):
        if "_scale" in name:
            np.testing.assert_allclose(cache[:, :, :9], reference, rtol=2**-10)
            assert np.isnan(cache[:, :, 9:]).all()
        else:
            assert cache.dtype == np.int8
            assert (cache[:, :, :9] == reference).mean() > 0.99  # ties apart


def test_rows_are_rounded_by_the_definition():
    """Against arithmetic in float64, which has no ties here; and the values that arithmetic does not cover."""
    rows = np.random.default_rng(1).normal(size=(50, 62)).astype(np.float32) * np.logspace(-3, 6, 50)[:, None]
    rows = rows.astype(np.float32)
    codes, scales = (t.numpy() for t in quantize_rows(torch.from_numpy(rows)))
    largest = np.abs(rows.astype(np.float64)).max(-1) / 127
    np.testing.assert_array_equal(scales, np.minimum(largest, 65504).astype(np.float16))
    exact = rows / scales.astype(np.float64)[:, None]
    np.testing.assert_array_equal(codes, np.clip(np.rint(exact), -127, 127))
    nan, inf = float("nan"), float("inf")
    special = [[0.0, -0.0], [1e-9, -1e-9], [nan, nan], [nan, 127.0], [inf, -1.0], [-inf, nan], [127.0, 2.5]]
    codes, scales = quantize_rows(torch.tensor(special))
    assert codes.tolist() == [[0, 0], [0, 0], [0, 0], [0, 127], [127, 0], [-127, 0], [127, 2]]
    assert scales.tolist() == [0, 0, 0, 1, 65504, 65504, 1]


# ---- windows ----


# Every window once, and every kind of rows once: all pairs of them differ in nothing more.
@pytest.mark.parametrize(
    "case, window, sinks",
    [
        *(("GQA", *seen) for seen in ((1, 0), (7, 0), (9, 3), (4, 15), (CAPACITY, 2))),
        *((case, 9, 3) for case in ("QKV", "Q=K-V", "Q=K=V")),
    ],
)
def test_windows(case, window, sinks, tmp_path):
    """The function against the eager decoder, and that against itself without the rows that it must not see."""
    checkpoint = random_checkpoint(config_of(case, window=window, sinks=sinks, layers=1))
    export_onnx(checkpoint, tmp_path / "package", weights="fp32", cache="fp32", run_parity=False)
    decoder, tokens = checkpoint.load(), some_tokens(checkpoint.config)
    expected = eager(decoder, tokens)
    session = onnx_stock.StockSession(tmp_path / "package", CAPACITY, threads=1)
    np.testing.assert_allclose(session.score(tokens, CHUNK, decode=6), expected, rtol=0, atol=1e-4)
    outside = range(sinks, CAPACITY - window)
    changed = [(token + 1) % 131 if i in outside else token for i, token in enumerate(tokens)]
    np.testing.assert_allclose(eager(decoder, changed)[-1], expected[-1], rtol=0, atol=1e-5)
    for seen in {0, sinks - 1} & set(range(sinks)) | {CAPACITY - window}:
        changed = [(token + 1) % 131 if i == seen else token for i, token in enumerate(tokens)]
        assert np.abs(eager(decoder, changed)[-1] - expected[-1]).max() > 1e-3


def test_export_options_set_the_window(tmp_path, tiny_checkpoint):
    options = dict(weights="fp32", cache="fp32", parity=False)
    manifest = export_package("onnx", str(tiny_checkpoint), tmp_path / "package", window=9, sinks=2, **options)
    kind = manifest["config"]["kinds"]["layer"]
    assert (kind["window"], kind["sinks"]) == (9, 2)
    for wrong, message in (
        ({"window": -3}, "^--window -3: .*must be in 0"),
        ({"window": 97}, "^--window 97: .*from 0 to max_positions"),
        ({"sinks": 4}, "^--sinks 4: .*needs a window"),
    ):
        with pytest.raises(InputError, match=message):
            export_package("onnx", str(tiny_checkpoint), tmp_path / "wrong", **wrong, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["package"]


# ---- int4 and int8 weights ----


def rounded(checkpoint: Checkpoint, weights: str, block_size: int) -> Checkpoint:
    """The checkpoint with every matrix as its codes have it: head and tables have 8 bits in either type."""
    body = {"int4": 4, "int8": 8}[weights]
    tensors = {}
    for name, load in checkpoint.tensors.items():
        tensor = load()
        if tensor.dim() == 2:
            bits = body if name.startswith(("layers.", "layer_projection.")) else 8
            tensor = dequantize(quantize(tensor, bits, block_size))
        tensors[name] = tensor
    return of_tensors(checkpoint.config, tensors)


QUANTIZED = [
    ("QKV", "int4", 32),  # learned positions, tied
    ("Q=K-V", "int8", 64),  # untied; 48 columns are less than a block
    ("Q-MQA", "int8", 32),
    ("Q-MQA, head_dim 62", "int4", 128),  # 744 is no multiple of a block
]


@pytest.mark.parametrize("case, weights, block_size", QUANTIZED)
def test_quantized_weights_are_read_right(exported, case, weights, block_size):
    """With activations left in float32 only the order of sums differs from a decoder with the rounded weights."""
    options = dict(weights=weights, block_size=block_size, cache="fp32", accuracy_level=1)
    checkpoint, path = exported(case, **options)
    tokens = some_tokens(checkpoint.config)
    expected = eager(rounded(checkpoint, weights, block_size).load(), tokens)
    session = onnx_stock.StockSession(path, CAPACITY, threads=1)
    np.testing.assert_allclose(session.score(tokens, CHUNK, decode=3), expected, rtol=0, atol=2e-4)
    assert np.abs(expected - eager(checkpoint.load(), tokens)).max() > 1e-3  # the weights were in fact rounded


def test_int8_activations_cost_little(exported):
    """The default rounds activations to 8 bits, a scale a block: an error of up to 1/254 of the block's largest
    value, uniform, so about 0.3 % of the block's size; ten matrices deep it stays a few per cent of a logit."""
    checkpoint, path = exported("Q-MQA", weights="int8", block_size=32, cache="fp32")
    tokens = some_tokens(checkpoint.config)
    expected = eager(rounded(checkpoint, "int8", 32).load(), tokens)
    actual = onnx_stock.StockSession(path, CAPACITY, threads=1).score(tokens, CHUNK)
    assert np.sqrt(np.square(actual - expected).mean()) < 0.03 * expected.std()


# ---- the package ----


_FACTS = dict(
    format=3,
    vocab_size=131,
    max_positions=40,
    width=48,
    cache="fp16",
    learned_positions=0,
    weight_bits=32,
    block_size=0,
    prefill_chunk=0,
    cache_rows=0,
    operator=2,
)
_KIND = """kind layer
heads 4
kv_heads 2
head_dim 12
value_dim 12
rows separate
window 0
sinks 0
positions rotary-on-read
rotary_offset 0
frequencies 1.0 0.046415888336127795 0.0021544346900318843
mlp_width 56
mlp_matrices 3
pattern layer layer
"""


def test_the_file_describes_itself(exported):
    _, path = exported("GQA", weights="fp32", cache="fp16")
    model = onnx.load(path / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(path / "model.onnx"))
    metadata = {p.key: p.value for p in model.metadata_props}
    assert set(metadata) == {DESCRIPTION, FINGERPRINT} and re.fullmatch("[0-9a-f]{64}", metadata[FINGERPRINT])
    of_all, of_kind = metadata[DESCRIPTION].split("kind ", 1)
    assert f"kind {of_kind}" == _KIND
    facts = dict(line.split(" ") for line in of_all.splitlines())
    assert int(facts.pop("matrix_bytes")) > int(facts.pop("table_bytes")) > 0  # exactly: see below
    assert facts == {name: str(value) for name, value in _FACTS.items()}
    caches = [f"{kind}.{layer}" for layer in (0, 1) for kind in ("key", "value")]
    assert [i.name for i in model.graph.input] == ["input_ids", "past", "logit_rows", *caches]
    outs = [c.replace(".", "_out.") for c in caches]
    assert [o.name for o in model.graph.output] == ["logits", *outs]
    shapes = {v.name: _shape(v) for v in [*model.graph.input, *model.graph.output]}
    assert shapes["input_ids"] == [1, "T"]
    assert shapes["past"] == []
    assert shapes["logit_rows"] == ["R"]
    assert shapes["logits"] == [1, "R", 131]
    assert all(shapes[name] == [1, 2, "C", 12] for name in caches + outs)
    assert {o.domain: o.version for o in model.opset_import}["edge_qkv"] == 2
    nodes = [n for n in model.graph.node if n.domain == "edge_qkv"]
    assert [n.op_type for n in nodes] == ["UnifiedKVAttention"] * 2
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes.pop("scale") == pytest.approx(12**-0.5)
    rotary = {"rotary": b"on_read", "rotary_dim": 6, "rotary_offset": 0}
    assert attributes == {"num_heads": 4, "kv_heads": 2, "value_dim": 12, "window": 0, "sinks": 0, **rotary}
    assert list(nodes[1].input[2:6]) == ["key.1", "past", "cos", "sin"]
    assert nodes[1].input[7] == "value.1"
    assert list(nodes[1].output[1:]) == ["key_out.1", "value_out.1"]


@pytest.mark.parametrize("case, kinds, absent", [("Q-MQA", ["kv"], [2]), ("MQA", ["key", "value"], [])])
def test_an_int8_file_describes_itself(exported, case, kinds, absent):
    _, path = exported(case, weights="fp32", cache="int8")
    model = onnx.load(path / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(path / "model.onnx"))
    assert "\ncache int8\n" in {p.key: p.value for p in model.metadata_props}[DESCRIPTION]
    manifest = json.loads((path / "edge_qkv.json").read_text())
    assert manifest["cache_bytes_per_token"] == 2 * len(kinds) * (12 + 2)
    names = [f"{kind}{scale}.{layer}" for layer in (0, 1) for scale in ("", "_scale") for kind in kinds]
    assert [i.name for i in model.graph.input] == ["input_ids", "past", "logit_rows", *names]
    assert [o.name for o in model.graph.output] == ["logits", *(name.replace(".", "_out.") for name in names)]
    for value in [*model.graph.input[3:], *model.graph.output[1:]]:
        scale = "_scale" in value.name
        assert _shape(value) == ([1, 1, "C"] if scale else [1, 1, "C", 12])
        assert value.type.tensor_type.elem_type == (onnx.TensorProto.FLOAT16 if scale else onnx.TensorProto.INT8)
    node = [n for n in model.graph.node if n.domain == "edge_qkv"][1]
    by_input = dict(zip(INPUTS, node.input, strict=False))
    by_output = dict(zip(OUTPUTS, node.output, strict=False))
    assert [by_input["cache"], by_input["cache_scale"]] == [f"{kinds[0]}.1", f"{kinds[0]}_scale.1"]
    assert [by_output["cache_out"], by_output["cache_scale_out"]] == [f"{kinds[0]}_out.1", f"{kinds[0]}_scale_out.1"]
    assert [i for i, name in enumerate(node.output) if not name] == absent
    if len(kinds) == 2:
        assert [by_input["value_cache"], by_input["value_cache_scale"]] == ["value.1", "value_scale.1"]
        assert [by_output["value_cache_out"], by_output["value_cache_scale_out"]] == [
            "value_out.1",
            "value_scale_out.1",
        ]


def _shape(value) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def _external(path: Path) -> dict[str, dict[str, str]]:
    model = onnx.load(path / "model.onnx", load_external_data=False)
    return {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}


@pytest.mark.parametrize("case, weights", [("QKV", "int4"), ("Q-MQA", "int8"), ("Q-MQA", "fp32")])
def test_a_tied_weight_is_stored_once(exported, case, weights):
    block = {} if weights == "fp32" else {"block_size": 32, "accuracy_level": 1}
    _, path = exported(case, weights=weights, cache="fp32", **block)
    stored = _external(path)
    if weights == "fp32":
        assert "head.weight" not in stored and "embedding.weight" in stored
        used = [n.op_type for n in onnx.load(path / "model.onnx", load_external_data=False).graph.node]
        assert "Transpose" not in used  # of a weight, it would be folded into a second copy
    else:
        for kind in ("packed", "scales"):
            assert stored[f"head.parts.0.{kind}"] == stored[f"embedding.{kind}"]
    places = {(int(e["offset"]), int(e["length"])) for e in stored.values()}
    assert sum(-(-length // 4096) * 4096 for _, length in places) == (path / "model.onnx.data").stat().st_size


def test_data_is_aligned_to_pages(exported):
    _, path = exported("Q-MQA", weights="fp32", cache="fp32")
    assert {e["location"] for e in _external(path).values()} == {"model.onnx.data"}
    assert all(int(e["offset"]) % 4096 == 0 for e in _external(path).values())


# ---- what a plan says of an export that was not made ----


def _grown(case: str) -> ModelConfig:
    """A model in which the weights are most of the file."""
    if case in CASES:
        return config_of(case, vocab_size=4096, layers=3, width=384, mlp_width=1024)
    kinds = {name: replace(spec, mlp_width=1024) for name, spec in MIXED[case].kinds.items()}
    return replace(MIXED[case], kinds=kinds, width=384, vocab_size=4096)


@pytest.mark.parametrize(
    "case, weights, block, cache",
    [
        ("QKV", "int8", None, "fp16"),
        ("Q=K-V", "int4", 32, "int8"),
        ("Q-MQA", "fp32", None, "fp32"),
        *((case, weights, None, "fp16") for case, weights in zip(MIXED, ("int4", "fp32", "int8") * 2, strict=True)),
    ],
)
def test_an_estimate_is_what_an_export_writes(tmp_path, case, weights, block, cache):
    config, output = _grown(case), tmp_path / "package"
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    options = dict(weights=weights, block_size=block, cache=cache)
    export_package("onnx", f"random:{tmp_path / 'config.json'}", output, parity=False, **options)
    estimated, written = estimate(config, **options), package.Package.open(output).weight_bytes
    assert estimated.weight_bytes == pytest.approx(written, rel=0.005)
    lines = estimated.description.splitlines()  # with the number of bytes that a file has anyway
    assert [line for line in lines if not line.startswith("weight_bytes ")] == _description(output).splitlines()
    opened = package.Package.open(output)
    assert opened.config == config and opened.cache_bytes_per_token == config.cache_bytes_per_token(cache)


# ---- layers that differ ----


@pytest.mark.parametrize("case", MIXED)
def test_kinds_that_the_operator_sees_alike_share_a_function(exported, case):
    config, (_, path) = MIXED[case], exported(case, weights="fp32", cache="fp32")
    model = onnx.load(path / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(path / "model.onnx"))
    nodes = [node for node in model.graph.node if node.domain == "edge_qkv"]
    functions = {name: seen_alike(spec) for name, spec in op_types(config).values()}
    assert [functions[node.op_type] for node in nodes] == [seen_alike(spec) for spec in config.layers]
    assert {f.name for f in model.functions} == {node.op_type for node in nodes} == set(functions)
    assert len(set(functions.values())) == len(functions) and next(iter(functions)) == "UnifiedKVAttention"
    caches = [tensor.name for tensor in config.cache_tensors("fp32")]
    assert [i.name for i in model.graph.input] == ["input_ids", "past", "logit_rows", *caches]
    for i, node in enumerate(nodes):
        given = dict(zip(INPUTS, node.input, strict=False))
        source = config.rows_from[i]
        kind = "kv" if config.layers[i].unified else "key"
        assert given["cache"] == f"{kind}.{i}" if source == i else f"{kind}_out.{source}"
        assert bool(given["kv"]) == (source == i) == (len(node.output) > 1)


def test_more_kinds_of_attention_than_the_library_has_names_for_are_refused(tmp_path):
    spec = LayerSpec(heads=2, head_dim=4, kv_heads=2, mlp_width=8)
    kinds = {f"kind{i}": replace(spec, window=i + 1) for i in range(17)}
    config = ModelConfig(vocab_size=9, max_positions=20, width=8, kinds=kinds, pattern=tuple(kinds))
    with pytest.raises(InputError, match="17 kinds of attention; an ONNX package has at most 16"):
        export_onnx(Checkpoint(config, {}, "test", None, None), tmp_path / "package")


def _description(path: Path) -> str:
    model = onnx.load(path / "model.onnx", load_external_data=False)
    return {p.key: p.value for p in model.metadata_props}[DESCRIPTION]


# ---- the package ----


def test_the_manifest(tmp_path, bytes_tokenizer):
    config = config_of("Q-MQA", vocab_size=260)
    tokenizer = tmp_path / "tokenizer.json"
    bytes_tokenizer.save(str(tokenizer))
    checkpoint = random_checkpoint(config, tokenizer)
    runs = []

    @contextlib.contextmanager
    def runner(directory: Path, context: int):
        session = onnx_stock.StockSession(directory, context, threads=1)

        def score(tokens):
            runs.append(tokens)
            session.rewind(0)
            return session.score(tokens)

        yield score, "stock"

    text = "To be, or not to be: that is the question"
    output = tmp_path / "package"
    manifest = export_onnx(checkpoint, output, weights="fp32", cache="fp32", text=text, runner=runner)
    assert json.loads((output / "edge_qkv.json").read_text()) == manifest
    opened = package.Package.open(output)
    assert opened.config == config
    assert opened.stop_tokens == {bytes_tokenizer.token_to_id("<|endoftext|>")}
    assert manifest["format"] == package.FORMAT and manifest["target"] == "onnx"
    assert (manifest["weights"], manifest["block_size"], manifest["cache"]) == ("fp32", None, "fp32")
    assert manifest["cache_bytes_per_token"] == 2 * 12 * 4
    assert set(manifest["files"]) == {"model.onnx", "model.onnx.data", "tokenizer.json"}
    assert {p.name for p in output.iterdir()} == {*manifest["files"], "edge_qkv.json"}
    for name, facts in manifest["files"].items():
        assert facts == {"bytes": (output / name).stat().st_size, "sha256": files.sha256(output / name)}
    ids = bytes_tokenizer.encode(text).ids
    assert runs == [ids[:40], ids[40:]]  # windows of max_positions
    parity = manifest["parity"]
    assert (parity["engine"], parity["input"], parity["tokens"]) == ("stock", "text", len(ids))
    assert parity["max_logit_error"] < 1e-4 and parity["top1_agreement"] == 1
    assert parity["perplexity_export"] == pytest.approx(parity["perplexity_checkpoint"], rel=1e-5)


def _failing(config: ModelConfig, after: int) -> Checkpoint:
    """A checkpoint of which the tensor number `after` cannot be read."""
    sound = random_checkpoint(config)
    names = list(sound.tensors)

    def fail():
        raise InputError("tensor cannot be read")

    return Checkpoint(config, {**sound.tensors, names[after]: fail}, "test", None, None)


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        export_onnx(_failing(config_of("Q-MQA"), 7), tmp_path / "package", weights="fp32")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_keeps_the_old_package(tmp_path):
    old = tmp_path / "package"
    old.mkdir()
    (old / "edge_qkv.json").write_text('{"files": {}}')
    with pytest.raises(InputError, match="cannot be read"):
        export_onnx(_failing(config_of("Q-MQA"), 7), old, weights="fp32")
    assert [p.name for p in tmp_path.iterdir()] == ["package"]
    assert (old / "edge_qkv.json").read_text() == '{"files": {}}'


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weights": "int3"}, "--weights int3"),
        ({"cache": "int4"}, "--cache int4"),
        ({"block_size": 33}, "--block-size 33"),
        ({"weights": "fp32", "block_size": 32}, "--block-size 32: fp32 weights take none"),
        ({"tokenizer": Path("no-such-tokenizer.json")}, "no-such-tokenizer.json"),
    ],
)
def test_wrong_options_are_named_before_any_work(tmp_path, options, message):
    config = config_of("Q-MQA")
    unread = Checkpoint(config, {}, "test", None, None)  # any look into it would be a KeyError
    with pytest.raises(InputError, match=message):
        export_onnx(unread, tmp_path / "package", **options)
    assert list(tmp_path.iterdir()) == []


def test_nan_weights_are_named(tmp_path):
    sound = random_checkpoint(config_of("Q-MQA"))
    tensors = {name: load().clone() for name, load in sound.tensors.items()}
    tensors["layers.1.mlp.down.weight"][3, 4] = np.nan
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down\.weight.*not finite"):
        export_onnx(of_tensors(sound.config, tensors), tmp_path / "package", weights="int4", run_parity=False)
    assert list(tmp_path.iterdir()) == []
