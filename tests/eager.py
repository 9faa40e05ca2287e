"""What the eager decoder says, and the walk on which a session is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edge_qkv import Session
from edge_qkv.model import Decoder

# fp32 on both sides, sums of at most ~100 products in another order, logits of order 10.
TOLERANCE = 1e-4
_CACHES = {"fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class Expected:
    ids: list[int]
    logits: np.ndarray  # [len(ids), V], the eager decoder's
    tolerance: float


@torch.no_grad()
def expect(decoder: Decoder, count: int, cache: str = "fp32", seed: int = 2) -> Expected:
    """The logits after each of `count` random tokens, through a cache of that type."""
    ids = torch.randint(0, decoder.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))
    logits, tolerance = decoder(ids[None])[0], TOLERANCE
    if cache in _CACHES:
        unrounded, logits = logits, decoder(ids[None], 0, decoder.new_caches(count, _CACHES[cache]))[0]
        # A value in the middle of two codes may be rounded to either: one of many errors of that size.
        tolerance = (logits - unrounded).abs().max().item() / 3
        assert TOLERANCE < tolerance < 0.02 * logits.abs().max()
    assert logits.abs().max() > 1
    return Expected(ids.tolist(), logits[0].numpy(), tolerance)


def walk(score: Callable, rewind: Callable, expected: Expected, chunk: int) -> None:
    """Prefill, chunked prefill, decode and rewinds, at every length near a border.

    score(tokens, chunk) appends and returns logits [n, V]; rewind(n) forgets all but n tokens.
    """
    ids, capacity = expected.ids, len(expected.ids)

    def check(part: slice, chunk: int) -> None:
        np.testing.assert_allclose(score(ids[part], chunk), expected.logits[part], rtol=1e-7, atol=expected.tolerance)

    for length in (1, 2, 7, 8, 9, chunk - 1, chunk, chunk + 1, capacity - 1, capacity):
        rewind(0)
        check(slice(0, length), capacity)
        rewind(length // 2)
        check(slice(length // 2, length), chunk)
    rewind(0)
    score([(i + 1) % 90 for i in ids], chunk)  # other rows, which must leave no trace
    rewind(0)
    check(slice(0, capacity // 2), chunk)
    check(slice(capacity // 2, capacity), 1)


def walk_session(session: Session, expected: Expected, chunk: int) -> None:
    def score(tokens: Sequence[int], chunk: int) -> np.ndarray:
        return np.concatenate([session.score(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])

    walk(score, session.rewind, expected, chunk)
