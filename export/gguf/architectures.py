"""Which architecture of llama.cpp computes a decoder, and what its file then holds.

A GGUF file names one of llama.cpp's own model graphs. Each row of `_FAMILIES` is one of them that computes some of
our decoders without a change to llama.cpp; the rest is refused with the reason. What a graph has no option for goes
into the weights:

- llama.cpp scales scores by 1/sqrt(head_dim): any other scale is a factor of the query matrix and its bias;
- an identity query is a matrix of ones on its diagonal, a residual one I + W;
- where keys and values are one tensor, or queries and keys, the same projection is written under each name;
- `llama` rotates neighbouring values, we rotate halves: rows of the query and key matrices trade places;
- what of a head is not rotated has divisors of its frequencies that are as good as infinite (`rope_freqs`).

These graphs keep a K and a V cache, so that a unified model costs twice its rows; the one that keeps one row is in
`latent.py`.

Not exact is GELU: ggml has the tanh form only in these graphs, at most 4.7e-4 from the erf form, and on a CPU reads
it from a table in fp16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge_qkv.errors import InputError
from edge_qkv.export.gguf.plain import Plain
from edge_qkv.layer import QUERY

# The name of a decoder weight -> that weight in float32.
Read = Callable[[str], np.ndarray]

_UNROTATED = 1e30  # divides an angle to nothing: its cosine is 1, and its sine is lost in any sum of float32
_ROTARY = ("rotary-conjugate", "rotary-on-read")
_BIASES = ("attention_bias", "mlp_bias", "norm_bias")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: its shape as in PyTorch, and how it is made of the decoder's weights.

    role: 'matrix', 'head' (with it a tied embedding), 'table' (of which single rows are read), 'wide' (values so
    unlike in size that 4 bits would lose the small ones), or 'exact' (float32 in every file).
    """

    name: str
    shape: tuple[int, ...]
    role: str
    make: Callable[[Read], np.ndarray]


@dataclass(frozen=True)
class GgufModel:
    """A decoder as llama.cpp reads it. metadata: its keys have no prefix yet; tensors: in the file's order."""

    architecture: str
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


@dataclass(frozen=True)
class Family:
    """An architecture and the decoders that it computes."""

    architecture: str
    norm: str
    mlps: tuple[str, ...]
    positions: tuple[str, ...]
    biases: tuple[str, ...] = ()  # fields of the config that may be true,
    zeros: tuple[str, ...] = ()  # and of these the ones whose biases a file has in any case
    fused: bool = False  # query, key and value are one matrix
    square: bool = False  # all heads together must be as wide as the model
    rope: str = ""  # which values are rotated together: 'halves' or 'neighbours'
    copies_head: bool = False  # a tied head is written once more
    only_tied: bool = False
    scales_embedding: bool = False  # by sqrt(width), in the graph
    metadata: dict[str, Any] = field(default_factory=dict)


_FAMILIES = (
    Family("llama", "rmsnorm", ("swiglu",), (*_ROTARY, "none"), ("attention_bias", "mlp_bias"), rope="neighbours"),
    Family("gemma", "rmsnorm", ("geglu",), _ROTARY, rope="halves", only_tied=True, scales_embedding=True),
    Family(
        "mpt",
        "layernorm",
        ("gelu", "gelu_tanh"),
        ("learned", "none"),
        biases=_BIASES,
        fused=True,
        square=True,
        metadata={"attention.max_alibi_bias": 0.0},
    ),
    Family(
        "gptneox",
        "layernorm",
        ("gelu", "gelu_tanh"),
        _ROTARY,
        biases=_BIASES,
        zeros=_BIASES,
        fused=True,
        square=True,
        rope="halves",
        copies_head=True,
        metadata={"use_parallel_residual": False},
    ),
    Family(
        "stablelm",
        "layernorm",
        ("swiglu",),
        _ROTARY,
        biases=("norm_bias",),
        zeros=("norm_bias",),
        square=True,
        rope="halves",
        copies_head=True,
    ),
)


def choose(config: Plain) -> Family:
    """The architecture that computes `config`; raises `InputError` with the reason where there is none."""
    alike = [f for f in _FAMILIES if f.norm == config.norm and config.mlp in f.mlps]
    family = next((f for f in alike if config.positions in f.positions), None)
    kind = f"{config.norm}, {config.mlp} and positions {config.positions}"
    if family is None:
        reason = f"no architecture with {kind} together"
    elif lacks := refusal(config) or _lacks(family, config):
        reason = f"no {lacks} in its architecture with {kind} ({family.architecture})"
    else:
        return family
    raise InputError(f"--target gguf: llama.cpp has {reason}; export to onnx or executorch")


def refusal(config: Plain) -> str:
    """What of a config none of the graphs computes, or nothing."""
    if config.query == "residual_gelu":
        return "query x + gelu(xW)"
    if 0 < config.window < config.max_positions:
        return "window of every layer"
    if config.unified and config.positions == "rotary-conjugate":
        # Their values are rotated, and the sum of them back by the query's position: a sum of R(j - i) v_j, which
        # attention over plain keys and values is not.
        return "rotation that is undone on the output"
    return ""


def _lacks(family: Family, config: Plain) -> str:
    for name in _BIASES:
        if getattr(config, name) and name not in family.biases:
            return name.replace("_", " ")
    if family.square and config.width != config.heads * config.head_dim:
        return f"width other than heads * head_dim ({config.heads * config.head_dim})"
    if family.only_tied and not config.tied_head:
        return "head of its own"
    if family.rope == "neighbours" and config.head_dim % 2:
        return "odd head_dim"
    return ""


def map_dense(config: Plain) -> GgufModel:
    """The file of a decoder with a K and a V cache; raises `InputError` where no architecture computes it."""
    family = choose(config)
    factor = math.sqrt(config.width) if family.scales_embedding else 1.0
    tensors = [embedding(config, 1 / factor)]
    if config.positions == "learned":
        shape = (config.max_positions, config.width)
        tensors.append(GgufTensor("position_embd.weight", shape, "table", reader("positions.weight")))
    if family.rope == "neighbours" and config.rotated < config.head_dim:
        tensors.append(constant("rope_freqs.weight", _divisors(config)))
    for i in range(config.layers):
        norm_bias = "norm_bias" in family.zeros
        tensors += norm(config, f"blk.{i}.attn_norm", f"layers.{i}.attention_norm", zeros=norm_bias)
        tensors += _attention(config, family, i)
        tensors += norm(config, f"blk.{i}.ffn_norm", f"layers.{i}.mlp_norm", zeros=norm_bias)
        tensors += feed_forward(config, i, zeros="mlp_bias" in family.zeros)
    tensors += norm(config, "output_norm", "norm", factor, "norm_bias" in family.zeros)
    if not config.tied_head or family.copies_head:
        tensors.append(head(config))
    metadata = common_metadata(config) | {
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    if family.rope:
        # Of neighbours all are rotated, by `_divisors` some by nothing.
        metadata["rope.dimension_count"] = config.head_dim if family.rope == "neighbours" else config.rotated
        metadata["rope.freq_base"] = float(config.rotary_base)
    return GgufModel(family.architecture, metadata | family.metadata, tensors)


def _divisors(config: Plain) -> np.ndarray:
    """What llama.cpp's angles pos * base^(-2i/D) are divided by to be pos * base^(-2i/R), or none from R/2 on."""
    pair = np.arange(config.head_dim // 2)
    divisors = np.full(pair.shape, _UNROTATED)
    turned = pair[: config.rotated // 2]
    if config.rotated:
        divisors[: len(turned)] = config.rotary_base ** (2 * turned / config.rotated - 2 * turned / config.head_dim)
    return divisors.astype(np.float32)


# ---- attention ----


def _attention(config: Plain, family: Family, i: int) -> list[GgufTensor]:
    """Query, key, value and output of a layer."""
    order = neighbours(config) if family.rope == "neighbours" else None
    query_rows, rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    value = "key" if config.unified else "value"

    def query(read: Read, part: str) -> np.ndarray:
        return reordered(form_query(config, read, i, part, math.sqrt(config.head_dim)), order)

    def key(read: Read, part: str) -> np.ndarray:
        return reordered(_projection(config, read, i, "key", part), order)

    def values(read: Read, part: str) -> np.ndarray:
        return _projection(config, read, i, value, part)

    def all_three(read: Read, part: str) -> np.ndarray:
        return np.concatenate([make(read, part) for make in (query, key, values)])

    role = query_role(config)
    if family.fused:
        made = {"qkv": (query_rows + 2 * rows, role, all_three)}
    else:
        made = {"q": (query_rows, role, query), "k": (rows, "matrix", key), "v": (rows, "matrix", values)}
    bias = config.attention_bias or "attention_bias" in family.zeros
    tensors = []
    for short, (count, role, make) in made.items():
        weight = functools.partial(make, part="weight")
        tensors.append(GgufTensor(f"blk.{i}.attn_{short}.weight", (count, config.width), role, weight))
        if bias:
            tensors.append(
                GgufTensor(f"blk.{i}.attn_{short}.bias", (count,), "exact", functools.partial(make, part="bias"))
            )
    source = f"layers.{i}.attention.output"
    shape = (config.width, query_rows)
    return tensors + linear(f"blk.{i}.attn_output", source, shape, config.attention_bias, bias)


def _projection(config: Plain, read: Read, i: int, name: str, part: str) -> np.ndarray:
    if part == "bias" and not config.attention_bias:
        return np.zeros(config.kv_heads * config.head_dim, np.float32)
    return read(f"layers.{i}.attention.{name}.{part}")


def form_query(config: Plain, read: Read, i: int, part: str, divides: float) -> np.ndarray:
    """Weight or bias of a layer's query, for a graph that divides scores by `divides`."""
    rows = config.heads * config.head_dim
    if part == "bias" and not (config.attention_bias and QUERY[config.query]):
        return np.zeros(rows, np.float32)
    name = "key" if config.query_shares_key else "query"
    made = read(f"layers.{i}.attention.{name}.{part}") if QUERY[config.query] else 0.0
    if part == "weight" and config.query in ("identity", "residual"):
        made = np.eye(rows, dtype=np.float32) + made
    return made * np.float32(config.scale * divides)


def query_role(config: Plain) -> str:
    return "wide" if config.query == "residual" else "matrix"  # of I + W, W is the small part


def neighbours(config: Plain) -> np.ndarray:
    """[D]: which of our values of a head is at each place where pairs are neighbours and the rest comes last."""
    half = config.rotated // 2
    pairs = np.stack([np.arange(half), np.arange(half) + half], axis=1).ravel()
    return np.concatenate([pairs, np.arange(2 * half, config.head_dim)])


def reordered(x: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """The rows [H*D, ...] with the D of each head in another order."""
    if order is None:
        return x
    return x.reshape(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)


# ---- the rest of a layer, and what is outside of layers ----


def common_metadata(config: Plain) -> dict[str, Any]:
    epsilon = "layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "layer_norm_epsilon"
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads,
        f"attention.{epsilon}": float(config.norm_eps),
    }


def embedding(config: Plain, factor: float = 1.0) -> GgufTensor:
    role = "head" if config.tied_head else "table"
    return GgufTensor("token_embd.weight", (config.vocab_size, config.width), role, reader("embedding.weight", factor))


def head(config: Plain) -> GgufTensor:
    source = "embedding.weight" if config.tied_head else "head.weight"
    return GgufTensor("output.weight", (config.vocab_size, config.width), "head", reader(source))


def norm(config: Plain, name: str, source: str, factor: float = 1.0, zeros: bool = False) -> list[GgufTensor]:
    """A norm times `factor`; zeros: with a bias in any case."""
    tensors = [GgufTensor(f"{name}.weight", (config.width,), "exact", reader(f"{source}.weight", factor))]
    if config.norm_bias:
        tensors.append(GgufTensor(f"{name}.bias", (config.width,), "exact", reader(f"{source}.bias", factor)))
    elif zeros:
        tensors.append(constant(f"{name}.bias", np.zeros(config.width)))
    return tensors


def feed_forward(config: Plain, i: int, suffix: str = "", zeros: bool = False) -> list[GgufTensor]:
    """The MLP. suffix: of its names, where an architecture has several MLPs."""
    inner, outer = (config.mlp_width, config.width), (config.width, config.mlp_width)
    shapes = ({"gate": inner} if config.gated_mlp else {}) | {"up": inner, "down": outer}
    tensors = []
    for part, shape in shapes.items():
        source = f"layers.{i}.mlp.{part}"
        tensors += linear(f"blk.{i}.ffn_{part}{suffix}", source, shape, config.mlp_bias, config.mlp_bias or zeros)
    return tensors


def linear(name: str, source: str, shape: tuple[int, int], has_bias: bool, bias: bool) -> list[GgufTensor]:
    """A matrix of the decoder and, with `bias`, its bias: zeros where the decoder has none."""
    tensors = [GgufTensor(f"{name}.weight", shape, "matrix", reader(f"{source}.weight"))]
    if has_bias:
        tensors.append(GgufTensor(f"{name}.bias", shape[:1], "exact", reader(f"{source}.bias")))
    elif bias:
        tensors.append(constant(f"{name}.bias", np.zeros(shape[0])))
    return tensors


def reader(source: str, factor: float = 1.0) -> Callable[[Read], np.ndarray]:
    """Makes a tensor of the decoder's weight `source`, times `factor`."""
    return lambda read: read(source) if factor == 1.0 else read(source) * np.float32(factor)


def constant(name: str, values: np.ndarray, role: str = "exact") -> GgufTensor:
    return GgufTensor(name, values.shape, role, lambda read: values.astype(np.float32))
