"""Seconds of a session: decode and prefill at a depth of context, the first token of a prompt; and whether the tokens
that were timed are right.

The cache is filled with noise up to a depth, which costs the same as text and takes seconds where a prefill of 32k
takes minutes. Decoding is greedy: each timed token is evaluated and the next one chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from edge_qkv import EdgeQKVError, Model, Sampling, Session
from edge_qkv.bench.figures import figure, rate, repeat, seconds

TOKENS = 8  # decoded and timed at a depth, or as many as the context has room for
FIRST = 0  # the token that is evaluated first at a depth
_GREEDY = Sampling(temperature=0, seed=0)
# Largest difference between the logits of tokens read as a chunk and one by one, in standard deviations of the
# logits. Engines add up a chunk in another order than a row; where values are rounded to 8 bits (activations with all
# weights but fp32, rows of an int8 cache) the last bit of a sum may move one of them to the next step.
TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.25


def tolerance(model: Model) -> float:
    exact = model.package.manifest["weights"] == "fp32" and model.cache_type != "int8"
    return TOLERANCE if exact else ROUNDED_TOLERANCE


def prompt(length: int, vocab_size: int) -> list[int]:
    """Fixed tokens that differ from each other as far as the vocabulary goes."""
    return [(11 + 37 * i) % vocab_size for i in range(length)]


def decode(session: Session, depth: int, repeats: int, limit: float) -> tuple[list[float], list[int]]:
    """(milliseconds a token of each repeat, the tokens that were decoded) with `depth` tokens in the cache.

    A repeat times `TOKENS` tokens, in several runs where the context has no room for them, and is their median.
    Raises `EdgeQKVError` where a run decodes other tokens than the first.
    """
    session.set_sampling(_GREEDY)
    session.fill(depth)
    count = min(TOKENS, session.context - depth)
    _, decoded = _run(session, depth, count)  # warm: pages of the weights, threads

    def once() -> float:
        times: list[float] = []
        while len(times) < TOKENS:
            found, again = _run(session, depth, count)
            if again != decoded:
                raise EdgeQKVError(
                    f"{session.model.package.path}: decoded {again} at depth {depth:,} after {decoded} at the same "
                    "depth, so its speed means nothing"
                )
            times += found
        return median(times) * 1e3

    return repeat(once, repeats, limit), decoded


def _run(session: Session, depth: int, count: int) -> tuple[list[float], list[int]]:
    session.rewind(depth)
    token, times, decoded = FIRST, [], []
    for _ in range(count):
        began = time.perf_counter()
        session.evaluate([token])
        token = session.sample()
        times.append(time.perf_counter() - began)
        decoded.append(token)
    return times, decoded


def verify(session: Session, decoded: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Compares decoded tokens with what the session says when it reads those of a depth as one chunk.

    A token is right where no other has a logit that is higher by more than twice the tolerance (either logit may be off
    by once), in standard deviations of the logits. Raises `EdgeQKVError` for one that is not.
    """
    model = session.model
    allowed = 2 * tolerance(model)
    equal, largest, total = 0, 0.0, 0
    for depth, tokens in decoded:
        session.fill(depth)
        logits = session.score([FIRST, *tokens[:-1]])  # [n, V]
        same, short = compared(logits, tokens, allowed, depth, str(model.package.path))
        largest = max(largest, short)
        equal, total = equal + same, total + len(tokens)
        session.rewind(depth)
    return {"tokens": total, "equal": equal, "largest_shortfall": largest, "allowed_shortfall": allowed}


def compared(logits: np.ndarray, tokens: Sequence[int], allowed: float, depth: int, name: str) -> tuple[int, float]:
    """Of decoded tokens, how many are the likeliest by the logits [n, V] of a chunk, and what the others' logits lack
    at most, in standard deviations; raises `EdgeQKVError` beyond `allowed`."""
    best, largest = logits.argmax(-1), 0.0
    for i, token in enumerate(tokens):
        short = float((logits[i, best[i]] - logits[i, token]) / logits[i].std())
        if not short <= allowed:  # also where it is not a number
            raise EdgeQKVError(
                f"token {i + 1} decoded at depth {depth:,} was {token}, where {name}, reading the same tokens as a "
                f"chunk, says {best[i]} (its logit is higher by {short:.2g} standard deviations, {allowed} are "
                "allowed); a wrong answer has no speed"
            )
        largest = max(largest, short)
    return int((best == tokens).sum()), largest


def prefill(session: Session, depth: int, repeats: int, limit: float) -> dict[str, Any]:
    """Tokens per second of one chunk at a depth, or at the deepest that leaves room for it."""
    count = min(session.prefill_chunk, session.context)
    start = min(depth, session.context - count)
    tokens = prompt(count, session.model.config.vocab_size)
    session.rewind(min(start, len(session.tokens)))
    session.fill(start)

    def once() -> float:
        session.rewind(start)
        return seconds(lambda: session.evaluate(tokens))

    if depth == 0:
        once()  # warm: pages of the weights, threads
    found = rate(figure(repeat(once, repeats, limit)), count)
    session.rewind(start)
    return {"depth": depth, "start": start, "tokens": count, "tokens_per_second": found}


def first_token(session: Session, tokens: Sequence[int]) -> float:
    """Seconds from a prompt to the first token after it, in an empty session."""
    session.set_sampling(_GREEDY)
    session.rewind(0)
    return seconds(lambda: (session.evaluate(tokens), session.sample()))


def prompts(session: Session, lengths: Sequence[int], repeats: int, limit: float) -> list[dict[str, Any]]:
    """Milliseconds to the first token for each length, ascending. One that would take longer than `limit` seconds, by
    what the one before took, is left out: `milliseconds` is then None."""
    rows: list[dict[str, Any]] = []
    first_token(session, [FIRST])  # warm: pages of the weights, threads
    expected = 0.0
    for i, length in enumerate(lengths):
        tokens = prompt(length, session.model.config.vocab_size)
        found = None
        if expected <= limit:
            times = repeat(lambda tokens=tokens: first_token(session, tokens), repeats, limit)
            found = figure([1e3 * t for t in times])
            expected = median(times) * (lengths[i + 1] / length if i + 1 < len(lengths) else 1)
        rows.append({"tokens": length, "milliseconds": found})
        if found is None:
            expected = math.inf
    return rows
