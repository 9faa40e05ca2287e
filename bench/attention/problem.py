"""What `edge-qkv bench attention` has its contestants compute, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge_qkv.errors import EdgeQKVError

HEADS, HEAD_DIM = 32, 64  # query heads; they share one kv head


class Missing(Exception):
    """What a contestant needs is not there; says why, and what installs it."""


@dataclass(frozen=True)
class Problem:
    """The last T tokens' queries over all rows N, which are keys and values at once, in every layer the same."""

    query: np.ndarray  # [1, T, H*D] float32
    rows: np.ndarray  # [N, D] float32
    layers: int  # each has a cache of its own, as in a model: one alone would stay in the processor's
    threads: int

    @property
    def tokens(self) -> int:
        return self.query.shape[1]

    @property
    def past(self) -> int:
        """Rows that are in the cache before the call; it adds the others."""
        return len(self.rows) - self.tokens

    @property
    def new(self) -> np.ndarray:
        """[1, T, D]"""
        return self.rows[None, self.past :]


@dataclass(frozen=True)
class Bound:
    """A contestant with everything in place for one problem."""

    run: Callable[[], object]
    output: Callable[[], np.ndarray]  # [T, H*D], of the last layer, after a run
    rows: np.ndarray  # [N, D], as the cache holds them


@dataclass(frozen=True)
class Contestant:
    """An operator with a type of cache."""

    name: str
    bind: Callable[[Problem], Bound]  # raises `Missing`
    tolerance: float  # of an output, relative to the largest
    ours: bool = False


def make_problem(depth: int, tokens: int, layers: int, threads: int) -> Problem:
    generator = np.random.default_rng(depth)
    query = generator.normal(scale=2, size=(1, tokens, HEADS * HEAD_DIM)).astype(np.float32)
    rows = generator.normal(size=(depth + tokens, HEAD_DIM)).astype(np.float32)
    return Problem(query, rows, layers, threads)


def reference(query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Attention [H*D] of one token's heads over all rows [N, D], in float64."""
    rows, heads = rows.astype(np.float64), query.reshape(HEADS, HEAD_DIM).astype(np.float64)
    scores = heads @ rows.T * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ rows / weights.sum(-1, keepdims=True)).ravel()


def check(contestant: Contestant, problem: Problem, bound: Bound) -> None:
    """Raises `EdgeQKVError` where an output is wrong; of many tokens it looks at the first, a middle and the last."""
    output = bound.output()
    for token in sorted({0, problem.tokens // 2, problem.tokens - 1}):
        want = reference(problem.query[0, token], bound.rows[: problem.past + token + 1])
        off = np.abs(output[token] - want).max() / np.abs(want).max()
        if not off <= contestant.tolerance:  # also where it is not a number
            raise EdgeQKVError(
                f"{contestant.name} at depth {problem.past:,} is off by {off:.2g} of its largest output value"
            )
