"""The decoder lowered to a program of ExecuTorch: our operator on buffers that nothing copies, XNNPACK for the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, nn

from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.config import CacheTensor, ModelConfig
from edge_qkv.export import operator
from edge_qkv.export.progress import quiet
from edge_qkv.layer import LayerSpec
from edge_qkv.model import Decoder

PAGE_BYTES = 65_536  # the largest memory page of the systems we know; a buffer's rows are whole pages of any of them
_EXAMPLE_TOKENS, _EXAMPLE_ROWS = 5, 3  # never 0 or 1: tracing would take those for constants

_ATTENTION, _READ_ATTENTION = "unified_kv_attention", "unified_kv_read_attention"
_ATTRIBUTES = (
    "int num_heads, int kv_heads, float scale, str rotary, int rotary_dim, int rotary_offset, int value_dim, "
    "int window, int sinks"
)
# What writes new rows and attends, and what attends over an earlier layer's rows: it comes later in the program, for
# its query depends on what that layer gave.
_ARGUMENTS = {
    _ATTENTION: "Tensor query, Tensor? kv, Tensor(a!) cache, Tensor past, Tensor? cos, Tensor? sin, Tensor? value, "
    "Tensor(b!)? value_cache, Tensor(c!)? cache_scale, Tensor(d!)? value_cache_scale, Tensor? key_weight",
    _READ_ATTENTION: "Tensor query, Tensor cache, Tensor past, Tensor? cos, Tensor? sin, "
    "Tensor? value_cache, Tensor? cache_scale, Tensor? value_cache_scale, Tensor? key_weight",
}
_library = torch.library.Library("edge_qkv", "DEF")


def _result(query: Tensor, *others: Any) -> Tensor:
    """[B, T, H*V]"""
    attributes = dict(zip(operator.ATTRIBUTES, others[-len(operator.ATTRIBUTES) :], strict=True))
    return query.new_empty(*query.shape[:2], attributes["num_heads"] * attributes["value_dim"])


for _name, _arguments in _ARGUMENTS.items():
    _library.define(f"{_name}({_arguments}, {_ATTRIBUTES}) -> Tensor")
    _library.define(f"{_name}.out({_arguments}, {_ATTRIBUTES}, *, Tensor(z!) out) -> Tensor(z!)")
    torch.library.register_fake(f"edge_qkv::{_name}", _result, lib=_library)


def attend(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    caches: tuple[Tensor, ...],
    past: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Stands in for `edge_qkv.attention.attend` and leaves the operator in the program."""
    inputs = operator.inputs(spec, query, key, value, caches, past, tables, key_weight)
    attributes = operator.attributes(spec).values()
    if key is not None:
        return torch.ops.edge_qkv.unified_kv_attention(*inputs.values(), *attributes), caches
    read = (tensor for name, tensor in inputs.items() if name not in ("kv", "value"))
    return torch.ops.edge_qkv.unified_kv_read_attention(*read, *attributes), caches


def cache_rows(config: ModelConfig, cache: str) -> int:
    """Rows of each buffer: the model's positions, rounded up so that the rows of a kv head are whole pages in all.

    More rows than can be used cost address space only: a page is in memory once a row in it is written.
    """
    sizes = {tensor.row_bytes for tensor in config.cache_tensors(cache)}
    step = math.lcm(*(PAGE_BYTES // math.gcd(PAGE_BYTES, size) for size in sizes))
    return -(-config.max_positions // step) * step


def buffer_name(tensor: CacheTensor) -> str:
    """The program's name of a cache's tensor, such as kv_3."""
    return f"{tensor.kind}_{tensor.layer}"


class _Program(nn.Module):
    """The decoder with its caches as buffers."""

    def __init__(self, decoder: Decoder, cache: str) -> None:
        super().__init__()
        self.decoder = decoder
        config = decoder.config
        self.names: list[list[str]] = [[] for _ in config.layers]
        for tensor in config.cache_tensors(cache):
            self.names[tensor.layer].append(buffer_name(tensor))
        caches = decoder.new_caches(cache_rows(config, cache), CACHE_DTYPE[cache])
        for names, tensors in zip(self.names, caches, strict=True):
            for name, tensor in zip(names, tensors, strict=True):
                self.register_buffer(name, tensor, persistent=False)

    def forward(self, input_ids: Tensor, past: Tensor, logit_rows: Tensor) -> Tensor:
        """input_ids [1, T], past [], logit_rows [R] -> logits [1, R, V]"""
        caches = [tuple(getattr(self, name) for name in names) for names in self.names]
        return self.decoder(input_ids, past, caches, logit_rows)[0]


def trace(decoder: Decoder, cache: str, prefill_chunk: int) -> torch.export.ExportedProgram:
    """The decoder, which has `attend` as its operator, and its caches as one graph: (input_ids [1, T], past [],
    logit_rows [R]) -> logits [1, R, V], for up to `prefill_chunk` tokens."""
    program = _Program(decoder, cache).eval()
    tokens, rows = (min(count, prefill_chunk) for count in (_EXAMPLE_TOKENS, _EXAMPLE_ROWS))
    example = (torch.zeros(1, tokens, dtype=torch.int64), torch.tensor(2), torch.arange(rows))
    sizes = torch.export.Dim("T", min=1, max=prefill_chunk), torch.export.Dim("R", min=1, max=prefill_chunk)
    dynamic = {"input_ids": {1: sizes[0]}, "past": None, "logit_rows": {0: sizes[1]}}
    with quiet(), torch.no_grad():
        return torch.export.export(program, example, dynamic_shapes=dynamic, strict=False)


def lower(decoder: Decoder, cache: str, prefill_chunk: int, texts: Mapping[str, str]) -> ExecutorchProgramManager:
    """The finished program of a decoder that has `attend` as its operator.

    A call takes up to `prefill_chunk` tokens. texts: become constant methods, by which the file describes itself.
    """
    exported = trace(decoder, cache, prefill_chunk)
    with quiet(), torch.no_grad():
        exported = exported.run_decompositions({torch.ops.aten.gelu.default: _gelu})
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner()],
            constant_methods=dict(texts),
            compile_config=EdgeCompileConfig(_check_ir_validity=False),  # it knows no operators but ATen's
        )
        del exported
        lowered = edge.to_executorch(
            ExecutorchBackendConfig(
                # Inputs, logits and caches are the caller's memory, whose places are set before each call. Planned
                # among the rest, logits for a whole chunk would spread it over as many pages.
                memory_planning_pass=MemoryPlanningPass(
                    alloc_graph_input=False, alloc_graph_output=False, alloc_mutable_buffers=False
                ),
                emit_mutable_buffer_names=True,
                do_quant_fusion_and_const_prop=True,  # the 4-bit embedding becomes one operator
            )
        )
    check(lowered.executorch_program, cache_users(decoder.config, cache))
    return lowered


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """XNNPACK has the exact GELU alone and would take that in the place of the approximation, half a thousandth off."""
    if approximate != "tanh":
        return NotImplemented
    inner = (x * x * 0.044715 + 1) * x
    return x * torch.sigmoid(inner * math.sqrt(8 / math.pi))  # 0.5 (1 + tanh(u)) is sigmoid(2u)


def cache_users(config: ModelConfig, cache: str) -> dict[str, list[str]]:
    """The operators that touch each cache, in the program's order: one that writes rows, and those that read them."""
    readers = Counter(source for layer, source in enumerate(config.rows_from) if source != layer)
    users = {source: [_ATTENTION] + [_READ_ATTENTION] * readers[source] for source in config.rows_from}
    return {
        buffer_name(tensor): [f"edge_qkv::{name}" for name in users[tensor.layer]]
        for tensor in config.cache_tensors(cache)
    }


def check(program: Any, expected: Mapping[str, list[str]]) -> None:
    """Nothing but our operators, in their order, touches a cache in an emitted program: no copy of one is ever made.

    expected: from `cache_users`. Raises `RuntimeError`: what is lowered here is ours, so a copy is no user's mistake.
    """
    (plan,) = (plan for plan in program.execution_plan if plan.name == "forward")
    names = {
        index: tensor.val.extra_tensor_info.fully_qualified_name
        for index, tensor in enumerate(plan.values)
        if getattr(tensor.val, "extra_tensor_info", None)
    }
    if sorted(names.values()) != sorted(expected):
        raise RuntimeError(f"the program has the buffers {sorted(names.values())} instead of {sorted(expected)}")
    users: dict[str, list[str]] = {name: [] for name in expected}
    for instruction in plan.chains[0].instructions:
        call = instruction.instr_args
        called = plan.operators[call.op_index].name if hasattr(call, "op_index") else type(call).__name__
        for index in getattr(call, "args", ()):
            if index in names:
                users[names[index]].append(called)
    wrong = {name: found for name, found in users.items() if found != expected[name]}
    if wrong:
        raise RuntimeError(f"caches are touched by other operators: {wrong}")
