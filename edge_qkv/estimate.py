"""What an export would write, without doing it: the description of its model file, and the bytes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_qkv.config import ModelConfig
from edge_qkv.description import OPERATOR, describe
from edge_qkv.formats import Weights
from edge_qkv.layer import LayerSpec
from edge_qkv.targets import FileSizes, named, stored_as


@dataclass(frozen=True)
class Estimate:
    """An export that was not made: the text by which its model file would describe itself, and its sizes in bytes."""

    description: str
    weight_bytes: int  # of the model's files
    matrix_bytes: int  # of these, matrices that are multiplied by
    table_bytes: int  # of these, all else: read a row at a time; the weight of a tied head counts as both
    prefill_chunk: int  # most tokens of a call; 0: any number


def estimate(
    config: ModelConfig,
    weights: str = "int4",
    block_size: int | None = None,
    target: str = "onnx",
    prefill_chunk: int = 0,
    cache: str = "fp16",
) -> Estimate:
    """What an export of `config` with these weights would write.

    prefill_chunk: as `edge-qkv export` takes it, for a target whose files fix it; 0: the default. Raises `InputError`.
    """
    _, stored, block = stored_as(target, weights, block_size)
    known = named(target)
    config, sizes = known.kept(config), known.sizes
    matrices, tables = list(_matrices(config, stored, sizes)), list(_tables(config, stored, sizes))
    head = stored.head.sizes(config.vocab_size, config.width)
    shared = config.tied_head and sizes.head_is_embedding
    rotated = sum(spec.rotary for spec in config.layers)
    program = sizes.program + sizes.per_kind * len(config.kinds) + sizes.per_layer * len(config.layers)
    program += sizes.per_rotary_layer * rotated + sizes.per_position * config.max_positions
    program += sizes.per_tensor * (len(matrices) + len(tables))
    on_disk = sum(
        -(-n // sizes.alignment) * sizes.alignment if n >= sizes.inline_below else n
        for n in [*matrices, *tables, *(() if shared else head)]
    )
    chunk = (prefill_chunk or known.prefill_chunk) if known.prefill_chunk else 0
    facts = {
        "weight_bits": stored.layers.bits,
        "block_size": block,
        "matrix_bytes": sum(matrices) + sum(head),
        "table_bytes": sum(tables),
        "prefill_chunk": chunk,
        "cache_rows": 0,
        "operator": OPERATOR,
    }
    text = describe(config, cache, facts)
    return Estimate(text, on_disk + program, facts["matrix_bytes"], facts["table_bytes"], chunk)


def _shapes(spec: LayerSpec, config: ModelConfig, stored: Weights, sizes: FileSizes) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, bias) of the matrices of a layer, as the target stores them."""
    step = stored.layers.block or 1
    mlp_width = spec.mlp_width + (-spec.mlp_width % step if sizes.pads_mlp else 0)
    return [
        (mlp_width if name in ("gate", "up") else outputs, mlp_width if name == "down" else inputs, bias)
        for name, outputs, inputs, bias in spec.matrices(config.width)
    ]


def _matrices(config: ModelConfig, stored: Weights, sizes: FileSizes) -> Iterator[int]:
    inner, layers = config.input_embeddings, len(config.layers)
    for spec in config.layers:
        for outputs, inputs, _ in _shapes(spec, config, stored, sizes):
            yield from stored.layers.sizes(outputs, inputs)
        if inner:
            yield from stored.layers.sizes(inner, config.width)
            yield from stored.layers.sizes(config.width, inner)
    if inner:
        yield from stored.layers.sizes(layers * inner, config.width)


def _tables(config: ModelConfig, stored: Weights, sizes: FileSizes) -> Iterator[int]:
    """All that is not multiplied by: embeddings, positions, rotary tables, norms and biases."""
    yield from stored.embedding.sizes(config.vocab_size, config.width)
    if config.learned_positions:
        yield from stored.positions.sizes(config.max_positions, config.width)
    for spec in {spec.frequencies: spec for spec in config.kinds.values() if spec.rotary}.values():
        if sizes.rotary_tables:
            yield from [config.max_positions * spec.rotated // 2 * sizes.float_bytes] * 2  # cos and sin
    for spec in config.layers:
        yield from (o * sizes.float_bytes for o, _, bias in _shapes(spec, config, stored, sizes) if bias)
    yield from (count * sizes.float_bytes for count in _small_tensors(config))
    if inner := config.input_embeddings:
        yield from stored.embedding.sizes(config.vocab_size, len(config.layers) * inner)


def _small_tensors(config: ModelConfig) -> Iterator[int]:
    """The number of values of each norm and of each other weight of one dimension, biases aside."""
    norm = [config.width] * (2 if config.norm_bias else 1)
    yield from norm
    for spec in config.layers:
        yield from norm * len(spec.norms)
        yield from spec.head_norms
        yield from [spec.head_dim] if spec.key_weight else []
        yield from [1] if config.layer_scalars else []
        yield from norm if config.input_embeddings else []
    if config.input_embeddings:
        yield config.input_embeddings
