"""Results of several devices or packages in one table and plot: `edge-qkv bench compare A.json B.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge_qkv import InputError
from edge_qkv.bench import plots, report
from edge_qkv.bench.common import add_output, command_line, prepare_output, run
from edge_qkv.bench.figures import Figure, written
from edge_qkv.bench.results import SCHEMA, read
from edge_qkv.tables import size

SUMMARY = "Put results of edge-qkv bench beside each other: of several devices, or of several packages."
EXAMPLES = """\
examples:
  edge-qkv bench compare phone/bench.json board/bench.json
  edge-qkv bench compare phone board --output both      directories with a bench.json; also bench.md and plots

What only some of them have is empty for the others; "x" is the ratio to the first column. "same tokens" says of how
many of the timed tokens the first column has the same: the same package must give (nearly) all of them everywhere.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("compare", SUMMARY, EXAMPLES)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="bench.json, or a directory with one")
    add_output(parser, "bench.md")
    return run(parser, _compare, argv)


def _compare(arguments: argparse.Namespace) -> None:
    if len(arguments.results) < 2:
        raise InputError(f"{arguments.results[0]}: is the only result; give at least two to compare")
    results = [read(path) for path in arguments.results]
    names = _names(arguments.results, results)
    prepare_output(arguments.output)
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, "kind": "comparison", "results": results}, indent=2))
    else:
        print(report.as_text(of_results(names, results)))
    if arguments.output is not None:
        report.write(arguments.output, of_results(names, results), plots.of_packages(results, names))


def _names(paths: Sequence[Path], results: Sequence[dict[str, Any]]) -> list[str]:
    """What tells the results apart: their packages, their files where these are equal, or else their places."""
    choices = (
        [result["package"]["name"] for result in results],
        [(path if path.is_dir() else path.parent).resolve().name for path in paths],
        [path.stem for path in paths],
        [f"{result['package']['name']} #{i}" for i, result in enumerate(results, 1)],
    )
    return next(names for names in choices if len(set(names)) == len(names))


def of_results(names: Sequence[str], results: Sequence[dict[str, Any]]) -> list[report.Part]:
    """One table with a column for each result."""
    rows = [(label, *(text(result) for result in results)) for label, text in _FACTS.items()]
    for label, of_result in _figures(results):
        rows.append((label, *_cells([of_result(result) for result in results])))
    rows.append(("same tokens as the first column", *(_same(results[0], result) for result in results)))
    rows = [row for row in rows if any(row[1:])]
    notes = ["medians (least..most), x: ratio to the first column"]
    unfinished = [name for name, result in zip(names, results, strict=True) if not result["complete"]]
    notes += [f"{name}: was stopped before it was complete" for name in unfinished]
    return [report.Part(" and ".join(names), ("", *names), rows, notes)]


_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "device": lambda r: r["machine"]["board"] or r["machine"]["processor"],
    "cores, threads used": lambda r: f"{r['machine']['cores']}, {r['options']['threads']}",
    "instruction set": lambda r: r["machine"]["instruction_set"],
    "system": lambda r: r["machine"]["system"].partition(",")[0],
    "measured": lambda r: r["machine"]["date"][:10],
    "package": lambda r: r["package"]["name"],
    "variant": lambda r: r["package"]["variant"],
    "engine": lambda r: f"{r['package']['engine']} {r['package']['version'] or ''}".strip(),
    "weights": lambda r: r["package"]["weights"] + (", packed" if r["package"]["packed"] else ""),
    "cache": lambda r: r["package"]["cache"],
    "model files": lambda r: size(r["package"]["file_bytes"]),
}

Found = Callable[[dict[str, Any]], "Figure | int | None"]  # of a result: a figure, bytes, or None: not measured


def _figures(results: Sequence[dict[str, Any]]) -> list[tuple[str, Found]]:
    """Label and getter of each row that any result has."""
    rows: list[tuple[str, Found]] = []

    def add(label: str, section: str, key: str, value: Callable[[dict], Any], inside: str | None = None) -> None:
        """A row for each value of `key` among a section's entries."""
        entries = lambda r: (r.get(section) or {}).get(inside, []) if inside else r.get(section, [])  # noqa: E731
        for number in sorted({entry[key] for result in results for entry in entries(result)}):
            find = lambda r, n=number: next((value(e) for e in entries(r) if e[key] == n), None)  # noqa: E731
            rows.append((label.format(f"{number:,}"), find))

    add("decode at {}, ms/token", "decode", "depth", lambda row: row["ms_per_token"], "depths")
    add("prefill at {}, tokens/s", "prefill", "depth", lambda row: row["tokens_per_second"])
    add("first token after {}, ms", "first_token", "tokens", lambda row: row["milliseconds"])
    for kind in ("cold", "warm"):
        for name, label in (("open_ms", "load"), ("first_token_ms", "load to the first token")):
            rows.append((f"{label}, {kind}, ms", lambda r, k=kind, n=name: r["load"][k][n] if "load" in r else None))
    memory = {"anonymous": "anonymous", "resident": "resident", "cache_used": "cache"}
    for name, label in memory.items():
        add(f"{label} at {{}}", "decode", "depth", lambda row, n=name: row["memory"][n], "depths")
    rows.append(("restore, ms", lambda r: r["restore"]["restore_ms"] if "restore" in r else None))
    return rows


def _cells(found: Sequence[Figure | float | None]) -> list[str]:
    medians = [value["median"] if isinstance(value, dict) else value for value in found]
    cells = []
    for i, (value, middle) in enumerate(zip(found, medians, strict=True)):
        if value is None or middle is None:
            cells.append("")
            continue
        is_figure = isinstance(value, dict)
        text = written(value) if is_figure else size(value) if isinstance(value, int) else f"{value:.1f}"
        ratio = f"  {middle / medians[0]:.2f}x" if i and medians[0] and medians[0] > 0 else ""
        cells.append(text + ratio)
    return cells


def _same(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Of the tokens that both decoded at the same depths, how many are equal."""
    if "decode" not in first or "decode" not in other:
        return ""
    tokens = {row["depth"]: row["tokens"] for row in first["decode"]["depths"]}
    pairs = [
        pair
        for row in other["decode"]["depths"]
        for pair in zip(tokens.get(row["depth"], ()), row["tokens"], strict=False)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}" if pairs else ""


if __name__ == "__main__":
    sys.exit(main())
