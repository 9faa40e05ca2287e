"""Block quantisation: a row of weights in blocks, each block whole numbers times one scale.

Symmetric, round to nearest: w = scale * (q - zero_point) with q unsigned, 4 or 8 bits, and a fixed
zero_point of 2^(bits - 1). The scale of a 4-bit block is searched for the least squared error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_qkv.attention import FP16_MAX
from edge_qkv.errors import InputError

_CHUNK = 1 << 18  # weights worked on at once: the temporaries stay in the processor's cache
# Divisors of a block's largest weight that are tried for 4 bits. The largest weight takes the code -8
# (divisor 8), is clipped (below) or leaves codes unused (above); the range is where minima were found.
_DIVISORS_4BIT = (5.6, 6.2, 6.7, 7.1, 7.5, 7.9, 8.3, 8.8)


@dataclass(frozen=True)
class Quantized:
    """A matrix [N, K] in blocks of `block_size` along K; the last block is padded with zeros."""

    codes: Tensor  # uint8 [N, blocks, block_size * bits / 8]; two 4-bit codes a byte, the even one low
    scales: Tensor  # float32 [N, blocks]
    bits: int
    block_size: int
    columns: int  # K


def blocks_of(columns: int, block_size: int) -> int:
    return -(-columns // block_size)


def quantize(weight: Tensor, bits: int, block_size: int) -> Quantized:
    """Quantises weight [N, K] to 4 or 8 bits. Raises `InputError` for weights that are not finite."""
    rows, columns = weight.shape
    blocks = blocks_of(columns, block_size)
    codes = torch.empty(rows, blocks, block_size * bits // 8, dtype=torch.uint8)
    scales = torch.empty(rows, blocks, dtype=torch.float32)
    step = max(1, _CHUNK // (blocks * block_size))
    for start in range(0, rows, step):
        part = weight[start : start + step].to(torch.float32)  # [n, K]
        part = torch.nn.functional.pad(part, (0, blocks * block_size - columns))
        part = part.view(-1, blocks, block_size)  # [n, blocks, block_size]
        peak = part.abs().amax(-1)  # [n, blocks]; not finite where a weight is not
        if not torch.isfinite(peak).all():
            raise InputError("holds values that are not finite; the checkpoint is damaged or was saved while diverging")
        scale = _search_scales(part) if bits == 4 else peak / 127
        levels = _round(part, scale, bits)
        scales[start : start + step] = scale
        codes[start : start + step] = _pack(levels, bits)
    return Quantized(codes, scales, bits, block_size, columns)


def dequantize(quantized: Quantized) -> Tensor:
    """The weights [N, K] float32 that the codes stand for."""
    codes = quantized.codes
    if quantized.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [N, blocks, block_size]
    levels = codes.to(torch.float32) - 2 ** (quantized.bits - 1)
    return (levels * quantized.scales[..., None]).flatten(1)[:, : quantized.columns].contiguous()


def quantize_signed(weight: Tensor, bits: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantises weight [N, K] to signed codes q [N, K] int8 of 4 or 8 bits and scales [N, K / block_size] fp16.

    Codes are chosen for the rounded scales. No scale is negative: those that coremltools makes never are, and who reads
    them may rely on it.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // block_size, dtype=torch.float16)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = weight[start : start + step].to(torch.float32).view(-1, columns // block_size, block_size)
        scale = _search_scales(part, positive=True) if bits == 4 else part.abs().amax(-1) / 127
        scale = scale.clamp(max=FP16_MAX).half()
        scales[start : start + step] = scale
        codes[start : start + step] = _round(part, scale.float(), bits).flatten(1).to(torch.int8)
    return codes, scales


def _search_scales(blocks: Tensor, positive: bool = False) -> Tensor:
    """The best scale of each block [..., block_size] for 4 bits, [...]; negative where the largest weight is positive,
    unless all are to be `positive`.

    For codes q the best scale is <w, q> / <q, q>, which leaves an error of |w|^2 - <w, q>^2 / <q, q>:
    so the codes of every candidate scale are rated by <w, q>^2 / <q, q>, and the winner's scale refitted.
    """
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # signed [..., 1]
    if positive:
        largest = -largest.abs()
    inverse = torch.where(largest == 0, 0.0, -1.0 / largest)
    best_gain = torch.full(blocks.shape[:-1], -1.0)
    best_scale = torch.zeros(blocks.shape[:-1])
    for divisor in _DIVISORS_4BIT:
        levels = (blocks * (inverse * divisor)).round_().clamp_(-8, 7)
        cross = torch.einsum("...i,...i->...", blocks, levels)
        square = torch.einsum("...i,...i->...", levels, levels).clamp_(min=1.0)
        scale = cross / square
        gain = cross * scale
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _round(blocks: Tensor, scale: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)[..., None]
    half = 2 ** (bits - 1)
    return (blocks * inverse).round_().clamp_(-half, half - 1)


def _pack(levels: Tensor, bits: int) -> Tensor:
    codes = (levels + 2 ** (bits - 1)).to(torch.uint8)
    return codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
