"""The unified-KV attention operator in PyTorch: the reference that every lowering is compared with.

`attend` has the signature that the decoder calls. An exporter hands the decoder a function of the same
signature that emits its own operator instead; nothing else of the model changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge_qkv.layer import LayerSpec

FP16_MAX = 65504.0
CACHE_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}  # by cache type


def rotary_tables(spec: LayerSpec, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the first `positions` positions, each [positions, R/2] float32, computed in float64."""
    frequencies = torch.tensor(spec.frequencies, dtype=torch.float64)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, offset: int = 0) -> Tensor:
    """Rotates R values of x [..., T, D] from `offset` on in half-split pairs; cos, sin [T, R/2]."""
    half = cos.shape[-1]
    before, a, b, rest = x.split([offset, half, half, x.shape[-1] - offset - 2 * half], dim=-1)
    return torch.cat([before, a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] as an int8 cache holds them: codes [..., D] int8 in [-127, 127] and scales [...] fp16.

    scale = max|row| / 127 as fp16, at most its largest number; code = row / scale to nearest even. A scale of 0
    makes all codes 0. NaN counts as 0.
    """
    rows = torch.where(rows.isnan(), 0.0, rows)
    scales = (rows.abs().amax(-1) / 127).clamp(max=FP16_MAX).half()
    divisor = torch.where(scales > 0, scales.float(), 1.0)[..., None]  # values below a scale of 0 are far below 1/2
    return (rows / divisor).round().clamp(-127, 127).to(torch.int8), scales


def _store(rows: list[Tensor], caches: tuple[Tensor, ...], past: int) -> None:
    """Writes new rows, each [B, G, T, D] or [B, G, T, V], into their caches at `past`."""
    for i, (new, cache) in enumerate(zip(rows, caches[: len(rows)], strict=True)):
        end = past + new.shape[2]
        if cache.dtype == torch.int8:
            cache[:, :, past:end], caches[len(rows) + i][:, :, past:end] = quantize_rows(new)
            continue
        if cache.dtype == torch.float16:  # saturate, as the kernels do: one inf would spoil every later token
            new = new.clamp(-FP16_MAX, FP16_MAX)
        cache[:, :, past:end] = new.to(cache.dtype)


def _stored(caches: tuple[Tensor, ...], count: int, end: int) -> list[Tensor]:
    """Rows [B, G, end, D or V] of the first `count` caches, in float32 unless they have a wider type."""
    rows = [cache[:, :, :end] for cache in caches[:count]]
    if caches[0].dtype == torch.int8:
        scales = [scale[:, :, :end, None].float() for scale in caches[count:]]
        return [codes.float() * scale for codes, scale in zip(rows, scales, strict=True)]
    return [row.float() if row.dtype == torch.float16 else row for row in rows]


def _visible(spec: LayerSpec, past: int, end: int, device: torch.device) -> Tensor | None:
    """Which rows [end] the queries at [past, end) see, [T, end]; None: each all before it, from row 0 on."""
    if not past and not spec.window:
        return None
    row, query = torch.arange(end, device=device), torch.arange(past, end, device=device)[:, None]
    visible = row <= query
    if spec.window:
        visible &= (row > query - spec.window) | (row < spec.sinks)
    return visible


def attend(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    caches: tuple[Tensor, ...] | None,
    past: int | Tensor,
    tables: tuple[Tensor, Tensor] | None,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Writes the new rows at `past` and attends over rows [0, past + T).

    query [B, T, H*D]; key [B, T, G*D], or None where the caches are an earlier layer's, which has written these
    tokens' rows; value [B, T, G*V], or None when keys and values are one tensor, or with key None; caches: one tensor
    (unified) or two, [B, G, C, D] and [B, G, C, V], fp32, fp16 or int8, and after int8 ones as many of scales,
    [B, G, C] fp16; updated in place; None in training, where the T rows are the whole sequence. key_weight [D]: keys
    are that times the row. Returns the attention [B, T, H*V] and the caches.
    """
    heads, groups, dim, offset = spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_offset
    batch, tokens, _ = query.shape
    past = int(past)
    end = past + tokens
    conjugate = spec.positions == "rotary-conjugate"

    q = query.view(batch, tokens, heads, dim).transpose(1, 2)  # [B, H, T, D]
    new = [x.view(batch, tokens, groups, -1).transpose(1, 2) for x in (key, value) if x is not None]  # [B, G, T, D/V]
    if spec.rotary:
        cos, sin = tables
        here = cos[past:end], sin[past:end]
        q = rotate(q, *here, offset)
        if conjugate and new:
            new[0] = rotate(new[0], *here, offset)
    if caches is not None:
        _store(new, caches, past)
        new = _stored(caches, spec.caches, end)
    keys, values = new[0], new[-1][..., : spec.values]
    if key_weight is not None:
        keys = keys * key_weight
    if spec.positions == "rotary-on-read":
        keys = rotate(keys, cos[:end], sin[:end], offset)

    mask = _visible(spec, past, end, q.device)
    if groups == 1:  # a view, where enable_gqa would copy
        keys, values = (x.expand(batch, heads, end, x.shape[-1]) for x in (keys, values))
    out = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=mask is None, scale=spec.scale, enable_gqa=1 < groups < heads
    )  # [B, H, T, V]
    if spec.output_rotated:
        out = rotate(out, here[0], -here[1], offset)
    return out.transpose(1, 2).reshape(batch, tokens, heads * spec.values), caches
