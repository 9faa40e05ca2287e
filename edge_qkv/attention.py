"""The unified-KV attention operator in PyTorch: the reference that every lowering is compared with.

`attend` has the signature that the decoder calls. An exporter hands the decoder a function of the same
signature that emits its own operator instead; nothing else of the model changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge_qkv.config import ModelConfig

FP16_MAX = 65504.0


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [max_positions, R/2] float32, computed in float64."""
    half = config.rotated // 2
    frequency = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R values of x [..., T, D] in half-split pairs; cos, sin [T, R/2]."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attend(
    config: ModelConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    caches: tuple[Tensor, ...] | None,
    past: int | Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Writes the new rows at `past` and attends over rows [0, past + T).

    query [B, T, H*D]; key [B, T, G*D]; value [B, T, G*D], or None when keys and values are one tensor;
    caches: one tensor (unified) or two, [B, G, C, D] fp32 or fp16, updated in place; None in training,
    where the T rows are the whole sequence. Returns the attention [B, T, H*D] and the caches.
    """
    heads, groups, dim = config.heads, config.kv_heads, config.head_dim
    batch, tokens, _ = query.shape
    past = int(past)
    end = past + tokens
    conjugate = config.positions == "rotary-conjugate"

    q = query.view(batch, tokens, heads, dim).transpose(1, 2)  # [B, H, T, D]
    rows = [x.view(batch, tokens, groups, dim).transpose(1, 2) for x in (key, value) if x is not None]  # [B, G, T, D]
    if config.rotary:
        cos, sin = tables
        here = cos[past:end], sin[past:end]
        q = rotate(q, *here)
        if conjugate:
            rows[0] = rotate(rows[0], *here)
    if caches is not None:
        for cache, new in zip(caches, rows, strict=True):
            if cache.dtype == torch.float16:  # saturate, as the kernels do: one inf would spoil every later token
                new = new.clamp(-FP16_MAX, FP16_MAX)
            cache[:, :, past:end] = new.to(cache.dtype)
        rows = [cache[:, :, :end].to(q.dtype) for cache in caches]  # [B, G, past+T, D]
    keys, values = rows[0], rows[-1]
    if config.positions == "rotary-on-read":
        keys = rotate(keys, cos[:end], sin[:end])

    mask = None
    if past:
        mask = torch.ones(tokens, end, dtype=torch.bool, device=q.device).tril(past)  # [T, past+T]
    if groups == 1:  # a view, where enable_gqa would copy
        keys, values = (x.expand(batch, heads, end, dim) for x in (keys, values))
    out = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=mask is None, scale=config.scale, enable_gqa=1 < groups < heads
    )  # [B, H, T, D]
    if conjugate and value is None:
        out = rotate(out, here[0], -here[1])
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim), caches
