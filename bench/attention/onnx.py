"""Attention through ONNX Runtime: our operator, its function of standard operators, and GroupQueryAttention.

A session has a node a layer. Caches are inputs and outputs bound to the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edge_qkv import _native
from edge_qkv.bench.attention.problem import HEAD_DIM, HEADS, Bound, Problem
from edge_qkv.description import OPERATOR
from edge_qkv.export.operator import attributes
from edge_qkv.layer import LayerSpec

_SPEC = LayerSpec(heads=HEADS, head_dim=HEAD_DIM, kv_heads=1, mlp_width=1, sharing="q-k=v")


def operator(cache: str) -> Callable[[Problem], Bound]:
    """Our operator, as the registered library has it."""
    return lambda problem: _unified(problem, cache, [])


def function(cache: str) -> Callable[[Problem], Bound]:
    """The same node where no library is registered: an exported file brings it as a function."""

    def bind(problem: Problem) -> Bound:
        from edge_qkv.export.onnx.function import attention_function

        return _unified(problem, cache, [attention_function(_SPEC, cache)])

    return bind


def group_query(dtype: type) -> Callable[[Problem], Bound]:
    """ONNX Runtime's own operator, which keeps keys and values apart."""

    def bind(problem: Problem) -> Bound:
        import onnx

        held, count = problem.rows.astype(dtype), len(problem.rows)
        inputs = {"query": problem.query.astype(dtype), "kv": problem.new.astype(dtype)}
        inputs |= {"last": np.array([count - 1], np.int32), "length": np.array(count, np.int32)}
        nodes, in_place = [], {}
        for i in range(problem.layers):
            for kind in ("key", "value"):
                inputs[f"past_{kind}.{i}"] = held[None, None].copy()
                in_place[f"present_{kind}.{i}"] = f"past_{kind}.{i}"
            names = ["query", "kv", "kv", f"past_key.{i}", f"past_value.{i}", "last", "length"]
            outputs = [f"attention.{i}", f"present_key.{i}", f"present_value.{i}"]
            counts = {"num_heads": HEADS, "kv_num_heads": 1}
            nodes.append(onnx.helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **counts))
        return Bound(*_session(problem, nodes, inputs, in_place, []), held.astype(np.float32))

    return bind


def _unified(problem: Problem, cache: str, functions: list) -> Bound:
    import onnx
    import torch

    from edge_qkv.attention import quantize_rows

    codes = cache == "int8"
    stored = [problem.rows.astype(np.float16) if not codes else None]
    if codes:
        stored = [part.numpy() for part in quantize_rows(torch.from_numpy(problem.rows))]
    held = stored[0].astype(np.float32) * (stored[1].astype(np.float32)[:, None] if codes else 1)
    inputs = {"query": problem.query, "kv": problem.new, "past": np.array(problem.past, np.int64)}
    nodes, in_place = [], {}
    for i in range(problem.layers):
        for kind, array in zip(("cache", "cache_scale"), stored, strict=False):
            inputs[f"{kind}.{i}"] = array[None, None].copy()
            in_place[f"{kind}_out.{i}"] = f"{kind}.{i}"
        names = ["query", "kv", f"cache.{i}", "past"] + (["", "", "", "", f"cache_scale.{i}"] if codes else [])
        outputs = [f"attention.{i}", f"cache_out.{i}"] + (["", f"cache_scale_out.{i}"] if codes else [])
        of_spec = attributes(_SPEC)
        nodes.append(onnx.helper.make_node("UnifiedKVAttention", names, outputs, domain="edge_qkv", **of_spec))
    return Bound(*_session(problem, nodes, inputs, in_place, functions), held)


def _session(
    problem: Problem, nodes: list, inputs: dict[str, np.ndarray], in_place: dict[str, str], functions: list
) -> tuple[Callable[[], object], Callable[[], np.ndarray]]:
    """Binds `inputs` by name, and of the outputs those of `in_place` to the buffers of their inputs.

    With `functions` the runtime is a plain one, without our library.
    """
    import onnx
    import onnxruntime

    helper = onnx.helper
    outputs = [f"attention.{i}" for i in range(problem.layers)]
    of = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, of[name], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, of["query"], problem.query.shape) for name in outputs]
        + [helper.make_tensor_value_info(out, of[into], inputs[into].shape) for out, into in in_place.items()],
    )
    domains = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("edge_qkv", OPERATOR),
    ]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10, functions=functions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = problem.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # one's idle threads beside another's work
    options.log_severity_level = 3
    if not functions:
        options.register_custom_ops_library(str(_native.library_path()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    binding: Any = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    for name, into in in_place.items():
        binding.bind_ortvalue_output(name, values[into])
    last = problem.layers - 1
    return (
        lambda: session.run_with_iobinding(binding),
        lambda: binding.get_outputs()[last].numpy().reshape(problem.tokens, -1),
    )
