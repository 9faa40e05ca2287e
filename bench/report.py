"""Results as tables: for the terminal, and as Markdown with the plots beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_qkv import files
from edge_qkv.bench import machine
from edge_qkv.bench.common import say
from edge_qkv.bench.figures import rate, written
from edge_qkv.bench.package import snapshots
from edge_qkv.tables import size, table

FILE = "bench.md"


@dataclass
class Part:
    """A table, and what explains it."""

    title: str
    header: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def as_text(parts: Sequence[Part]) -> str:
    blocks = []
    for part in parts:
        lines = [part.title] if part.title else []
        if part.rows:
            lines.append(table(part.rows, part.header))
        blocks.append("\n".join([*lines, *part.notes]))
    return "\n\n".join(blocks)


def as_markdown(parts: Sequence[Part], images: Sequence[str] = ()) -> str:
    """images: names of files, shown at the end."""
    blocks = []
    for i, part in enumerate(parts):
        lines = [f"{'##' if i else '#'} {part.title}", ""]
        if part.rows:
            rule = ["---", *["---:"] * (len(part.header) - 1)]
            lines += [f"| {' | '.join(cells)} |" for cells in (part.header, rule, *part.rows)] + [""]
        blocks.append("\n".join([*lines, *(f"{note}  " for note in part.notes)]))
    blocks += [f"![{Path(name).stem}]({name})" for name in images]
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def write(output: Path, parts: Sequence[Part], drawn: dict[str, Any]) -> None:
    """bench.md, and each of the plots as SVG and PNG."""
    from edge_qkv.bench import plots

    names = plots.save(output, drawn)
    files.write_atomically(output / FILE, as_markdown(parts, names).encode())
    say(f"written to {output}: {', '.join(sorted(path.name for path in output.iterdir() if path.is_file()))}")


# ---- one package ----


def of_package(result: dict[str, Any]) -> list[Part]:
    """The tables of what was measured."""
    package, options = result["package"], result["options"]
    head = Part(
        f"{package['name']}: {package['variant']}, {package['parameters']:,} parameters",
        notes=[
            engine_line(package),
            machine.one_line(result["machine"]),
            f"{options['threads']} threads; medians of up to {options['repeats']} (least..most)",
        ],
    )
    made = (part(result[name]) for name, part in _PARTS.items() if name in result)
    return [head, *made]


def engine_line(package: dict[str, Any]) -> str:
    packed = ", packed" if package["packed"] else ""
    return (
        f"{package['engine']} {package['version'] or ''}, {package['weights']} weights{packed} "
        f"({size(package['file_bytes'])}), {package['cache']} cache ({package['cache_bytes_per_token']:,} B a token)"
    )


def _decode(decode: dict[str, Any]) -> Part:
    rows = []
    for row in decode["depths"]:
        memory = row["memory"]
        sizes = (size(memory[name]) for name in ("resident", "anonymous", "peak"))
        cache = (f"{memory[f'cache_{name}']:,}" for name in ("used", "committed", "reserved"))
        speed = rate(row["ms_per_token"], 1e3)["median"]
        rows.append((f"{row['depth']:,}", written(row["ms_per_token"]), f"{speed:,.1f}", *sizes, *cache))
    loaded, planned = decode["loaded"], decode["planned"]
    notes = [
        f"before the first token: resident {size(loaded['resident'])}, anonymous {size(loaded['anonymous'])}",
        f"planned with {planned['depth']:,} tokens in the cache: {size(planned['expected'])}, of it cache "
        f"{planned['cache']:,} B",
        verified_line(decode["verified"]),
        *(
            f"left out: {row['depth']:,} needs {size(row['needs'])}, {size(row['available'])} were free"
            for row in decode["left_out"]
        ),
    ]
    header = ("decode at", "ms/token", "tokens/s", "resident", "anonymous", "peak", "cache B", "committed", "reserved")
    return Part("Decode and memory", header, rows, notes)


def verified_line(verified: dict[str, Any]) -> str:
    equal, total, short = (verified[name] for name in ("equal", "tokens", "largest_shortfall"))
    others = f"; the others' logits are within {short:.2g} standard deviations of its best" if equal < total else ""
    return f"verified: {equal} of {total} timed tokens are those of {verified['reference']}{others}"


def _prefill(rows: list[dict[str, Any]]) -> Part:
    cells = [
        (f"{row['start']:,}", f"{row['tokens']:,}", written(row["tokens_per_second"]), _seconds_of_chunk(row))
        for row in rows
    ]
    return Part("Prefill of a chunk", ("prefill at", "tokens", "tokens/s", "ms"), cells)


def _seconds_of_chunk(row: dict[str, Any]) -> str:
    return written(rate(row["tokens_per_second"], row["tokens"] * 1e3), spread=False)


def _first_token(rows: list[dict[str, Any]]) -> Part:
    cells = [(f"{row['tokens']:,}", first_token_cell(row)) for row in rows]
    return Part("Time to the first token", ("tokens of the prompt", "ms"), cells)


def first_token_cell(row: dict[str, Any]) -> str:
    return "left out: takes too long" if row["milliseconds"] is None else written(row["milliseconds"])


def _load(load: dict[str, Any]) -> Part:
    times = ("open_ms", "first_token_ms")
    cells = [(kind, *(written(load[kind][name]) for name in times)) for kind in ("cold", "warm")]
    stayed = load["cached_after_drop"]
    notes = [f"not cold: {stayed:.0%} of the files stayed in the page cache when they were dropped"]
    return Part("Load", ("files", "open, ms", "to the first token, ms"), cells, notes if stayed > 0.1 else [])


def _threads(rows: list[dict[str, Any]]) -> Part:
    header = ("threads", "prefill, tokens/s", *(f"decode at {row['depth']:,}, ms/token" for row in rows[0]["depths"]))
    cells = []
    for row in rows:
        decoded = (written(depth["ms_per_token"]) for depth in row["depths"])
        count = str(row["threads"] or "the engine's own")
        cells.append((count, written(row["prefill_tokens_per_second"]), *decoded))
    return Part("Threads", header, cells)


def _restore(found: dict[str, Any]) -> Part:
    return Part("Restore", (f"{found['tokens']:,} tokens", "time", ""), snapshots.rows(found))


_PARTS: dict[str, Callable[[Any], Part]] = {
    "decode": _decode,
    "prefill": _prefill,
    "first_token": _first_token,
    "load": _load,
    "threads": _threads,
    "restore": _restore,
}
