"""What a package can be exported to: one record a target, with what its engine needs and how it stores weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.formats import CHOSEN, Format, Weights

BLOCK_SIZES = (32, 64, 128)

_FLOAT, _HALF = Format(), Format(16)
_BLOCKS_4, _BLOCKS_8 = Format(4, 4, CHOSEN), Format(8, 4, CHOSEN)  # of MatMulNBits: float32 scales
# Of torchao: 8 bits with a float32 scale a row; 4 bits in groups with bf16 scales; tables of 4 bits with float32 ones.
_ROWS_8, _GROUPS_4, _TABLE_4 = Format(8, 4), Format(4, 2, CHOSEN), Format(4, 4, 32, whole=True)
# Of Core ML: fp16 scales; no block reaches over the end of a row.
_HALF_ROWS_8, _HALF_BLOCKS_4 = Format(8, 2), Format(4, 2, CHOSEN, divides=True)
# Of ggml: blocks of 32 with one fp16 scale, of 256 with two and 12 bytes of smaller ones; else float32.
_Q8_0, _Q4_0, _Q4_K = Format(8, 2, 32, whole=True), Format(4, 2, 32, whole=True), Format(4, 16, 256, whole=True)


@dataclass(frozen=True)
class FileSizes:
    """Bytes of an exported file beside its weights, as measured, and how tensors lie in it."""

    program: int
    per_kind: int = 0  # of layers: the operator's function
    per_layer: int = 0
    per_tensor: int = 0
    per_rotary_layer: int = 0  # more, where rows are rotated
    per_position: int = 0
    alignment: int = 1  # of tensors of `inline_below` bytes and more
    inline_below: int = 0
    head_is_embedding: bool = True  # tied, they are stored once
    float_bytes: int = 4  # of a value of norms, biases and rotary tables
    rotary_tables: bool = True  # the cosines and sines of all positions are in the file
    pads_mlp: bool = False  # the MLP's inner width is whole blocks, in all of its matrices


@dataclass(frozen=True)
class Target:
    """One engine's kind of package."""

    model_file: str  # what the engine opens, a file or a directory
    engine: str  # its name in the native library, or for a person
    needs: Mapping[str, str]  # modules that an export imports -> how to have them
    weights: dict[str, Weights]  # by the name that --weights takes; the first rounds least
    sizes: FileSizes
    hosted: str = ""  # the module of `edge_qkv.engines` that runs it; "": the native library does
    unknown_memory: str = ""  # what no plan knows of a hosted engine's memory
    prefill_chunk: int = 0  # the most tokens of a call, unless an export is told otherwise; 0: any number
    caches: tuple[str, ...] = tuple(CACHE_BYTES)  # types that the engine can keep
    context_multiple: int = 1  # the room of a cache is a multiple of so many tokens
    whole_cache: bool = False  # the cache has room for all positions of the model, whatever a session's context
    runs_on: str = ""  # where a package runs, if not everywhere
    kept: Callable[[ModelConfig], ModelConfig] = field(default=lambda config: config)  # the model as the engine has it

    @property
    def native(self) -> bool:
        return not self.hosted

    def cached(self, config: ModelConfig) -> ModelConfig:
        """The model whose cache the engine keeps: hosted engines keep the rows of all tokens, windows or not."""
        kept = self.kept(config)
        return kept.with_layers(window=0, sinks=0) if self.hosted else kept


def gguf_keeps_one_row(config: ModelConfig) -> bool:
    """Whether llama.cpp caches one row for keys and values: see `edge_qkv.export.gguf.latent`."""
    spec = config.only
    windowed = 0 < spec.window < config.max_positions
    shape = (spec.sharing, spec.kv_heads, config.positions, config.norm, spec.mlp)
    plain = spec.query != "residual_gelu" and not (spec.biases or config.norm_bias) and not windowed
    return plain and shape == ("q-k=v", 1, "none", "rmsnorm", "swiglu")


def gguf_form(config: ModelConfig) -> ModelConfig:
    """The model that llama.cpp runs for `config`: with a query matrix, and with values of their own unless it keeps
    one row for both; the same projection is then in its file, and the same row in its cache, twice."""
    sharing = config.only.sharing if gguf_keeps_one_row(config) else "qkv"
    return config.with_layers(query="projected", sharing=sharing)


TARGETS = {
    "onnx": Target(
        model_file="model.onnx",
        engine="onnxruntime",
        needs={},
        # Chosen by measurement. With the tied head and embedding in 8 bits and layers in blocks of 32 / 64 / 128, the
        # bundled model's perplexity over its held-out play rises by 0.07 / 1.00 / 0.61 %; 1.2B Q-MQA decodes in 31 /
        # 27-32 / 26 ms and prefills 136 / 144 / 187 tokens/s (2 cores with AVX-512). After 1,000 of its 2,600 steps, a
        # head of 4 bits cost 0.0051 / 0.0063 / 0.0075 nats of divergence from fp32 where one of 8 bits cost 0.0016 /
        # 0.0020 / 0.0024.
        weights={
            "fp32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT),
            "int8": Weights(_BLOCKS_8, _BLOCKS_8, _BLOCKS_8, _BLOCKS_8, default_block=128),
            "int4": Weights(_BLOCKS_4, _BLOCKS_8, _BLOCKS_8, _BLOCKS_8, default_block=128),
        },
        sizes=FileSizes(program=13_000, per_kind=8_000, per_tensor=400, alignment=4096, inline_below=1024),
    ),
    "executorch": Target(
        model_file="model.pte",
        engine="executorch",
        needs=dict.fromkeys(
            ("executorch", "torchao"),
            "install executorch and torchao, and then edge-qkv once more from its sources, part of which is compiled "
            "against ExecuTorch: pip install executorch torchao, and there pip install '.[executorch]'",
        ),
        # Groups of 64 chosen by measurement: with groups of 32 / 64 / 128 the bundled model's perplexity over its first
        # 4,096 held-out tokens rises by 0.76 / 0.53 / 0.81 % (its logits err by 0.12 / 0.14 / 0.14 on average); 1.2B
        # Q-MQA, packed, decodes in 15.0 / 12.9 / 13.0 ms and prefills 554 / 655 / 721 tokens/s from files of 756, 727
        # and 712 MB (2 cores with AVX-512).
        weights={
            "fp32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT),
            "8da8w": Weights(_ROWS_8, _ROWS_8, _TABLE_4, _ROWS_8, also="int8"),
            "8da4w": Weights(_GROUPS_4, _ROWS_8, _TABLE_4, _ROWS_8, default_block=64, also="int4"),
        },
        sizes=FileSizes(program=5_000, per_layer=11_000, alignment=16, head_is_embedding=False, pads_mlp=True),
        prefill_chunk=128,
    ),
    "coreml": Target(
        model_file="model.mlpackage",
        engine="coreml",
        needs={"coremltools": "install it: pip install coremltools"},
        # Blocks of 32 chosen by measurement: with blocks of 32 / 64 / 128 the bundled model's logits over its first
        # 4,096 held-out tokens err by 0.101 / 0.108 / 0.115 on average (0.116 / 0.126 / 0.136 with coremltools' own
        # rounding).
        weights={
            "fp16": Weights(_HALF, _HALF, _HALF, _HALF),
            "int8": Weights(_HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8),
            "int4": Weights(_HALF_BLOCKS_4, _HALF_ROWS_8, _HALF_ROWS_8, _HALF_ROWS_8, default_block=32),
        },
        # The program has three functions; per_position: the numbers of the rows, of which masks are made.
        sizes=FileSizes(
            program=30_000, per_layer=33_000, per_rotary_layer=33_500, per_position=4, alignment=64, float_bytes=2
        ),
        hosted="coreml",
        unknown_memory="what Core ML takes beyond weights and states depends on the device and is not known",
        # Scores are a matrix [heads * chunk, capacity] in fp16, and their softmax another: with 32 heads and a
        # capacity of 32,768 that is 2 MiB a token of the chunk. At 32 each of the two is smaller than the cache.
        prefill_chunk=32,
        caches=("fp16",),
        whole_cache=True,
        runs_on="on a Mac",
    ),
    "gguf": Target(
        model_file="model.gguf",
        engine="llama.cpp",
        needs={"gguf": "install it: pip install gguf"},
        weights={
            "f32": Weights(_FLOAT, _FLOAT, _FLOAT, _FLOAT, also="fp32"),
            "f16": Weights(_HALF, _HALF, _HALF, _HALF, also="fp16"),
            "q8_0": Weights(_Q8_0, _Q8_0, _Q8_0, _Q8_0, also="int8"),
            "q4_0": Weights(_Q4_0, _Q8_0, _Q8_0, _Q8_0, also="int4"),
            "q4_k": Weights(_Q4_K, _Q8_0, _Q8_0, _HALF),  # about: llama.cpp decides for each tensor
        },
        # Without its tokenizer.
        sizes=FileSizes(program=3_000, per_layer=700, alignment=32, rotary_tables=False),
        hosted="llama_cpp",
        unknown_memory="what llama.cpp takes beyond weights and cache depends on its version and the processor and is "
        "not known",
        caches=("fp32", "fp16"),
        context_multiple=256,
        kept=gguf_form,
    ),
}
# All names that --weights takes; each target refuses those it does not know.
WEIGHTS = tuple(dict.fromkeys(name for target in TARGETS.values() for name in target.weights))


def named(target: str) -> Target:
    """The record of a target; raises `InputError` for a name that is none."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}: must be one of {', '.join(TARGETS)}")
    return TARGETS[target]


def stored_as(target: str, weights: str, block_size: int | None = None) -> tuple[str, Weights, int]:
    """(the target's own name of a weight type, how it stores it, its block size or 0); raises `InputError`."""
    known = named(target)
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
    return kind, stored.chosen(block), block


def check_cache(target: str, cache: str) -> None:
    """Raises `InputError` for a type of cache that the target's engine has not."""
    known = named(target).caches
    if cache not in known:
        raise InputError(f"--cache {cache}: must be one of {', '.join(known)} for the target {target}")


def cache_bytes_per_token(config: ModelConfig, cache: str, target: str) -> int:
    """Bytes that the engine of a target keeps of a token; raises `InputError` for a cache that it has not."""
    check_cache(target, cache)
    return named(target).kept(config).cache_bytes_per_token(cache)
