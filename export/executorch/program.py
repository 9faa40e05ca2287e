"""The decoder lowered to a program of ExecuTorch: our operator on buffers that nothing copies, XNNPACK for the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, nn

from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.export import operator
from edge_qkv.export.progress import quiet
from edge_qkv.model import Decoder

PAGE_BYTES = 65_536  # the largest memory page of the systems we know; a buffer's rows are whole pages of any of them
_EXAMPLE_TOKENS, _EXAMPLE_ROWS = 5, 3  # never 0 or 1: tracing would take those for constants

_ARGUMENTS = (
    "Tensor query, Tensor kv, Tensor(a!) cache, Tensor past, Tensor? cos, Tensor? sin, Tensor? value, "
    "Tensor(b!)? value_cache, Tensor(c!)? cache_scale, Tensor(d!)? value_cache_scale, "
    "int num_heads, int kv_heads, float scale, str rotary, int rotary_dim, int window, int sinks"
)
_library = torch.library.Library("edge_qkv", "DEF")
_library.define(f"unified_kv_attention({_ARGUMENTS}) -> Tensor")
_library.define(f"unified_kv_attention.out({_ARGUMENTS}, *, Tensor(z!) out) -> Tensor(z!)")


@torch.library.register_fake("edge_qkv::unified_kv_attention", lib=_library)
def _shape_of_result(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(query)


def attend(
    config: ModelConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    caches: tuple[Tensor, ...],
    past: Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Stands in for `edge_qkv.attention.attend` and leaves the operator in the program."""
    inputs = operator.inputs(config, query, key, value, caches, past, tables)
    return torch.ops.edge_qkv.unified_kv_attention(*inputs.values(), *operator.attributes(config).values()), caches


def cache_rows(config: ModelConfig, cache: str) -> int:
    """Rows of each buffer: the model's positions, rounded up so that the rows of a kv head are whole pages.

    More rows than can be used cost address space only: a page is in memory once a row in it is written.
    """
    sizes = [config.head_dim * CACHE_BYTES[cache][0], CACHE_BYTES[cache][1]]
    step = math.lcm(*(PAGE_BYTES // math.gcd(PAGE_BYTES, size) for size in sizes if size))
    return -(-config.max_positions // step) * step


class _Program(nn.Module):
    """The decoder with its caches as buffers, named kv_0, kv_1, ... by kind and layer."""

    def __init__(self, decoder: Decoder, cache: str) -> None:
        super().__init__()
        self.decoder = decoder
        config = decoder.config
        self.names = [[f"{kind}_{i}" for kind in operator.cache_kinds(config, cache)] for i in range(config.layers)]
        caches = decoder.new_caches(cache_rows(config, cache), CACHE_DTYPE[cache])
        for names, tensors in zip(self.names, caches, strict=True):
            for name, tensor in zip(names, tensors, strict=True):
                self.register_buffer(name, tensor, persistent=False)

    def forward(self, input_ids: Tensor, past: Tensor, logit_rows: Tensor) -> Tensor:
        """input_ids [1, T], past [], logit_rows [R] -> logits [1, R, V]"""
        caches = [tuple(getattr(self, name) for name in names) for names in self.names]
        return self.decoder(input_ids, past, caches, logit_rows)[0]


def lower(decoder: Decoder, cache: str, prefill_chunk: int, facts: Mapping[str, str]):
    """The finished program (an `ExecutorchProgramManager`) of a decoder that has `attend` as its operator.

    A call takes up to `prefill_chunk` tokens. facts: become constant methods, by which the file describes itself.
    """
    program = _Program(decoder, cache).eval()
    tokens, rows = (min(count, prefill_chunk) for count in (_EXAMPLE_TOKENS, _EXAMPLE_ROWS))
    example = (torch.zeros(1, tokens, dtype=torch.int64), torch.tensor(2), torch.arange(rows))
    sizes = torch.export.Dim("T", min=1, max=prefill_chunk), torch.export.Dim("R", min=1, max=prefill_chunk)
    dynamic = {"input_ids": {1: sizes[0]}, "past": None, "logit_rows": {0: sizes[1]}}
    with quiet(), torch.no_grad():
        exported = torch.export.export(program, example, dynamic_shapes=dynamic, strict=False)
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner()],
            constant_methods={f"edge_qkv.{name}": value for name, value in facts.items()},
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
    check(lowered.executorch_program, [name for layer in program.names for name in layer])
    return lowered


def check(program: Any, caches: list[str]) -> None:
    """Nothing but our operator touches a cache in an emitted program: no copy of one is ever made.

    Raises `RuntimeError`: what is lowered here is ours, so a copy is no user's mistake.
    """
    (plan,) = (plan for plan in program.execution_plan if plan.name == "forward")
    names = {
        tensor.val.extra_tensor_info.fully_qualified_name: index
        for index, tensor in enumerate(plan.values)
        if getattr(tensor.val, "extra_tensor_info", None)
    }
    if sorted(names) != sorted(caches):
        raise RuntimeError(f"the program has the buffers {sorted(names)} instead of {sorted(caches)}")
    users = {index: [] for index in names.values()}
    for instruction in plan.chains[0].instructions:
        call = instruction.instr_args
        name = plan.operators[call.op_index].name if hasattr(call, "op_index") else type(call).__name__
        for index in getattr(call, "args", ()):
            if index in users:
                users[index].append(name)
    wrong = {name: users[index] for name, index in names.items() if users[index] != ["edge_qkv::unified_kv_attention"]}
    if wrong:
        raise RuntimeError(f"caches are touched by other operators: {wrong}")
