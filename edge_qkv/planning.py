"""How much memory a model and one session of it will take: computed before anything is loaded.

The arithmetic is the native library's (`runtime/core/plan.cpp`); here are its inputs: a package's own description,
or, for a model that is not exported yet, what an export would write.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_qkv import _native
from edge_qkv.checks import chunk_size, thread_count, whole
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import InputError, OverBudget
from edge_qkv.package import MANIFEST, Package
from edge_qkv.packing import is_packed
from edge_qkv.presets import PRESETS, preset
from edge_qkv.sizes import parse_size

WEIGHT_BITS = {"fp32": 32, "int8": 8, "int4": 4}
BLOCK_SIZES = (32, 64, 128)
DEFAULT_BLOCK_SIZE = 128  # chosen by measurement, see export/onnx.py
_HEAD_BITS = _TABLE_BITS = 8  # with int8 and int4
ALIGNMENT = 4096  # of each tensor in the data file
INLINE_BELOW = 1024  # bytes; smaller tensors are in the graph
_GRAPH_BYTES, _GRAPH_BYTES_PER_LAYER = 16_000, 7_000  # of model.onnx, as measured


@dataclass(frozen=True)
class Plan:
    """Bytes beyond what the process has without the runtime, at full context.

    `total` is `expected` and the margin by which measurements differ: the least budget for this context.
    `anonymous` is what of it no memory pressure gives back; pages of files can be dropped and read again.
    """

    context: int  # tokens
    prefill_chunk: int  # tokens
    threads: int
    cache_type: str
    weights_file: int
    weights_anonymous: int
    cache: int
    workspace: int
    engine_file: int
    engine_anonymous: int
    expected: int
    margin: int
    total: int
    anonymous: int
    weight_bytes: int  # of the model's files on disk
    matrix_bytes: int  # of these, what each token is multiplied by
    packed: bool  # whether the weights are planned as packed for the processor
    memory: int | None = None  # the budget, when there is one

    @property
    def left(self) -> int | None:
        """What the budget has beyond the plan."""
        return None if self.memory is None else self.memory - self.total


def plan(
    model: str | Path | Package | ModelConfig,
    *,
    memory: int | str | None = None,
    context: int | str | None = None,
    cache: str | None = None,
    weights: str = "int4",
    block_size: int | None = None,
    prefill_chunk: int = 0,
    threads: int = 0,
    packed: bool | None = None,
) -> Plan:
    """The plan of a package, or of a model that is not exported yet: its config, a checkpoint, "random:1.2B/Q-MQA",
    or a published size such as "1.2B/Q-MQA".

    memory: the budget, in bytes or as "512MB"; "min" or None: none, the plan then says what the least is.
    context: tokens; "max" or None: the longest that the budget holds, without one the longest the model allows.
    cache: of a package, default its own; else "fp16". weights, block_size: as `edge-qkv export` takes them, for a
    model that is not exported. packed: whether the weights are packed for this processor; None:
    whether `pack` has done it for this package, and not for a model that is not exported.

    Raises `OverBudget` with everything that would fit when the budget does not hold it, `InputError`.
    """
    allowed = None if memory in (None, "min") else parse_size(memory)
    wanted = 0 if context in (None, "max") else whole(context, "context", 1)
    if cache not in (None, *CACHE_BYTES):
        raise InputError(f"cache = {cache!r}: must be one of {', '.join(CACHE_BYTES)}")
    options = _native.PlanOptions(
        memory=allowed or 0,
        context=wanted,
        prefill_chunk=chunk_size(prefill_chunk),
        threads=thread_count(threads),
        cache_type=cache.encode() if cache else None,
    )
    model = planned_model(model)
    package = None if isinstance(model, ModelConfig) else model
    options.packed = (package is not None and is_packed(package)) if packed is None else packed
    limit = (model if package is None else package.config).max_positions
    if wanted > limit:
        raise InputError(f"context = {wanted}: must be at most {limit}, the most this model allows")
    info, facts = _native.PlanInfo(), _native.PlanModel()
    if package is None:
        facts = plan_model(model, weights, block_size)
        _native.call("eqkv_plan", ctypes.byref(facts), ctypes.byref(options), ctypes.byref(info))
    else:
        path = os.fsencode(package.path)
        outs = ctypes.byref(info), ctypes.byref(facts)
        _native.call("eqkv_plan_package", path, ctypes.byref(options), *outs)
    values = {name: getattr(info, name) for name, _ in info._fields_ if name != "struct_size"}
    values["cache_type"] = info.cache_type.decode()
    sizes = dict(weight_bytes=facts.weight_bytes, matrix_bytes=facts.matrix_bytes)
    return Plan(**values, **sizes, packed=bool(options.packed), memory=allowed)


def fits(model: str | Path | Package | ModelConfig, **options) -> Plan | None:
    """`plan`, or None where the budget does not hold it."""
    try:
        return plan(model, **options)
    except OverBudget:
        return None


def planned_model(model: str | Path | Package | ModelConfig) -> Package | ModelConfig:
    """What `plan` takes, opened: a package, or the config of a model that is not exported."""
    if isinstance(model, (Package, ModelConfig)):
        return model
    name = str(model)
    if (Path(name) / MANIFEST).exists():
        return Package.open(name, verify=False)
    if name.partition("/")[0] in PRESETS and not Path(name).exists():
        return preset(name)
    from edge_qkv.checkpoints import read_checkpoint

    return read_checkpoint(name).config


# ---- what an export would write ----


def plan_model(config: ModelConfig, weights: str = "int4", block_size: int | None = None) -> _native.PlanModel:
    """The numbers of `config` exported with these weights, without doing it."""
    if weights not in WEIGHT_BITS:
        raise InputError(f"weights = {weights!r}: must be one of {', '.join(WEIGHT_BITS)}")
    if block_size not in (None, *BLOCK_SIZES) or (block_size and weights == "fp32"):
        raise InputError(
            f"block_size = {block_size}: must be one of {', '.join(map(str, BLOCK_SIZES))}, with int8 and int4 weights"
        )
    bits = WEIGHT_BITS[weights]
    block = 0 if bits == 32 else block_size or DEFAULT_BLOCK_SIZE
    matrices, tables = list(_matrices(config, bits, block)), list(_tables(config, bits, block))
    head = _matrix(config.vocab_size, config.width, bits if bits == 32 else _HEAD_BITS, block)
    stored = [*matrices, *tables] if config.tied_head else [*matrices, *tables, *head]
    on_disk = sum(-(-n // ALIGNMENT) * ALIGNMENT if n >= INLINE_BELOW else n for n in stored)
    return _native.PlanModel(
        layers=config.layers,
        caches=config.caches,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        heads=config.heads,
        width=config.width,
        mlp_width=config.mlp_width,
        mlp_matrices=3 if config.gated_mlp else 2,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        weight_bytes=on_disk + _GRAPH_BYTES + _GRAPH_BYTES_PER_LAYER * config.layers,
        matrix_bytes=sum(matrices) + sum(head),
        table_bytes=sum(tables),
        weight_bits=bits,
        block_size=block,
    )


def _matrix(rows: int, columns: int, bits: int, block: int) -> tuple[int, ...]:
    """Bytes of the tensors that hold a matrix [rows, columns]: float32, or codes and the scales of their blocks."""
    if bits == 32:
        return (rows * columns * 4,)
    blocks = -(-columns // block)
    return rows * blocks * block * bits // 8, rows * blocks * 4


def _linear_shapes(config: ModelConfig) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, bias) of the matrices of a layer."""
    heads = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
    inner, width, mlp = config.heads * config.head_dim, config.width, config.mlp_width
    return [
        *((heads[name] * config.head_dim, width, config.attention_bias) for name in config.projections),
        (width, inner, config.attention_bias),
        *[(mlp, width, config.mlp_bias)] * (2 if config.gated_mlp else 1),
        (width, mlp, config.mlp_bias),
    ]


def _matrices(config: ModelConfig, bits: int, block: int) -> Iterator[int]:
    for _ in range(config.layers):
        for outputs, inputs, _ in _linear_shapes(config):
            yield from _matrix(outputs, inputs, bits, block)


def _tables(config: ModelConfig, bits: int, block: int) -> Iterator[int]:
    """All that is not multiplied by: embedding, positions, norms and biases."""
    table_bits = bits if bits == 32 else _TABLE_BITS
    yield from _matrix(config.vocab_size, config.width, table_bits, block)
    if config.positions == "learned":
        yield from _matrix(config.max_positions, config.width, table_bits, block)
    if config.rotary:
        yield from [config.max_positions * config.rotated // 2 * 4] * 2  # cos and sin
    for _ in range(2 * config.layers + 1):
        yield from [config.width * 4] * (2 if config.norm_bias else 1)
    for _ in range(config.layers):
        yield from (outputs * 4 for outputs, _, bias in _linear_shapes(config) if bias)
