"""Packages side by side: the same model for another engine, with other weights, with another cache.

    edge-qkv bench engines PACKAGE PACKAGE --packed DIR

Every measurement runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_qkv import InputError, Package, plan
from edge_qkv.bench.common import add_measuring, command_line, run
from edge_qkv.bench.figures import figure, written
from edge_qkv.bench.package.measurements import PREFILL, Request, packed_files
from edge_qkv.bench.package.processes import Processes
from edge_qkv.bench.package.speed import ROUNDED_TOLERANCE, TOKENS, TOLERANCE
from edge_qkv.checks import thread_count, whole
from edge_qkv.package import MANIFEST
from edge_qkv.tables import size, table

DEPTHS = 0, 32767
ROUND = "cold load", "warm load", "speed"  # one process each
COLD = 0.1  # part of the files that may stay in the page cache

SUMMARY = "Compare packages: load time, memory, prefill and decode, side by side."
EXAMPLES = f"""\
the same model for two engines, as exported and with packed weights:
  edge-qkv export checkpoint.pt --weights int4 --output onnx
  edge-qkv export checkpoint.pt --target executorch --weights 8da4w --output executorch
  edge-qkv bench engines onnx executorch --packed packed

what is measured, each in a process of its own:
  load, cold  opening the model after the pages of its files were dropped from the page cache, the engine's own library
              excepted; a note says so where they were not. A host's or a disk's cache below is not dropped.
  load, warm  the same after its files were read. Neither includes checking their SHA-256, nor the pages of weights that
              are mapped: those are read when the first token needs them.
  memory      of the process, as the kernel counts it, beyond what it had before the model was opened
  prefill     {PREFILL} tokens into an empty cache
  decode      up to {TOKENS} tokens after each depth; the cache is filled with noise, which costs the same as text

Packages take turns, every other round in the opposite order, so that what else the machine does meets all of them.
A figure is the median of the rounds (least..most); "x" is its ratio to the first column.

Before anything is timed, each package reads {PREFILL} fixed tokens as one chunk and again one by one. Where the logits
differ by more than {TOLERANCE} of their standard deviation, or {ROUNDED_TOLERANCE} where activations or the cache are
rounded to 8 bits, nothing is measured.
"""


@dataclass
class Column:
    """A package as it is loaded, and what was found."""

    name: str
    package: Package
    packed: Path | None  # directory of packed weights
    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # figure -> its value in each round
    files: list[Path] = field(default_factory=list)

    def figures(self, first: Column) -> dict[str, dict[str, float | None]]:
        """Of each figure the median, the least and the most, and the ratio to that of `first`."""
        found = {}
        for name, values in self.values.items():
            found[name], base = figure(values), figure(first.values[name])["median"]
            found[name]["ratio"] = found[name]["median"] / base if base > 0 else None
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("engines", SUMMARY, EXAMPLES)
    add_measuring(parser, 3, "rounds")
    add = parser.add_argument
    add("packages", nargs="+", metavar="PACKAGE", help="directory written by edge-qkv export; the first is the measure")
    add("--packed", type=Path, metavar="DIR", help="also measure with packed weights, in DIR or packed there first")
    default = " ".join(map(str, DEPTHS))
    add(
        "--depths",
        type=int,
        nargs="+",
        metavar="N",
        help=f"tokens in the cache; default: {default}, as far as all go",
    )
    return run(parser, _compare, argv)


def _compare(arguments: argparse.Namespace) -> None:
    repeats = whole(arguments.repeats, "--repeats", 1)
    threads = thread_count(arguments.threads)
    packages = [Package.open(path) for path in arguments.packages]
    depths = _depths(packages, arguments.depths)
    threads = plan(packages[0], context=PREFILL, threads=threads).threads  # how many, where it is one for each core
    columns = _columns(packages, arguments.packed)
    context = min(max(*depths, PREFILL) + TOKENS, *(package.config.max_positions for package in packages))
    processes = len(columns) * (1 + repeats * len(ROUND)) + sum(bool(column.packed) for column in columns)
    bench = _Bench(threads, depths, context, processes)
    for column in columns:
        _prepare(bench, column)
        column.facts["same_next_tokens"] = _same_next_tokens(columns[0], column)
    for turn in range(repeats):
        for kind in ROUND:
            for column in columns if turn % 2 == 0 else reversed(columns):
                for name, value in bench.measure(kind, column, f"round {turn + 1} of {repeats}, ").items():
                    column.values.setdefault(name, []).append(value)
    for column in columns:
        column.facts["cached_after_drop"] = max(column.values.pop("cached_after_drop"))
        del column.facts["greedy"]
    if arguments.json:
        print(json.dumps(_as_json(columns, threads, repeats, depths), indent=2))
        return
    print(_table(columns, depths, min(depths[-1] + TOKENS, context)))
    print(f"\nthreads: {threads}, rounds: {repeats}; median (least..most), x: ratio to the first column")
    for column in columns:
        if (stayed := column.facts["cached_after_drop"]) > COLD:
            print(f"{column.name}: not cold, {stayed:.0%} of its files stayed in the page cache when they were dropped")


class _Bench:
    """What all measurements have in common."""

    def __init__(self, threads: int, depths: list[int], context: int, total: int) -> None:
        self.threads, self.depths, self.context, self.processes = threads, depths, context, Processes(total)

    def measure(self, kind: str, column: Column, when: str = "") -> dict:
        package, packed = str(column.package.path), None if column.packed is None else str(column.packed)
        files = [str(file) for file in column.files]
        request = Request(kind, package, packed, self.threads, self.depths, files, context=self.context)
        return self.processes.measure(request, f"{when}{column.name}: {kind}")


def _depths(packages: list[Package], asked: list[int] | None) -> list[int]:
    """The depths to measure, all of which every package has room for."""
    shortest = min(packages, key=lambda package: package.config.max_positions)
    limit = shortest.config.max_positions
    if limit < PREFILL:
        raise InputError(
            f"{shortest.path}: holds {limit} tokens, fewer than the {PREFILL} of the prefill that is measured; give a "
            "package of a longer context"
        )
    if asked is None:
        return sorted({min(depth, limit - 1) for depth in DEPTHS})
    return sorted({whole(depth, "--depths", 0, limit - 1, f", the most {shortest.path} goes") for depth in asked})


def _columns(packages: list[Package], packed: Path | None) -> list[Column]:
    names: list[str] = []
    for package in packages:
        name, times = package.path.resolve().name, 1
        while (unique := name if times == 1 else f"{name} #{times}") in names:
            times += 1
        names.append(unique)
    columns = []
    for name, package in zip(names, packages, strict=True):
        columns.append(Column(name, package, None))
        if packed is not None:
            columns.append(Column(f"{name}, packed", package, packed))
    return columns


def _prepare(bench: _Bench, column: Column) -> None:
    """Packs the weights where that is asked for, checks the package, and lists its files."""
    package = column.package
    if column.packed is not None:
        column.facts |= bench.measure("pack", column)
    column.facts |= bench.measure("check", column)
    column.files = [package.path / name for name in (MANIFEST, *package.manifest["files"])]
    column.facts["file_bytes"] = package.weight_bytes
    if column.packed is not None:
        packed = packed_files(column.packed, column.facts)
        column.facts["packed_bytes"] = sum(file.stat().st_size for file in packed)
        column.files += packed


def _same_next_tokens(first: Column, column: Column) -> int | None:
    """Of the fixed tokens, how many are followed by the same greedy token in both."""
    if first.package.config.vocab_size != column.package.config.vocab_size:
        return None
    return sum(a == b for a, b in zip(first.facts["greedy"], column.facts["greedy"], strict=True))


# ---- what is printed ----


def _as_json(columns: list[Column], threads: int, repeats: int, depths: list[int]) -> dict:
    return {
        "threads": threads,
        "repeats": repeats,
        "prefill_tokens": PREFILL,
        "depths": depths,
        "columns": [
            {"name": column.name, "package": str(column.package.path), "packed": column.packed is not None}
            | column.facts
            | {"figures": column.figures(columns[0])}
            for column in columns
        ],
    }


def _table(columns: list[Column], depths: list[int], cached: int) -> str:
    rows = [
        (label, *(text(column.facts) for column in columns))
        for label, text in _FACT_ROWS.items()
        if any(text(column.facts) for column in columns)
    ]
    full = f"{cached:,} cached"
    labels = {
        "load_cold_ms": "load, cold, ms",
        "load_warm_ms": "load, warm, ms",
        "first_token_cold_ms": "first token, cold, ms",
        "first_token_warm_ms": "first token, warm, ms",
        "loaded_resident": "resident, loaded, MiB",
        "loaded_anonymous": "anonymous, loaded, MiB",
        "prefill_tokens_per_second": f"prefill of {PREFILL}, tokens/s",
        **{f"decode_ms_at_{depth}": f"decode at {depth:,}, ms/token" for depth in depths},
        "full_resident": f"resident, {full}, MiB",
        "full_anonymous": f"anonymous, {full}, MiB",
        "full_peak": f"peak, {full}, MiB",
        "cache_bytes": f"cache, {full}, bytes",
    }
    found = [column.figures(columns[0]) for column in columns]
    for name, label in labels.items():
        rows.append((label, *(_cell(label, figures[name], i > 0) for i, figures in enumerate(found))))
    return table(rows, ("", *(column.name for column in columns)))


# Rows of what a package is; those that are empty in all columns are left out.
_FACT_ROWS = {
    "engine": lambda facts: f"{facts['engine']} {facts['version']}",
    "weights": lambda facts: facts["weights"],
    "cache": lambda facts: facts["cache"],
    "model files": lambda facts: size(facts["file_bytes"]),
    "packed files": lambda facts: size(facts["packed_bytes"]) if "packed_bytes" in facts else "",
    "packing": lambda facts: _packing(facts),
    "chunk - single tokens, std of logits": lambda facts: f"{facts['chunk_difference']:.2g}",
    "next tokens as the first column's": lambda facts: _of_prefill(facts["same_next_tokens"]),
}


def _packing(facts: dict[str, Any]) -> str:
    if "pack_seconds" not in facts:
        return ""
    return "done before" if facts["pack_seconds"] is None else f"{facts['pack_seconds']:.1f} s"


def _of_prefill(count: int | None) -> str:
    return "other vocabulary" if count is None else f"{count} of {PREFILL}"


def _cell(label: str, figure: dict[str, float | None], with_ratio: bool) -> str:
    scale = 2**20 if label.endswith("MiB") else 1
    ratio = "" if not with_ratio or figure["ratio"] is None else f"  {figure['ratio']:.2f}x"
    return written(figure, scale) + ratio


if __name__ == "__main__":
    sys.exit(main())
