"""Block quantisation: what the codes mean, and how far they are from the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_qkv.errors import InputError
from edge_qkv.export.quantize import blocks_of, dequantize, quantize
from edge_qkv.targets import BLOCK_SIZES


def _weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_and_padding(bits, block_size):
    quantized = quantize(_weights(5, 744), bits, block_size)
    blocks = blocks_of(744, block_size)
    assert quantized.codes.shape == (5, blocks, block_size * bits // 8)
    assert quantized.codes.dtype == torch.uint8
    assert quantized.scales.shape == (5, blocks)
    assert dequantize(quantized).shape == (5, 744)


def test_codes_are_packed_with_the_even_one_low_and_zero_in_the_middle():
    weight = torch.zeros(1, 16)
    weight[0, :4] = torch.tensor([-8.0, 1.0, 3.0, 0.0])
    quantized = quantize(weight, 4, 16)
    low, high = quantized.codes & 15, quantized.codes >> 4
    levels = torch.stack((low, high), -1).flatten().int() - 8
    assert levels.tolist() == [-8, 1, 3, 0] + [0] * 12
    assert quantized.scales.item() == pytest.approx(1.0)


def test_eight_bit_codes_are_within_half_a_step():
    weight = _weights(16, 100)
    quantized = quantize(weight, 8, 32)
    step = quantized.scales.repeat_interleave(32, 1)[:, :100]
    assert ((dequantize(quantized) - weight).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_on_the_grid_come_back_exactly(sign):
    levels = torch.arange(-8, 8).repeat(3, 2).float()
    weight = levels * sign * 2.0**-5
    assert torch.equal(dequantize(quantize(weight, 4, 32)), weight)


def test_the_search_is_never_worse_than_the_largest_weight_as_full_scale():
    weight = _weights(64, 256)
    blocks = weight.view(64, 8, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 7
    plain = ((blocks / scale).round() * scale - blocks).pow(2).sum(-1)
    found = (dequantize(quantize(weight, 4, 32)) - weight).view(64, 8, 32).pow(2).sum(-1)
    assert found.mean() < 0.8 * plain.mean()
    assert (found <= plain * 1.05).float().mean() > 0.95


def test_smaller_blocks_lose_less():
    weight = _weights(64, 512)
    errors = [(dequantize(quantize(weight, 4, size)) - weight).pow(2).mean().item() for size in BLOCK_SIZES]
    assert errors == sorted(errors)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits):
    weight = _weights(4, 64)
    weight[1] = 0
    quantized = quantize(weight, bits, 32)
    assert torch.isfinite(quantized.scales).all()
    assert (dequantize(quantized)[1] == 0).all()


def test_a_row_does_not_depend_on_its_neighbours():
    """Work is done in pieces; where they end must not show."""
    weight = _weights(300, 4096)
    whole = quantize(weight, 4, 64)
    alone = quantize(weight[257:258], 4, 64)
    assert torch.equal(whole.codes[257:258], alone.codes)
    assert torch.equal(whole.scales[257:258], alone.scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type(dtype):
    weight = _weights(4, 64).to(dtype)
    assert torch.equal(quantize(weight, 4, 32).codes, quantize(weight.float(), 4, 32).codes)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_is_refused(bits, bad):
    weight = _weights(4, 64)
    weight[2, 40] = bad
    with pytest.raises(InputError, match="not finite"):
        quantize(weight, bits, 32)
