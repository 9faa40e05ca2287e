"""How each target stores weights, and from that the numbers of a plan: what an export would write, without doing it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edge_qkv import _native
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import InputError

BLOCK_SIZES = (32, 64, 128)
ALIGNMENT = 4096  # of each tensor in the data file of an ONNX model
INLINE_BELOW = 1024  # bytes; smaller tensors are in the graph
DEFAULT_BLOCK_SIZE = 128  # of --target onnx; chosen by measurement, see export/onnx.py
# Of --target executorch, chosen by measurement: with groups of 32 / 64 / 128 the bundled model's perplexity over its
# first 4,096 held-out tokens rises by 0.76 / 0.53 / 0.81 % (its logits err by 0.12 / 0.14 / 0.14 on average); 1.2B
# Q-MQA, packed, decodes in 15.0 / 12.9 / 13.0 ms and prefills 554 / 655 / 721 tokens/s from files of 756 / 727 / 712 MB
# (2 cores with AVX-512).
DEFAULT_GROUP_SIZE = 64
DEFAULT_PREFILL_CHUNK = 128  # of a target whose files fix the largest chunk
# Of --target coreml, whose scores are a matrix [heads * chunk, capacity] in fp16, and their softmax another: with 32
# heads and a capacity of 32,768 that is 2 MiB a token of the chunk. At 32 each of the two is smaller than the cache.
DEFAULT_COREML_CHUNK = 32
# Of --target coreml, chosen by measurement: with blocks of 32 / 64 / 128 the bundled model's logits over its first
# 4,096 held-out tokens err by 0.101 / 0.108 / 0.115 on average (0.116 / 0.126 / 0.136 with coremltools' own rounding).
DEFAULT_COREML_BLOCK = 32
SHORTEST_BLOCK = 16  # of those that Format.divides makes: 5 bits a weight with an fp16 scale

_CHOSEN = -1  # stands for the block size that --block-size gives


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: as floats, or codes of 4 or 8 bits and the scales of their blocks."""

    bits: int = 32
    scale_bytes: int = 0  # 0: floats
    block: int = 0  # columns that share a scale; 0: all of a row
    whole: bool = False  # float32 instead where the columns are no whole blocks; else the last block is padded
    divides: bool = False  # a shorter block instead, so that all are whole; where that is too short, rows of 8 bits

    def of(self, columns: int) -> Format:
        """How a matrix of so many columns is stored."""
        if self.whole and columns % self.block:
            return Format()
        if self.divides:
            block = math.gcd(columns, self.block)
            return replace(self, block=block) if block >= SHORTEST_BLOCK else Format(8, self.scale_bytes)
        return self

    def is_float(self, columns: int) -> bool:
        """Whether a matrix of so many columns is stored as floats."""
        return not self.of(columns).scale_bytes

    def sizes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Bytes of the tensors that hold a matrix [rows, columns]."""
        how = self.of(columns)
        if not how.scale_bytes:
            return (rows * columns * how.bits // 8,)
        block = how.block or columns
        blocks = -(-columns // block)
        return -(-rows * blocks * block * how.bits // 8), rows * blocks * how.scale_bytes

    def chosen(self, block: int) -> Format:
        return replace(self, block=block) if self.block == _CHOSEN else self


@dataclass(frozen=True)
class Weights:
    """What a weight type of a target stores how."""

    layers: Format
    head: Format
    embedding: Format
    positions: Format  # learned ones
    default_block: int = 0  # 0: takes no block size
    also: str = ""  # its name in the other targets, every one of which has an int8 and an int4


@dataclass(frozen=True)
class Storage:
    """What an export to a target writes."""

    engine: str  # the native library's name of what runs it; "": the library does not run it
    weights: dict[str, Weights]
    head_is_embedding: bool  # tied, they are stored once
    alignment: int  # of tensors of `inline_below` bytes and more
    inline_below: int
    file_bytes: int  # of what is no weight,
    file_bytes_per_layer: int  # and of that in each layer
    prefill_chunk: int = 0  # the most tokens of a call, unless an export is told otherwise; 0: any number
    pads_mlp: bool = False  # the MLP's inner width is whole blocks, in all of its matrices
    float_bytes: int = 4  # of a value of norms, biases and rotary tables
    file_bytes_per_rotary_layer: int = 0  # more, where rows are rotated
    file_bytes_per_position: int = 0
    caches: tuple[str, ...] = tuple(CACHE_BYTES)  # types that the engine can keep
    context_multiple: int = 1  # the cache has room for whole ones of so many tokens
    whole_cache: bool = False  # the cache has room for all positions of the model, whatever a session's context
    rotary_tables: bool = True  # the cosines and sines of all positions are in the file


_FLOAT, _HALF = Format(), Format(16)
_BLOCKS_4, _BLOCKS_8 = Format(4, 4, _CHOSEN), Format(8, 4, _CHOSEN)  # of MatMulNBits: float32 scales
# Of torchao: 8 bits with a float32 scale a row; 4 bits in groups with bf16 scales; tables of 4 bits with float32 ones.
_ROWS_8, _GROUPS_4, _TABLE_4 = Format(8, 4), Format(4, 2, _CHOSEN), Format(4, 4, 32, whole=True)
# Of Core ML: fp16 scales; no block reaches over the end of a row.
_HALF_ROWS_8, _HALF_BLOCKS_4 = Format(8, 2), Format(4, 2, _CHOSEN, divides=True)
# Of ggml: blocks of 32 with one fp16 scale, of 256 with two and 12 bytes of smaller ones; else float32.
_Q8_0, _Q4_0, _Q4_K = Format(8, 2, 32, whole=True), Format(4, 2, 32, whole=True), Format(4, 16, 256, whole=True)

STORAGE = {
    "onnx": Storage(
        engine="onnxruntime",
        weights={
            "fp32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT),
            "int8": Weights(_BLOCKS_8, _BLOCKS_8, _BLOCKS_8, _BLOCKS_8, DEFAULT_BLOCK_SIZE),
            "int4": Weights(_BLOCKS_4, _BLOCKS_8, _BLOCKS_8, _BLOCKS_8, DEFAULT_BLOCK_SIZE),
        },
        head_is_embedding=True,
        alignment=ALIGNMENT,
        inline_below=INLINE_BELOW,
        file_bytes=16_000,  # of model.onnx, as measured
        file_bytes_per_layer=7_000,
    ),
    "executorch": Storage(
        engine="executorch",
        weights={
            "fp32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT),
            "8da8w": Weights(_ROWS_8, _ROWS_8, _TABLE_4, _ROWS_8, also="int8"),
            "8da4w": Weights(_GROUPS_4, _ROWS_8, _TABLE_4, _ROWS_8, DEFAULT_GROUP_SIZE, also="int4"),
        },
        head_is_embedding=False,
        alignment=16,
        inline_below=0,
        file_bytes=5_000,  # of the program, as measured
        file_bytes_per_layer=11_000,
        prefill_chunk=DEFAULT_PREFILL_CHUNK,
        pads_mlp=True,
    ),
    "coreml": Storage(
        engine="",
        weights={
            "fp16": Weights(_HALF, _HALF, _HALF, _HALF),
            "int8": Weights(_HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8),
            "int4": Weights(_HALF_BLOCKS_4, _HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8, DEFAULT_COREML_BLOCK),
        },
        head_is_embedding=True,
        alignment=64,
        inline_below=0,
        file_bytes=30_000,  # of the program of three functions, as measured
        file_bytes_per_layer=33_000,
        file_bytes_per_rotary_layer=33_500,
        prefill_chunk=DEFAULT_COREML_CHUNK,
        float_bytes=2,
        caches=("fp16",),
        whole_cache=True,
        file_bytes_per_position=4,  # the numbers of the rows, of which masks are made
    ),
    "gguf": Storage(
        engine="llama.cpp",
        weights={
            "f32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT, also="fp32"),
            "f16": Weights(_HALF, _HALF, _HALF, _HALF, also="fp16"),
            "q8_0": Weights(_Q8_0, _Q8_0, _Q8_0, _Q8_0, also="int8"),
            "q4_0": Weights(_Q4_0, _Q8_0, _Q8_0, _Q8_0, also="int4"),
            "q4_k": Weights(_Q4_K, _Q8_0, _Q8_0, _HALF),  # about: llama.cpp decides for each tensor
        },
        head_is_embedding=True,
        alignment=32,
        inline_below=0,
        file_bytes=3_000,  # without its tokenizer, as measured
        file_bytes_per_layer=700,
        rotary_tables=False,
        caches=("fp32", "fp16"),
        context_multiple=256,
    ),
}
# All names that --weights takes; each target refuses those it does not know.
WEIGHTS = tuple(dict.fromkeys(name for target in STORAGE.values() for name in target.weights))


def stored_as(target: str, weights: str, block_size: int | None = None) -> tuple[str, Weights, int]:
    """(the target's own name of a weight type, how it stores it, its block size or 0); raises `InputError`."""
    if target not in STORAGE:
        raise InputError(f"target = {target!r}: must be one of {', '.join(STORAGE)}")
    known = STORAGE[target]
    kind = next((name for name, how in known.weights.items() if weights in (name, how.also)), None)
    if kind is None:
        names = ", ".join(known.weights)
        raise InputError(f"--weights {weights}: must be one of {names} for the target {target}")
    stored = known.weights[kind]
    if block_size is not None and not stored.default_block:
        raise InputError(f"--block-size {block_size}: {kind} weights take none; leave it out")
    if block_size not in (None, *BLOCK_SIZES):
        raise InputError(f"--block-size {block_size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
    block = (block_size or stored.default_block) if stored.default_block else 0
    formats = (stored.layers, stored.head, stored.embedding, stored.positions)
    return kind, Weights(*(f.chosen(block) for f in formats)), block


def gguf_keeps_one_row(config: ModelConfig) -> bool:
    """Whether llama.cpp caches one row for keys and values: see `edge_qkv.export.gguf.latent`."""
    biases = config.attention_bias or config.mlp_bias or config.norm_bias
    windowed = 0 < config.window < config.max_positions
    shape = (config.sharing, config.kv_heads, config.positions, config.norm, config.mlp)
    plain = config.query != "residual_gelu" and not biases and not windowed
    return plain and shape == ("q-k=v", 1, "none", "rmsnorm", "swiglu")


def gguf_form(config: ModelConfig) -> ModelConfig:
    """The model that llama.cpp runs for `config`: with a query matrix, and with values of their own unless it keeps
    one row for both; the same projection is then in its file, and the same row in its cache, twice."""
    return replace(config, query="projected", sharing=config.sharing if gguf_keeps_one_row(config) else "qkv")


def cache_bytes_per_token(config: ModelConfig, cache: str, target: str) -> int:
    """Bytes that the engine of a target keeps of a token; raises `InputError` for a cache that it has not."""
    if cache not in STORAGE[target].caches:
        raise InputError(f"--cache {cache}: a {target} package has {' or '.join(STORAGE[target].caches)}")
    return (gguf_form(config) if target == "gguf" else config).cache_bytes_per_token(cache)


def plan_model(
    config: ModelConfig,
    weights: str = "int4",
    block_size: int | None = None,
    target: str = "onnx",
    prefill_chunk: int = 0,
) -> _native.PlanModel:
    """The numbers of `config` exported with these weights, without doing it.

    prefill_chunk: as `edge-qkv export` takes it, for a target whose files fix it; 0: the default.
    """
    _, stored, block = stored_as(target, weights, block_size)
    known = STORAGE[target]
    config = gguf_form(config) if target == "gguf" else config
    padding = -config.mlp_width % (stored.layers.block or 1) if known.pads_mlp else 0
    inside = replace(config, mlp_width=config.mlp_width + padding)
    matrices, tables = list(_matrices(inside, stored)), list(_tables(inside, stored, known))
    head = stored.head.sizes(config.vocab_size, config.width)
    shared = config.tied_head and known.head_is_embedding
    per_layer = known.file_bytes_per_layer + (known.file_bytes_per_rotary_layer if config.rotary else 0)
    program = known.file_bytes + per_layer * config.layers + known.file_bytes_per_position * config.max_positions
    on_disk = sum(
        -(-n // known.alignment) * known.alignment if n >= known.inline_below else n
        for n in [*matrices, *tables, *(() if shared else head)]
    )
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
        weight_bytes=on_disk + program,
        matrix_bytes=sum(matrices) + sum(head),
        table_bytes=sum(tables),
        weight_bits=stored.layers.bits,
        block_size=block,
        prefill_chunk=(prefill_chunk or known.prefill_chunk) if known.prefill_chunk else 0,
    )


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


def _matrices(config: ModelConfig, stored: Weights) -> Iterator[int]:
    for _ in range(config.layers):
        for outputs, inputs, _ in _linear_shapes(config):
            yield from stored.layers.sizes(outputs, inputs)


def _tables(config: ModelConfig, stored: Weights, known: Storage) -> Iterator[int]:
    """All that is not multiplied by: embedding, positions, norms and biases."""
    yield from stored.embedding.sizes(config.vocab_size, config.width)
    if config.positions == "learned":
        yield from stored.positions.sizes(config.max_positions, config.width)
    float_bytes = known.float_bytes
    if config.rotary and known.rotary_tables:
        yield from [config.max_positions * config.rotated // 2 * float_bytes] * 2  # cos and sin
    for _ in range(2 * config.layers + 1):
        yield from [config.width * float_bytes] * (2 if config.norm_bias else 1)
    for _ in range(config.layers):
        yield from (outputs * float_bytes for outputs, _, bias in _linear_shapes(config) if bias)
