"""A figure: what was measured several times, and how it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

Figure = dict[str, float]  # median, least and most of `repeats` measurements


def figure(values: Sequence[float]) -> Figure:
    return {"median": median(values), "least": min(values), "most": max(values), "repeats": len(values)}


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def repeat(measure: Callable[[], float], repeats: int, limit: float) -> list[float]:
    """What `measure` returns, at most `repeats` times: once at least, and not once more after `limit` seconds."""
    values, began = [measure()], time.perf_counter()
    while len(values) < repeats and time.perf_counter() - began < limit:
        values.append(measure())
    return values


def rate(figure: Figure, count: float) -> Figure:
    """The figure of a time as `count` units in that time: the least time is the most of them."""
    least, most = count / figure["most"], count / figure["least"]
    return {"median": count / figure["median"], "least": least, "most": most, "repeats": figure["repeats"]}


def written(figure: Figure, scale: float = 1, spread: bool = True) -> str:
    """The median of `figure / scale` in three digits or more, and the spread where there is one."""
    middle = figure["median"] / scale
    digits = next((digits for digits, least in enumerate((100, 10, 1)) if middle >= least), 3)
    middle, least, most = (f"{figure[name] / scale:,.{digits}f}" for name in ("median", "least", "most"))
    return middle if least == most or not spread else f"{middle} ({least}..{most})"
