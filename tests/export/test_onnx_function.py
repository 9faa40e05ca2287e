"""The operator's function in plain ONNX Runtime against `edge_qkv.attention.attend`, for all kinds of layers."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from edge_qkv import attention
from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.description import OPERATOR
from edge_qkv.errors import InputError
from edge_qkv.export import operator
from edge_qkv.export.onnx import function as onnx_function
from edge_qkv.layer import LayerSpec

HEADS, GROUPS, DIM, CAPACITY = 4, 2, 12, 20
# Calls of a session one after the other: (rows before, new tokens).
CALLS = ((0, 5), (5, 1), (6, 7))

_ROWS = {
    "one row": dict(sharing="q-k=v"),
    "the first part of a row": dict(sharing="q-k=v", value_dim=8),
    "keys and values": dict(sharing="qkv"),
    "other values": dict(sharing="qkv", value_dim=7),
}
_POSITIONS = {
    "none": {},
    "conjugate": dict(positions="rotary-conjugate", rotary_dim=8),
    "conjugate, inside": dict(positions="rotary-conjugate", rotary_dim=4, rotary_offset=2),
    "conjugate tail": dict(positions="rotary-conjugate", rotary_offset=8),
    "on read": dict(positions="rotary-on-read", rotary_dim=4, rotary_offset=6),
}
_SEEN = ({}, {"window": 3}, {"window": 4, "sinks": 2})


def _specs() -> dict[str, tuple[LayerSpec, str]]:
    """Each way of rows with each of positions, key weights and whose rows they are; caches and windows in turn."""
    found = {}
    turns = itertools.cycle(itertools.product(CACHE_DTYPE, _SEEN))
    for (rows, of_rows), (positions, of_positions), key_weight, rows_of in itertools.product(
        _ROWS.items(), _POSITIONS.items(), (False, True), ("", "earlier")
    ):
        cache, seen = next(turns)
        fields = dict(key_weight=key_weight, rows_of=rows_of, attention_scale=0.4)
        try:
            spec = LayerSpec(HEADS, DIM, GROUPS, 1, **fields, **of_rows, **of_positions, **seen)
        except InputError:
            continue  # no such layer
        named = [rows, positions, *["key weight"] * key_weight, *["read only"] * bool(rows_of), cache, *map(str, seen)]
        found[", ".join(named)] = spec, cache
    return found


SPECS = _specs()


def test_all_kinds_of_layers_are_tried():
    specs = [spec for spec, _ in SPECS.values()]
    rows = {(s.unified, s.values < s.head_dim) for s in specs}
    assert len({(s.unified, s.values < s.head_dim, s.positions) for s in specs}) == len(rows) * 3 == 12
    assert len({(s.unified, s.positions, bool(s.rows_of)) for s in specs}) == 2 * 3 * 2
    assert len({(cache, bool(s.window), bool(s.sinks)) for s, cache in SPECS.values()}) == 3 * 3
    assert len({(cache, bool(s.rows_of), s.unified) for s, cache in SPECS.values()}) == 3 * 2 * 2
    assert {s.positions for s in specs if s.key_weight} == {"none", "rotary-on-read"}


def _session(spec: LayerSpec, cache: str, arrays: dict[str, np.ndarray]) -> onnxruntime.InferenceSession:
    names = onnx_function.up_to_last(operator.INPUTS, list(arrays))
    used = onnx_function.used_outputs(spec, cache)
    assert set(arrays) == onnx_function.used_inputs(spec, cache)
    outputs = [name if name in used else "" for name in onnx_function.up_to_last(onnx_function.OUTPUTS, used)]
    node = helper.make_node(
        "UnifiedKVAttention_3",
        [name if name in arrays else "" for name in names],
        outputs,
        domain=onnx_function.DOMAIN,
        **operator.attributes(spec),
    )

    def value(name: str, like: np.ndarray) -> onnx.ValueInfoProto:
        rank = [None] * like.ndim
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(like.dtype), rank)

    graph = helper.make_graph(
        [node],
        "one layer",
        [value(name, array) for name, array in arrays.items()],
        [value(name, arrays[name.removesuffix("_out")] if "_out" in name else arrays["query"]) for name in used],
    )
    function = onnx_function.attention_function(spec, cache, "UnifiedKVAttention_3")
    versions = [helper.make_opsetid("", onnx_function.OPSET), helper.make_opsetid("edge_qkv", OPERATOR)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10, functions=[function])
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", SPECS)
def test_the_function_is_the_reference(name):
    spec, cache = SPECS[name]
    generator = torch.Generator().manual_seed(len(name))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dims = (spec.head_dim,) if spec.unified else (spec.head_dim, spec.values)
    caches = tuple(torch.zeros(1, GROUPS, CAPACITY, dim, dtype=CACHE_DTYPE[cache]) for dim in dims)
    if cache == "int8":
        caches += tuple(torch.zeros(1, GROUPS, CAPACITY, dtype=torch.float16) for _ in dims)
    # What lies beyond the rows of a call must never be computed with.
    held = [c.numpy().copy() if c.dtype == torch.int8 else np.full(c.shape, np.nan, c.numpy().dtype) for c in caches]
    tables = attention.rotary_tables(spec, CAPACITY) if spec.rotary else None
    weight = random(DIM) if spec.key_weight else None
    session = None
    for past, tokens in CALLS:
        query = random(1, tokens, HEADS * DIM)
        new = [random(1, tokens, GROUPS * dim) for dim in dims]
        if spec.rows_of:  # an earlier layer writes them
            for i, (rows, dim) in enumerate(zip(new, dims, strict=True)):
                rows = rows.view(1, tokens, GROUPS, dim).transpose(1, 2)
                parts = attention.quantize_rows(rows) if cache == "int8" else (rows.to(caches[i].dtype),)
                for part, at in zip(parts, (i, len(dims) + i), strict=False):
                    caches[at][:, :, past : past + tokens] = part
                    held[at][:, :, past : past + tokens] = part.numpy()
            new = [None, None]
        key, value = (*new, None)[:2]
        expected, _ = attention.attend(spec, query, key, value, caches, past, tables, weight)
        arguments = (spec, query, key, value, tuple(map(torch.from_numpy, held)), torch.tensor(past), tables, weight)
        given = {n: t.numpy() for n, t in operator.inputs(*arguments).items() if t is not None}
        session = session or _session(spec, cache, given)
        out, *written = session.run(None, given)
        assert out.shape == (1, tokens, HEADS * spec.values)
        np.testing.assert_allclose(out, expected.numpy(), rtol=0, atol=2e-5)
        if not spec.rows_of:
            held = written
        for reference, array in zip(caches, held, strict=True):
            end = past + tokens
            np.testing.assert_allclose(array[:, :, :end], reference[:, :, :end].numpy(), rtol=2**-10, atol=1e-5)
            assert array.dtype == np.int8 or np.isnan(array[:, :, end:]).all()
