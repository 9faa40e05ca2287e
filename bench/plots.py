"""The plots, as SVG and PNG; without matplotlib there are none, and a note says so.

Every line and bar is named where it ends, instead of in a legend.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge_qkv.bench.common import say
from edge_qkv.tables import size

_INK, _FAINT = "#222222", "#dddddd"
_COLOURS = (
    "#0b6e99",
    "#d1495b",
    "#66a182",
    "#8e6c8a",
    "#c78c00",
    "#555555",
    "#5aa9d6",
    "#e8927c",
    "#2f5d3a",
    "#a8a8a8",
    "#7a4fbf",
)
_WIDE, _HIGH = 7.5, 4.2  # inches
_GAP = 0.055  # between labels, as a part of the height

Draw = Callable[[Any], None]  # draws on an Axes


def save(output: Path, drawn: dict[str, tuple[str, Draw]]) -> list[str]:
    """Writes NAME.svg and NAME.png of each plot, a title and what draws it; returns the names of the SVGs."""
    if importlib.util.find_spec("matplotlib") is None:
        say("no plots: matplotlib is not installed; pip install 'edge-qkv[bench]'")
        return []
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps a state and looks for a display

    style = {"font.size": 10, "svg.hashsalt": "edge-qkv", "svg.fonttype": "none", "text.color": _INK}
    with matplotlib.rc_context(style):
        for name, (title, draw) in drawn.items():
            figure = Figure(figsize=(_WIDE, _HIGH), layout="constrained")
            axes = figure.add_subplot()
            axes.set_title(title, loc="left", fontsize=11)
            draw(axes)
            figure.savefig(output / f"{name}.svg", metadata={"Date": None})
            figure.savefig(output / f"{name}.png", dpi=150)
    return [f"{name}.svg" for name in drawn]


# ---- what is drawn ----


def of_packages(results: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> dict[str, tuple[str, Draw]]:
    """Decode speed and memory against depth of results that have them; several are named."""
    decoded = [(name, r) for name, r in zip(names or [""] * len(results), results, strict=True)]
    decoded = [(name, r) for name, r in decoded if r.get("decode", {}).get("depths")]
    if not decoded:
        return {}
    times = [(name, _times(result["decode"]["depths"])) for name, result in decoded]
    sizes = [
        (name or label, _sizes(result, field))
        for name, result in decoded
        for field, label in (("resident", "resident"), ("anonymous", "anonymous"), ("cache_used", "cache"))
        if len(decoded) == 1 or field == "anonymous"
    ]
    head = _head(decoded[0][1]) if len(decoded) == 1 else ""
    what = "Memory that the model adds" if len(decoded) == 1 else "Anonymous memory that the model adds"
    return {
        "decode": (f"Decode{head}", lambda axes: _lines(axes, times, "ms a token", _speed)),
        "memory": (f"{what}{head}", lambda axes: _lines(axes, sizes, "MiB", _short)),
    }


def of_variants(result: dict[str, Any]) -> dict[str, tuple[str, Draw]]:
    """Cache of each variant, and its decode speed against depth."""
    rows = result["variants"]
    bars = [(row["variant"], row["cache_reserved"]) for row in rows]
    times = [(row["variant"], _times(row["depths"])) for row in rows]
    model = f"{result['model']}, {result['cache']} cache"
    return {
        "cache": (f"Cache with {result['context']:,} tokens: {model}", lambda axes: _bars(axes, bars)),
        "decode": (f"Decode: {model}", lambda axes: _lines(axes, times, "ms a token", _speed)),
    }


def of_peers(result: dict[str, Any]) -> dict[str, tuple[str, Draw]]:
    """What a token takes against depth, in all engines."""
    times = [(row["name"], _times(row["decode"])) for row in result["contestants"]]
    title = f"Decode: {result['model']}\n{result['machine']['processor']}, {result['options']['threads']} threads"
    return {"decode": (title, lambda axes: _lines(axes, times, "ms a token", _speed, log=True))}


def of_attention(result: dict[str, Any]) -> dict[str, tuple[str, Draw]]:
    """Milliseconds a layer of each operator against depth."""
    found, machine = result["attention"], result["machine"]
    series: dict[str, Points] = {}
    for row in found["results"]:
        if row["depth"]:  # a logarithm has no place for 0
            point = (row["depth"], *(row["ms_per_layer"][name] for name in ("median", "least", "most")))
            series.setdefault(row["operator"], []).append(point)
    if not series:
        return {}
    tokens = "one token" if found["tokens"] == 1 else f"{found['tokens']:,} tokens"
    head = f"Attention of {tokens}, {found['heads']} heads of {found['head_dim']} over one kv head"
    title = f"{head}\n{machine['processor']}, {result['options']['threads']} threads"
    end = lambda ms: f"{_short(ms)} ms"  # noqa: E731
    return {"attention": (title, lambda axes: _log_lines(axes, list(series.items()), "ms a layer", end))}


def of_quality(result: dict[str, Any]) -> dict[str, tuple[str, Draw]]:
    """Perplexity of each model against the bytes that a token takes in its cache."""
    if not result["variants"]:
        return {}
    points = [(row["variant"], row["cache_bytes_per_token"], row["perplexity"]) for row in result["variants"]]
    title = f"Perplexity against cache: {result['data']['name']}, {result['recipe']['steps']:,} steps"
    return {"quality": (title, lambda axes: _scatter(axes, points, "bytes of cache a token", "perplexity"))}


Points = list[tuple[int, float, float, float]]  # depth, value, least, most


def _times(rows: Sequence[dict[str, Any]]) -> Points:
    """What attention adds to a token grows evenly with depth: a line, where tokens a second are a curve."""
    return [(row["depth"], *(row["ms_per_token"][name] for name in ("median", "least", "most"))) for row in rows]


def _sizes(result: dict[str, Any], field: str) -> Points:
    found = [(row["depth"], row["memory"][field] / 2**20) for row in result["decode"]["depths"]]
    return [(depth, mib, mib, mib) for depth, mib in found]


def _head(result: dict[str, Any]) -> str:
    package, machine = result["package"], result["machine"]
    return f": {package['name']} ({package['engine']})\n{machine['processor']}, {result['options']['threads']} threads"


# ---- how ----


def _speed(milliseconds: float) -> str:
    return f"{_short(milliseconds)} ms, {_short(1e3 / milliseconds)}/s"


def _short(value: float) -> str:
    """In three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _lines(
    axes: Any, series: Sequence[tuple[str, Points]], unit: str, end: Callable[[float], str], log: bool = False
) -> None:
    """Values against depth with their spread, each line with its name and last value at its end; from 0, or on a
    logarithmic scale where lines lie far apart."""
    series = [(label, points) for label, points in series if points]
    deepest = max(points[-1][0] for _, points in series)
    highest = max(most for _, points in series for *_, most in points)
    axes.set_xlim(0, deepest or 1)
    if log:
        lowest = min(least for _, points in series for _, _, least, _ in points)
        axes.set_yscale("log")
        axes.set_ylim(lowest * 0.9, highest * 1.1)
        marks = [m * 10**n for n in range(-3, 7) for m in (1, 2, 5) if lowest <= m * 10**n <= highest]
        axes.set_yticks(marks, [f"{mark:,g}" for mark in marks])
        axes.set_yticks([], minor=True)
    else:
        axes.set_ylim(0, highest * 1.02 or 1)
    _draw(axes, series, unit, end)
    ticks = [depth for depth in (0, 4096, 8192, 16384, 32768) if depth <= deepest * 1.01]
    if len(ticks) > 2:
        axes.set_xticks(ticks, [_depth(depth) for depth in ticks])


def _log_lines(axes: Any, series: Sequence[tuple[str, Points]], unit: str, end: Callable[[float], str]) -> None:
    """The same on logarithmic axes, for values that differ by orders of magnitude."""
    depths = sorted({depth for _, points in series for depth, *_ in points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(depths[0] * 0.97, depths[-1] * (1 if len(depths) > 1 else 1.03))
    lowest = min(least for _, points in series for _, _, least, _ in points)
    highest = max(most for _, points in series for *_, most in points)
    axes.set_ylim(lowest * 0.9, highest * 1.1)
    _draw(axes, series, unit, end)
    axes.set_xticks(depths, [_depth(depth) for depth in depths])
    axes.set_xticks([], minor=True)


def _draw(axes: Any, series: Sequence[tuple[str, Points]], unit: str, end: Callable[[float], str]) -> None:
    """The lines themselves, on axes whose limits and scales are set."""
    ends = []
    for i, (label, points) in enumerate(series):
        depths, values, least, most = zip(*points, strict=True)
        colour = _COLOURS[i % len(_COLOURS)]
        axes.fill_between(depths, least, most, color=colour, alpha=0.15, linewidth=0)
        axes.plot(depths, values, color=colour, marker="o", markersize=3.5, linewidth=1.6, clip_on=False)
        (_, height) = axes.transAxes.inverted().transform(axes.transData.transform((depths[-1], values[-1])))
        ends.append((height, depths[-1], f"{label}  {end(values[-1])}".strip(), colour))
    for height, (_, depth, text, colour) in zip(_apart([first for first, *_ in ends]), ends, strict=True):
        (across, _) = axes.transAxes.inverted().transform(axes.transData.transform((depth, 1)))
        axes.annotate(
            text,
            (across, height),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel(unit)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    _plain(axes)


def _depth(depth: int) -> str:
    return f"{depth // 1024}k" if depth and depth % 1024 == 0 else f"{depth:,}"


def _bars(axes: Any, bars: Sequence[tuple[str, int]]) -> None:
    """Bytes as bars from the largest down, each with its size and what part of the largest it is."""
    bars = sorted(bars, key=lambda bar: bar[1])
    most = bars[-1][1]
    places = range(len(bars))
    axes.barh(places, [count for _, count in bars], color=_COLOURS[0], height=0.62)
    for place, (_, count) in zip(places, bars, strict=True):
        part = "" if count == most else f", 1/{most / count:.0f}"
        axes.annotate(f"{size(count)}{part}", (count, place), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [label for label, _ in bars])
    axes.set_xlim(0, most * 1.18)
    axes.set_ylim(-0.6, max(len(bars), 5) - 0.4)
    axes.set_xticks([])
    _plain(axes, "bottom")


def _scatter(axes: Any, points: Sequence[tuple[str, float, float]], across: str, up: str) -> None:
    """Named points over a scale of doublings."""
    heights = [y for *_, y in points]
    low, room = min(heights), max(heights) - min(heights) or 1
    for x in {x for _, x, _ in points}:  # names of points at one place across are kept apart
        column = [(label, y) for label, other, y in points if other == x]
        apart = _apart([(y - low) / room for _, y in column])
        for (label, y), height in zip(column, apart, strict=True):
            axes.plot(x, y, color=_COLOURS[0], marker="o", markersize=5)
            where = (x, low + height * room)
            axes.annotate(label, where, xytext=(7, 0), textcoords="offset points", va="center", annotation_clip=False)
    axes.set_xscale("log", base=2)
    bytes_ = sorted({x for _, x, _ in points})
    axes.set_xticks(bytes_, [f"{x:,}" for x in bytes_], minor=False)
    axes.set_xlim(bytes_[0] / 1.3, bytes_[-1] * 1.8)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    _plain(axes)


def _plain(axes: Any, *more: str) -> None:
    for side in ("top", "right", *more):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK)


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels, moved up where they would lie on each other."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    last = float("-inf")
    for i in sorted(placed, key=lambda i: heights[i]):
        last = placed[i] = max(heights[i], last + _GAP)
    return [placed[i] for i in range(len(heights))]
