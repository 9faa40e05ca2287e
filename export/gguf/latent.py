"""The architecture of llama.cpp that keeps one row a token and layer, and how it carries Q-MQA.

llama.cpp leaves the V cache out where a model has latent attention, and reads the values from the rows of K. Its
graphs put an RMSNorm between the projection and the cached row, which divides by the row's own size; ours does not.
But a norm computes x / sqrt(mean(x^2) + eps): of a row that is small enough, eps is all of the root, and the norm is
a division by a constant, which its weight takes back. So the projection is written times `_SMALL`, where mean(x^2) is
below half a unit in the last place of any eps, and what is cached is our row to the rounding of float32. (In float32:
on a processor that multiplies float32 matrices in fp16, as some graphics processors do, it would be zero.)

`deepseek2` carries models without positions so. A row in its cache is [latent | rotated], all of it key, the latent
part also value; the rotated part may be empty.

Rotary models have no such place. On read, a row's key is the row rotated and its value is not, so that the cache
would have to hold both, and `llama` does that already. Conjugate is what `deepseek4` computes, the only graph that
rotates the output back, but no file makes it a plain model: (1) without a layer of compressed rows it does not start:
`llama_kv_cache::build_input_k_rot` looks for the largest power of two that divides a head of size 0, and divides by
0; (2) its cache cannot forget the last tokens (`llama_kv_cache_dsv4::seq_rm`); (3) it norms each head of the query
without a weight, which only a larger row in the cache could take back, near the end of fp16's range.
"""

from __future__ import annotations

import math

import numpy as np

from edge_qkv.config import ModelConfig
from edge_qkv.export.gguf import architectures as dense
from edge_qkv.export.gguf.architectures import GgufModel, GgufTensor, Read
from edge_qkv.export.gguf.plain import Plain, plain
from edge_qkv.targets import gguf_keeps_one_row

_SMALL = 2.0**-60


def map_model(config: ModelConfig) -> GgufModel:
    """What a GGUF file of `config` holds; raises `InputError` with the reason where llama.cpp cannot compute it."""
    flat = plain(config)
    return _deepseek2(flat) if gguf_keeps_one_row(config) else dense.map_dense(flat)


def _deepseek2(config: Plain) -> GgufModel:
    dim, rows = config.head_dim, config.heads * config.head_dim
    scale_norm = np.full(dim, math.sqrt(config.norm_eps) / _SMALL)
    each = np.broadcast_to(np.eye(dim, dtype=np.float32), (config.heads, dim, dim))
    tensors = [dense.embedding(config)]
    for i in range(config.layers):
        source = f"layers.{i}.attention"

        def query(read: Read, i: int = i) -> np.ndarray:
            return dense.form_query(config, read, i, "weight", math.sqrt(dim))

        tensors += [
            *dense.norm(config, f"blk.{i}.attn_norm", f"layers.{i}.attention_norm"),
            GgufTensor(f"blk.{i}.attn_q.weight", (rows, config.width), dense.query_role(config), query),
            GgufTensor(
                f"blk.{i}.attn_kv_a_mqa.weight",
                (dim, config.width),
                "exact",
                dense.reader(f"{source}.key.weight", _SMALL),
            ),
            dense.constant(f"blk.{i}.attn_kv_a_norm.weight", scale_norm),
            dense.constant(f"blk.{i}.attn_k_b.weight", each, "wide"),  # from the row to each head's key and value
            dense.constant(f"blk.{i}.attn_v_b.weight", each, "wide"),
            *dense.linear(f"blk.{i}.attn_output", f"{source}.output", (config.width, rows), False, False),
            *dense.norm(config, f"blk.{i}.ffn_norm", f"layers.{i}.mlp_norm"),
            *dense.feed_forward(config, i),
        ]
    tensors += dense.norm(config, "output_norm", "norm")
    if not config.tied_head:
        tensors.append(dense.head(config))
    metadata = dense.common_metadata(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": dim,  # of a row in the cache
        "attention.value_length": dim,
        "attention.key_length_mla": dim,  # of a head
        "attention.value_length_mla": dim,
        "attention.kv_lora_rank": dim,
        "attention.q_lora_rank": 0,
        "rope.dimension_count": 0,
        "leading_dense_block_count": config.layers,  # all of them: none has experts
        "expert_feed_forward_length": 0,
        "expert_shared_count": 0,
    }
    return GgufModel("deepseek2", metadata, tensors)
