"""Attention through ExecuTorch: its own SDPA operators for language models, and our operator in its runtime.

Each is a program with a call a layer on buffers, run by the runtime of ExecuTorch's Python package.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from edge_qkv import _native
from edge_qkv.bench.attention.problem import HEAD_DIM, HEADS, Bound, Missing, Problem
from edge_qkv.export.progress import quiet
from edge_qkv.layer import LayerSpec

_SCALE = HEAD_DIM**-0.5


def sdpa(problem: Problem) -> Bound:
    """llama::sdpa_with_kv_cache: adds the new rows to caches of keys and of values, and attends."""
    runtime = _runtime(problem.threads, "executorch.extension.llm.custom_ops.custom_ops")
    import torch

    rows = torch.from_numpy(problem.rows)[None, :, None]  # [1, N, 1, D]
    call = torch.ops.llama.sdpa_with_kv_cache

    def layer(query, new, key, value):
        return call(query, new, new, key, value, problem.past, problem.tokens, None, 0.0, True, _SCALE)

    inputs = (_heads(problem), rows[:, problem.past :])
    return Bound(*_program(runtime, problem, layer, inputs, {"key": rows, "value": rows}), problem.rows)


def quantized_sdpa(problem: Problem) -> Bound:
    """llama::custom_quantized_sdpa: a scale for each query head and each row, as its int8 caches have them. The query
    and the new rows are quantized before; llama::update_cache adds the rows."""
    runtime = _runtime(problem.threads, "executorch.extension.llm.custom_ops.custom_ops")
    import torch

    ops = torch.ops.llama
    query, rows = _quantized(_heads(problem)), _quantized(torch.from_numpy(problem.rows)[None, :, None])
    new = tuple(part[:, problem.past :].contiguous() for part in rows)
    kinds = [f"{name}_{part}" for name in ("key", "value") for part in ("codes", "scales", "zeros")]

    def layer(codes, scales, zeros, new_codes, new_scales, new_zeros, *caches):
        for part, cache in zip((new_codes, new_scales, new_zeros) * 2, caches, strict=True):
            ops.update_cache(part, cache, problem.past)
        key, key_scales, key_zeros, value, value_scales, value_zeros = caches
        quantized = (zeros, scales, key_zeros, key_scales, value_zeros, value_scales)
        return ops.custom_quantized_sdpa(codes, key, value, problem.past, None, 0.0, True, _SCALE, *quantized)

    buffers = dict(zip(kinds, rows * 2, strict=True))
    run, output = _program(runtime, problem, layer, (*query, *new), buffers)
    return Bound(run, output, (rows[0] * rows[1])[0, :, 0].numpy())


def operator(cache: str) -> Callable[[Problem], Bound]:
    """Our operator with a cache of 'fp16' or 'int8'."""

    def bind(problem: Problem) -> Bound:
        runtime = _runtime(problem.threads, "edge_qkv.export.executorch.program")  # which defines the operator
        _register()
        import torch

        from edge_qkv.attention import quantize_rows
        from edge_qkv.export.executorch.program import attend

        rows = torch.from_numpy(problem.rows)
        if cache == "int8":
            codes, scales = quantize_rows(rows)
            buffers, held = {"codes": codes[None, None], "scales": scales[None, None]}, codes * scales.float()[:, None]
        else:
            buffers, held = {"rows": rows.half()[None, None]}, rows.half().float()
        spec = LayerSpec(heads=HEADS, head_dim=HEAD_DIM, kv_heads=1, mlp_width=1, sharing="q-k=v")

        def layer(query, new, past, *caches):
            return attend(spec, query, new, None, caches, past, None)[0]

        inputs = (torch.from_numpy(problem.query), rows[None, problem.past :], torch.tensor(problem.past))
        return Bound(*_program(runtime, problem, layer, inputs, buffers), held.numpy())

    return bind


def _runtime(threads: int, operators: str) -> ModuleType:
    """ExecuTorch's Python bindings with so many threads, after the module that brings the operators."""
    try:
        with quiet():
            runtime = importlib.import_module("executorch.extension.pybindings.portable_lib")
            importlib.import_module(operators)
    except (ImportError, OSError) as error:
        raise Missing(f"ExecuTorch cannot be used ({error}); pip install 'edge-qkv[executorch]'") from None
    if runtime._threadpool_get_thread_count() != threads:
        runtime._unsafe_reset_threadpool(threads)
    return runtime


def _register() -> None:
    """Our operator in the ExecuTorch of this process."""
    path = _native.executorch_path()
    if path is None:
        raise Missing("edge-qkv was built without its library for ExecuTorch; install executorch, then edge-qkv again")
    try:
        status = ctypes.CDLL(str(path)).eqkv_executorch_register()
    except OSError as error:
        raise Missing(f"{path.name} cannot be loaded ({error})") from None
    if status:
        raise Missing(f"{path.name} was built with another version of ExecuTorch; install edge-qkv again")


def _program(
    runtime: ModuleType, problem: Problem, layer: Callable, inputs: tuple, buffers: dict[str, Any]
) -> tuple[Callable[[], object], Callable[[], np.ndarray]]:
    """A program that calls `layer(*inputs, *its own copies of buffers)` for each layer, ready to run."""
    import torch
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes import MemoryPlanningPass

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(problem.layers):
                for name, buffer in buffers.items():
                    self.register_buffer(f"{name}_{i}", torch.zeros_like(buffer), persistent=False)

        def forward(self, *given):
            return [layer(*given, *(getattr(self, f"{name}_{i}") for name in buffers)) for i in range(problem.layers)]

    planning = MemoryPlanningPass(alloc_graph_input=False)
    with quiet(), torch.no_grad():
        exported = torch.export.export(Layers().eval(), inputs, strict=False)
        edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))  # not ATen's operators
        lowered = edge.to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=planning, emit_mutable_buffer_names=True)
        )
    program = runtime._load_program_from_buffer(lowered.buffer)
    method = program.load_method("forward")
    for i in range(problem.layers):
        for name, buffer in buffers.items():
            method.get_attribute(f"{name}_{i}").copy_(buffer)  # the program's own memory
    method.set_inputs(inputs)

    def run(_alive=(program, lowered, inputs)) -> None:  # the method has pointers into them
        method.execute()

    def output() -> np.ndarray:
        return method.get_outputs()[-1].reshape(problem.tokens, -1).numpy()

    return run, output


def _heads(problem: Problem):
    """The query [1, T, H, D]."""
    import torch

    return torch.from_numpy(problem.query).view(1, problem.tokens, HEADS, HEAD_DIM)


def _quantized(values) -> tuple:
    """Codes, scales and zero points of each row along the last axis."""
    import torch

    scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return torch.round(values / scales).to(torch.int8), scales, torch.zeros_like(scales, dtype=torch.int8)
