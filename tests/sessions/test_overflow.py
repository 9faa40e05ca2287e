"""A full context that goes on: what is dropped, and that the rest is as if it had been written where it now is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import TINY, changed
from edge_qkv import ContextFull, Sampling, Session
from edge_qkv.attention import rotary_tables, rotate
from edge_qkv.model import Decoder

CONTEXT, CHUNK, TOKENS = 40, 8, 200
POLICIES = {
    "window": dict(overflow="window", sinks=4, window=16),
    "window without sinks": dict(overflow="window", sinks=0, window=16),
    "shift": dict(overflow="shift", block=12),
}
LAYOUTS = {
    f"{positions} {sharing} x{kv_heads}": dict(positions=positions, sharing=sharing, kv_heads=kv_heads)
    for positions in ("rotary-conjugate", "rotary-on-read", "none")
    for sharing, kv_heads in (("q-k=v", 1), ("qkv", 2))
}
# Every two of them together, here or in the next test: exports take seconds. The others are slow.
QUICK = {
    ("onnx", "rotary-conjugate q-k=v x1"),
    ("onnx", "rotary-conjugate qkv x2"),
    ("onnx", "rotary-on-read qkv x2"),
    ("onnx", "none qkv x2"),
    ("executorch", "rotary-conjugate qkv x2"),
    ("executorch", "none q-k=v x1"),
}
LOWERED = [
    pytest.param(target, layout, marks=() if (target, layout) in QUICK else pytest.mark.slow)
    for target in ("onnx", "executorch")
    for layout in LAYOUTS
]
# fp32 sums of at most 100 products in another order, logits of order 10; each drop rotates the rows once more.
TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(4)).tolist()


def _dropped(policy: dict, length: int, more: int) -> tuple[int, int]:
    """Rows [first, last) that the policy drops, from its description."""
    if length + more <= CONTEXT:
        return 0, 0
    if policy["overflow"] == "window":
        return policy["sinks"], length - policy["window"]
    blocks = -(-(length + more - CONTEXT) // policy["block"])
    return 0, min(length, blocks * policy["block"])


def _drop(decoder: Decoder, caches, first: int, last: int, length: int) -> None:
    """Takes rows [first, last) out of the caches; rotated rows are turned back and to their new positions."""
    spec = decoder.config.only
    moves = spec.positions == "rotary-conjugate"
    cos, sin = rotary_tables(spec, decoder.config.max_positions) if moves else (None, None)
    for layer in caches:
        for i, cache in enumerate(layer):
            rows = cache[:, :, last:length].clone()
            if moves and i == 0:
                rows = rotate(rows, cos[last:length], -sin[last:length])
                rows = rotate(rows, cos[first : first + length - last], sin[first : first + length - last])
            cache[:, :, first : first + length - last] = rows


@torch.no_grad()
def _expected(decoder: Decoder, tokens: list[int], policy: dict) -> tuple[np.ndarray, int]:
    """Logits [n, V] of the eager decoder under the policy, and how many tokens it dropped."""
    caches, length, dropped, logits = decoder.new_caches(CONTEXT), 0, 0, []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        first, last = _dropped(policy, length, len(chunk))
        if last > first:
            _drop(decoder, caches, first, last, length)
            length -= last - first
            dropped += last - first
        logits.append(decoder(torch.tensor([chunk]), length, caches)[0][0])
        length += len(chunk)
    return torch.cat(logits).numpy(), dropped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("target", "layout"), LOWERED)
def test_a_full_context_goes_on_like_the_decoder(random_package, ids, target, layout, policy):
    decoder, package = random_package(target, changed(TINY, max_positions=CONTEXT, **LAYOUTS[layout]))
    expected, dropped = _expected(decoder, ids, POLICIES[policy])
    assert dropped > 2 * CONTEXT
    with Session(package, context=CONTEXT, prefill_chunk=CHUNK, **POLICIES[policy]) as session:
        np.testing.assert_allclose(session.score(ids), expected, atol=TOLERANCE)
        assert session.dropped == dropped
        assert len(session.tokens) == TOKENS - dropped <= CONTEXT
        sinks = POLICIES[policy].get("sinks", 0)
        assert session.tokens == ids[:sinks] + ids[sinks + dropped :]


@pytest.mark.parametrize(
    ("target", "positions", "policy"),
    [
        ("onnx", "rotary-conjugate", dict(overflow="window", sinks=0, window=16)),
        ("onnx", "rotary-on-read", dict(overflow="shift", block=12)),
        pytest.param("onnx", "none", dict(overflow="window", sinks=0, window=16), marks=pytest.mark.slow),
        pytest.param("executorch", "rotary-conjugate", dict(overflow="shift", block=12), marks=pytest.mark.slow),
        pytest.param(
            "executorch", "rotary-conjugate", dict(overflow="window", sinks=0, window=16), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value["overflow"] if isinstance(value, dict) else value,
)
def test_dropping_what_no_query_sees_changes_nothing(random_package, ids, target, positions, policy):
    """A model that looks back 16 tokens writes in a context of 40 what it writes in one that holds everything."""
    config = changed(TINY, max_positions=TOKENS, positions=positions, window=16)
    decoder, package = random_package(target, config)
    with torch.no_grad():
        expected = decoder(torch.tensor([ids]))[0][0].numpy()
    with Session(package, context=CONTEXT, prefill_chunk=CHUNK, **policy) as session:
        np.testing.assert_allclose(session.score(ids), expected, atol=TOLERANCE)
        assert session.dropped > 0


@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_moved_rows_stay_close_in_a_rounded_cache(random_package, ids, cache):
    """A row that moves is rounded again: logits differ by a few roundings, not by a position."""
    config = changed(TINY, max_positions=CONTEXT)
    decoder, package = random_package("onnx", config, cache)
    expected, _ = _expected(decoder, ids, POLICIES["window"])
    with Session(package, context=CONTEXT, prefill_chunk=CHUNK, **POLICIES["window"]) as session:
        error = np.abs(session.score(ids) - expected)
    # Rows of a relative error of 2^-11 or 2^-8 a rounding, in logits of order 10.
    assert error.max() < {"fp16": 0.05, "int8": 0.6}[cache]
    assert error.mean() < {"fp16": 0.004, "int8": 0.06}[cache]


def test_generation_goes_on_past_the_context(random_package, ids):
    _, package = random_package("onnx", changed(TINY, max_positions=CONTEXT))
    with Session(package, context=CONTEXT, prefill_chunk=CHUNK, overflow="shift") as session:
        written = list(session.generate_tokens(ids[:30], 100, Sampling(temperature=0)))
        assert len(written) == 100 == len(session.generated)
        assert session.tokens == (ids[:30] + written)[-len(session.tokens) :]
    with Session(package, context=CONTEXT) as strict, pytest.raises(ContextFull):
        list(strict.generate_tokens(ids[:30], 100, Sampling(temperature=0)))


def test_dropped_rows_are_gone_after_a_rewind_and_a_new_start(random_package, ids):
    decoder, package = random_package("onnx", changed(TINY, max_positions=CONTEXT))
    with torch.no_grad():
        expected = decoder(torch.tensor([ids[:CONTEXT]]))[0][0].numpy()
    with Session(package, context=CONTEXT, prefill_chunk=CHUNK, overflow="shift", block=12) as session:
        session.evaluate(ids)
        session.rewind(0)
        np.testing.assert_allclose(session.score(ids[:CONTEXT]), expected, atol=TOLERANCE)
