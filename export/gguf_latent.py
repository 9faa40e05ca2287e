"""The two architectures of llama.cpp that keep one row a token and layer, and how they carry Q-MQA.

llama.cpp leaves the V cache out where a model has latent attention, and then reads the values from the rows of K.
Both architectures put an RMSNorm between the projection and the cached row, whose weight no file can leave out; it
divides by the row's own size, which ours does not. But a norm computes x / sqrt(mean(x^2) + eps): of a row small
enough, eps is all of the root, and the norm is the division by a constant, which its weight takes back. So the
projection is written times `_SMALL`, 2^-60, where mean(x^2) is below half a unit in the last place of any eps, and the
result is our row to the rounding of float32.

`deepseek2` carries models without positions. A row in its cache is [the values | a part that is rotated], and both
parts are keys; ours has no rotated part. Rotary-on-read would need the row and the row rotated, which is again twice
the cache: such models are written with K and V (`llama`).

`deepseek4` rotates the row and undoes that on the output: rotary-conjugate. What it has besides, weights take out:

- four residual streams, mixed by sigmoids of constants: the first stream is read alone, and each gets the sum that a
  plain model has;
- experts: one of width 1 whose weights are zeros, beside a shared one that is our MLP; sinks of weight 0;
- a norm of the query before its second matrix, made constant as above (the second matrix is the identity); and one
  after it that has no weight. What that takes away, `_gain`, only the row can give back: it is a factor of the cached
  row, taken back in the output matrix. Relative to the scores it errs by mean(q^2) / (2 gain^2).
- a window, as long as the context; two stages of output projection, the first an identity a head.
"""

from __future__ import annotations

import math

import numpy as np

from edge_qkv.attention import FP16_MAX
from edge_qkv.config import ModelConfig
from edge_qkv.export import gguf_architectures as dense
from edge_qkv.export.gguf_architectures import Mapping, Read, Tensor
from edge_qkv.stored import UNUSED_ROTATED, gguf_keeps_one_row

_SMALL = 2.0**-60
_MOST_GAIN = 1024.0
_NEVER = -1e30  # as the score of a sink: a weight of 0


def map_model(config: ModelConfig) -> Mapping:
    """What a GGUF file of `config` holds; raises `InputError` with the reason where llama.cpp cannot compute it."""
    if not gguf_keeps_one_row(config):
        return dense.map_dense(config)
    return _deepseek4(config) if config.rotary else _deepseek2(config)


def _constant_norm(name: str, config: ModelConfig, count: int, factor: float = 1.0) -> Tensor:
    """The weight of a norm [count] that multiplies by `factor` what was written times `_SMALL`."""
    return dense.constant(name, np.full(count, math.sqrt(config.norm_eps) / _SMALL * factor))


def _deepseek2(config: ModelConfig) -> Mapping:
    dim, rows = config.head_dim, config.heads * config.head_dim
    key_length = dim + UNUSED_ROTATED
    tensors = [dense.embedding(config)]
    for i in range(config.layers):
        source = f"layers.{i}.attention"

        def query(read: Read, i: int = i) -> np.ndarray:
            made = dense.form_query(config, read, i, "weight", math.sqrt(key_length))
            made = made.reshape(config.heads, dim, config.width)
            return np.pad(made, ((0, 0), (0, UNUSED_ROTATED), (0, 0))).reshape(-1, config.width)

        def row(read: Read, source: str = source) -> np.ndarray:
            return np.pad(read(f"{source}.key.weight") * np.float32(_SMALL), ((0, UNUSED_ROTATED), (0, 0)))

        shape = (config.heads * key_length, config.width)
        each = np.broadcast_to(np.eye(dim, dtype=np.float32), (config.heads, dim, dim))
        tensors += [
            *dense.norm(config, f"blk.{i}.attn_norm", f"layers.{i}.attention_norm"),
            Tensor(f"blk.{i}.attn_q.weight", shape, dense.query_role(config), query),
            Tensor(f"blk.{i}.attn_kv_a_mqa.weight", (key_length, config.width), "exact", row),
            _constant_norm(f"blk.{i}.attn_kv_a_norm.weight", config, dim),
            dense.constant(f"blk.{i}.attn_k_b.weight", each, "wide"),
            dense.constant(f"blk.{i}.attn_v_b.weight", each, "wide"),
            *dense.linear(f"blk.{i}.attn_output", f"{source}.output", (config.width, rows), False, False),
            *dense.norm(config, f"blk.{i}.ffn_norm", f"layers.{i}.mlp_norm"),
            *dense.feed_forward(config, i),
        ]
    tensors += dense.norm(config, "output_norm", "norm")
    if not config.tied_head:
        tensors.append(dense.head(config))
    facts = dense.common_metadata(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": key_length,  # of what is cached
        "attention.value_length": dim,
        "attention.key_length_mla": key_length,  # of a head
        "attention.value_length_mla": dim,
        "attention.kv_lora_rank": dim,
        "attention.q_lora_rank": 0,
        "rope.dimension_count": UNUSED_ROTATED,
        "leading_dense_block_count": config.layers,
        "expert_feed_forward_length": 0,
        "expert_shared_count": 0,
    }
    return Mapping("deepseek2", facts, tensors)


# ---- deepseek4 ----

_STREAMS = 4  # the only number of them that its graph takes
_MIXES = (2 + _STREAMS) * _STREAMS
_SURE = 1e4  # sigmoid(1e4) is 1, sigmoid(-1e4) is 0
_FIRST = [_SURE] + [-_SURE] * (_STREAMS - 1)
_SQRT_SOFTPLUS = 4  # the gating that its loader demands


def _deepseek4(config: ModelConfig) -> Mapping:
    dim, rows, width = config.head_dim, config.heads * config.head_dim, config.width
    turned = dense.neighbours(config)
    order = np.concatenate([turned[config.rotated :], turned[: config.rotated]])  # its rotated values are the last
    each = np.tile(np.eye(dim, dtype=np.float32), (config.heads, 1))
    tensors = [dense.embedding(config)]
    for i in range(config.layers):

        def query(read: Read, i: int = i) -> np.ndarray:
            return dense.reordered(dense.form_query(config, read, i, "weight", 1.0), order) * np.float32(_SMALL)

        def query_norm(read: Read, i: int = i) -> np.ndarray:
            factor = math.sqrt(config.norm_eps) / _SMALL * math.sqrt(config.norm_eps * dim) / _gain(config, read, i)
            return np.full(rows, factor, np.float32)

        def row(read: Read, i: int = i) -> np.ndarray:
            return dense.reordered(read(f"layers.{i}.attention.key.weight"), order) * np.float32(_SMALL)

        def row_norm(read: Read, i: int = i) -> np.ndarray:
            return np.full(dim, math.sqrt(config.norm_eps) / _SMALL * _gain(config, read, i), np.float32)

        def output(read: Read, i: int = i) -> np.ndarray:
            columns = dense.reordered(read(f"layers.{i}.attention.output.weight").T, order).T
            return columns / np.float32(_gain(config, read, i))

        tensors += [
            *_streams(f"blk.{i}.hc_attn", width),
            *dense.norm(config, f"blk.{i}.attn_norm", f"layers.{i}.attention_norm"),
            dense.constant(f"blk.{i}.attn_sinks.weight", np.full(config.heads, _NEVER)),
            Tensor(f"blk.{i}.attn_q_a.weight", (rows, width), "exact", query),
            Tensor(f"blk.{i}.attn_q_a_norm.weight", (rows,), "exact", query_norm),
            dense.constant(f"blk.{i}.attn_q_b.weight", np.eye(rows, dtype=np.float32), "matrix"),
            Tensor(f"blk.{i}.attn_kv.weight", (dim, width), "exact", row),
            Tensor(f"blk.{i}.attn_kv_a_norm.weight", (dim,), "exact", row_norm),
            dense.constant(f"blk.{i}.attn_output_a.weight", each, "wide"),
            Tensor(f"blk.{i}.attn_output_b.weight", (width, rows), "matrix", output),
            *_streams(f"blk.{i}.hc_ffn", width),
            *dense.norm(config, f"blk.{i}.ffn_norm", f"layers.{i}.mlp_norm"),
            *dense.feed_forward(config, i, "_shexp"),
            dense.constant(f"blk.{i}.ffn_gate_inp.weight", np.zeros((1, width))),
            dense.constant(f"blk.{i}.exp_probs_b.bias", np.zeros(1)),
            dense.constant(f"blk.{i}.ffn_gate_exps.weight", np.zeros((1, 1, width))),
            dense.constant(f"blk.{i}.ffn_up_exps.weight", np.zeros((1, 1, width))),
            dense.constant(f"blk.{i}.ffn_down_exps.weight", np.zeros((1, width, 1))),
        ]
    tensors += [
        dense.constant("output_hc_fn.weight", np.zeros((_STREAMS, _STREAMS * width)), "matrix"),
        dense.constant("output_hc_base.weight", np.array(_FIRST)),
        dense.constant("output_hc_scale.weight", np.zeros(1)),
        *dense.norm(config, "output_norm", "norm"),
        dense.head(config),
    ]
    facts = dense.common_metadata(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.q_lora_rank": rows,
        "attention.output_group_count": config.heads,
        "attention.output_lora_rank": dim,
        "attention.sliding_window": config.window or config.max_positions,
        "attention.compress_ratios": [0] * config.layers,
        "attention.compress_rope_freq_base": float(config.rotary_base),
        "attention.indexer.head_count": 1,
        "attention.indexer.key_length": dim,
        "attention.indexer.top_k": 1,
        "rope.dimension_count": config.rotated,
        "rope.freq_base": float(config.rotary_base),
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": 1,
        "hyper_connection.epsilon": 0.0,
        "hash_layer_count": 0,
        "expert_count": 1,
        "expert_used_count": 1,
        "expert_shared_count": config.mlp_width,
        "expert_feed_forward_length": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": _SQRT_SOFTPLUS,
        "swiglu_clamp_exp": 0.0,
    }
    return Mapping("deepseek4", facts, tensors)


def _streams(name: str, width: int) -> list[Tensor]:
    """The mixing of streams before and after a block: no input decides it, and all streams stay equal."""
    return [
        dense.constant(f"{name}_fn.weight", np.zeros((_MIXES, _STREAMS * width)), "matrix"),
        dense.constant(f"{name}_base.weight", np.array(_FIRST + [0.0] * (_MIXES - _STREAMS))),
        dense.constant(f"{name}_scale.weight", np.zeros(3)),
    ]


def _gain(config: ModelConfig, read: Read, i: int) -> float:
    """The largest power of two up to `_MOST_GAIN` with which no row of layer i leaves fp16's range.

    A normed input is at most sqrt(width) long, which bounds each value of a row; a rotation adds up two of them.
    """
    rows = read(f"layers.{i}.attention.key.weight") * read(f"layers.{i}.attention_norm.weight")
    largest = math.sqrt(2 * config.width) * float(np.linalg.norm(rows, axis=1).max())
    return min(_MOST_GAIN, 2.0 ** math.floor(math.log2(FP16_MAX / max(largest, 1e-30))))
