"""Perplexities compared: means over seeds, how far seeds part, and which orders agree.

All in logarithms, where a difference is a share of the perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations


def mean(perplexities: Sequence[float]) -> float:
    """Of the losses, as perplexity."""
    return math.exp(sum(map(math.log, perplexities)) / len(perplexities))


def excess(perplexity: float, base: float) -> float:
    """How much above `base`, as a share of it."""
    return perplexity / base - 1


def seed_deviation(runs: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the loss between seeds, pooled over models; None where none has two seeds.

    runs: of each model the perplexities of its seeds.
    """
    squares, freedom = 0.0, 0
    for perplexities in runs:
        middle = math.log(mean(perplexities))
        squares += sum((math.log(value) - middle) ** 2 for value in perplexities)
        freedom += len(perplexities) - 1
    return math.sqrt(squares / freedom) if freedom else None


def least_difference(deviation: float, first: int, second: int) -> float:
    """What two means over so many seeds must differ by, in nats, to say something: two standard errors."""
    return 2 * deviation * math.sqrt(1 / first + 1 / second)


def ranks(values: Mapping[str, float]) -> dict[str, str]:
    """1 for the least; equal ones share a rank, as "6="."""
    ordered = sorted(values.values())
    return {
        name: f"{ordered.index(value) + 1}{'=' if ordered.count(value) > 1 else ''}" for name, value in values.items()
    }


@dataclass
class Agreement:
    """Pairs that the reference puts in an order, each as (better here, worse here)."""

    same: list[tuple[str, str]] = field(default_factory=list)
    opposite: list[tuple[str, str]] = field(default_factory=list)
    undecided: list[tuple[str, str]] = field(default_factory=list)  # closer than seeds are


def agreement(
    runs: Mapping[str, Sequence[float]], reference: Mapping[str, float], deviation: float | None
) -> Agreement:
    """Compares the order of models with that of `reference`. Without a deviation every difference counts."""
    found = Agreement()
    for pair in combinations([name for name in runs if name in reference], 2):
        better, worse = sorted(pair, key=lambda name: mean(runs[name]))
        if reference[better] == reference[worse]:
            continue
        least = 0.0 if deviation is None else least_difference(deviation, len(runs[better]), len(runs[worse]))
        if math.log(mean(runs[worse]) / mean(runs[better])) < least:
            found.undecided.append((better, worse))
        elif reference[better] < reference[worse]:
            found.same.append((better, worse))
        else:
            found.opposite.append((better, worse))
    return found
