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
CACHE_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}  # by cache type


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


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] as an int8 cache holds them: codes [..., D] int8 in [-127, 127] and scales [...] fp16.

    scale = max|row| / 127 as fp16, at most its largest number; code = row / scale to nearest even. A scale of 0
    makes all codes 0. NaN counts as 0.
    """
    rows = torch.where(rows.isnan(), 0.0, rows)
    scales = (rows.abs().amax(-1) / 127).clamp(max=FP16_MAX).half()
    divisor = torch.where(scales > 0, scales.float(), 1.0)[..., None]  # values below a scale of 0 are far below 1/2
    return (rows / divisor).round().clamp(-127, 127).to(torch.int8), scales


def _store(rows: list[Tensor], caches: tuple[Tensor, ...], past: int) -> list[Tensor]:
    """Writes new rows [B, G, T, D] into their caches at `past`; returns all rows [B, G, past+T, D] in float32."""
    end = past + rows[0].shape[2]
    stored = []
    for i, (new, cache) in enumerate(zip(rows, caches[: len(rows)], strict=True)):
        if cache.dtype == torch.int8:
            scales = caches[len(rows) + i]
            cache[:, :, past:end], scales[:, :, past:end] = quantize_rows(new)
            stored.append(cache[:, :, :end].float() * scales[:, :, :end, None].float())
            continue
        if cache.dtype == torch.float16:  # saturate, as the kernels do: one inf would spoil every later token
            new = new.clamp(-FP16_MAX, FP16_MAX)
        cache[:, :, past:end] = new.to(cache.dtype)
        stored.append(cache[:, :, :end].to(new.dtype))
    return stored


def _visible(config: ModelConfig, past: int, end: int, device: torch.device) -> Tensor | None:
    """Which rows [end] the queries at [past, end) see, [T, end]; None: each all before it, from row 0 on."""
    if not past and not config.window:
        return None
    row, query = torch.arange(end, device=device), torch.arange(past, end, device=device)[:, None]
    visible = row <= query
    if config.window:
        visible &= (row > query - config.window) | (row < config.sinks)
    return visible


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
    caches: one tensor (unified) or two, [B, G, C, D] fp32, fp16 or int8, and after int8 ones as many of scales,
    [B, G, C] fp16; updated in place; None in training, where the T rows are the whole sequence. Returns the
    attention [B, T, H*D] and the caches.
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
        rows = _store(rows, caches, past)
    keys, values = rows[0], rows[-1]
    if config.positions == "rotary-on-read":
        keys = rotate(keys, cos[:end], sin[:end])

    mask = _visible(config, past, end, q.device)
    if groups == 1:  # a view, where enable_gqa would copy
        keys, values = (x.expand(batch, heads, end, dim) for x in (keys, values))
    out = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=mask is None, scale=config.scale, enable_gqa=1 < groups < heads
    )  # [B, H, T, D]
    if conjugate and value is None:
        out = rotate(out, here[0], -here[1])
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim), caches
