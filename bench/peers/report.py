"""What `edge-qkv bench peers` has found, as tables; and which of its targets are met."""

from __future__ import annotations

from statistics import median
from typing import Any

from edge_qkv.bench import machine
from edge_qkv.bench.figures import figure, written
from edge_qkv.bench.peers.targets import Target, as_table
from edge_qkv.bench.report import Part
from edge_qkv.tables import size

OURS, OURS_TOO = "edge-qkv, ONNX Runtime", "edge-qkv, ExecuTorch"
NO_FLASH = ", no flash attention"
SAME, MULTI_HEAD = "llama.cpp", "llama.cpp, multi-head"
# What is measured, the peer, at which depth or length, and how many times faster this project's engine is to be. Each
# is asked of the peer as it comes and without flash attention.
WANTED = (
    ("decode", SAME, 0, 0.95),
    ("decode", SAME, 4096, 2.0),
    ("decode", SAME, 8192, 4.0),
    ("decode", SAME, 32767, 8.0),
    ("decode", MULTI_HEAD, 4096, 3.0),
    ("prefill", SAME, 512, 1.0),
    ("prefill", SAME, 16384, 2.0),
)
_WHAT = {"decode": "decode at depth {:,}", "prefill": "prompt of {:,} tokens"}


def targets(result: dict[str, Any], ours: str = OURS) -> list[Target]:
    """The targets beside the ratios of what the peer took to what a contestant of ours took."""
    found = {row["name"]: row for row in result["contestants"]}
    made = []
    for mode in ("", NO_FLASH):
        for kind, name, at, wanted in WANTED:
            peer = name + mode
            mine, theirs = (_rounds(found[n], kind, at) if n in found else [] for n in (ours, peer))
            missing = peer if mine else ours
            note = "" if mine and theirs else f"{missing}: {_why(result, missing)}"
            what = f"{_WHAT[kind].format(at)}, beside {peer}"
            made.append(Target(what, wanted, "at least", ratios(theirs, mine), note))
    return made


def targets_as_json(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"ours": ours} | target.as_json() for ours in (OURS, OURS_TOO) for target in targets(result, ours)]


def ratios(theirs: list[float], mine: list[float]) -> list[float]:
    """Of the rounds that both have; where there are several of one only, of those beside the other's median."""
    if len(theirs) == len(mine):
        return [t / m for t, m in zip(theirs, mine, strict=True)]
    if not theirs or not mine:
        return []
    return [t / median(mine) for t in theirs] if len(theirs) > len(mine) else [median(theirs) / m for m in mine]


def _rounds(row: dict[str, Any], kind: str, at: int) -> list[float]:
    at_name, values = ("depth", "ms") if kind == "decode" else ("tokens", "seconds")
    return next((one[values] for one in row[kind] if one[at_name] == at), [])


def _why(result: dict[str, Any], name: str) -> str:
    left_out = next((row["why"] for row in result["left_out"] if row["name"] == name), None)
    row = next((row for row in result["contestants"] if row["name"] == name), None)
    return left_out or "; ".join(row["notes"] if row else ()) or "not asked for"


def parts(result: dict[str, Any]) -> list[Part]:
    head = Part(
        f"{result['model']} with random weights beside its peers",
        notes=[
            machine.one_line(result["machine"]),
            f"{result['options']['threads']} threads; medians of up to {result['options']['repeats']} rounds "
            f"(least..most); x: how many times as long as {OURS}",
        ],
    )
    tables = _models(result), _table(result, "decode"), _added(result), _table(result, "prefill")
    return [head, *(table for table in tables if table.title), *(_targets(result, ours) for ours in (OURS, OURS_TOO))]


def _models(result: dict[str, Any]) -> Part:
    rows, notes = [], []
    for row in result["contestants"]:
        deepest = row["decode"][-1] if row["decode"] else None
        memory = "" if deepest is None else size(deepest["memory"]["anonymous"])
        resident = "" if deepest is None else size(deepest["memory"]["resident"])
        difference = "" if row["difference"] is None else f"{row['difference']:.2f}"
        bits = f"{8 * row['file_bytes'] / row['parameters']:.2f}"
        equal, total = row["verified"]["equal"], row["verified"]["tokens"]
        at = "" if deepest is None else f"{deepest['depth']:,}"
        rows.append(
            (
                row["name"],
                row["variant"],
                f"{row['weights']}, {bits}",
                f"{100 * row['perplexity_change']:+.2f} %",
                f"{row['cache']}, {row['cache_bytes_per_token']:,}",
                at,
                memory,
                resident,
                difference,
                f"{equal} of {total}",
            )
        )
        notes += [f"{row['name']}: {note}" for note in row["notes"]]
    notes += [f"{row['name']} is left out: {row['why']}" for row in result["left_out"]]
    header = ("engine", "variant", "weights, bits", "perplexity", "cache, B a token", "depth", "anonymous", "resident")
    return Part("Models", (*header, "logits", "verified"), rows, [*_EXPLAINED, *notes])


_EXPLAINED = [
    "bits: of the model files for each parameter; perplexity: the bundled model's with such weights, beside float32",
    "anonymous and resident: memory that the engine adds to its process, at that depth",
    "logits: distance from the first's after the same prompt, in standard deviations (another model is at 1.4); "
    "verified: timed tokens that the engine also says when it reads them as a chunk",
]


def _table(result: dict[str, Any], kind: str) -> Part:
    name, key, cell = {
        "decode": ("depth", "decode", lambda one: written(one["ms_per_token"])),
        "prefill": ("tokens", "prefill", lambda one: written(one["tokens_per_second"])),
    }[kind]
    places = sorted({one[name] for row in result["contestants"] for one in row[key]})
    first = next((row for row in result["contestants"] if row["name"] == OURS), None)
    rows = []
    for row in result["contestants"]:
        found = {one[name]: one for one in row[key]}
        cells = []
        for place in places:
            times = ratios(_rounds(row, kind, place), _rounds(first, kind, place)) if first else []
            ratio = f"  {written(figure(times))}x" if times and row is not first else ""
            cells.append(f"{cell(found[place])}{ratio}" if place in found else "")
        rows.append((row["name"], *cells))
    title, unit = _TITLES[kind]
    return Part(title, (unit, *(f"{place:,}" for place in places)), rows) if places else Part("")


def _added(result: dict[str, Any]) -> Part:
    """What attention takes, as far as it grows with depth: the rest of a token is the weights' at any depth."""
    spent = {
        row["name"]: {one["depth"]: one["ms_per_token"]["median"] for one in row["decode"]}
        for row in result["contestants"]
    }
    spent = {name: found for name, found in spent.items() if 0 in found}
    depths = sorted({depth for found in spent.values() for depth in found if depth})
    if not depths or not spent.get(OURS):
        return Part("")
    rows = []
    for name, found in spent.items():
        cells = []
        for depth in depths:
            added, ours = (of[depth] - of[0] if depth in of else None for of in (found, spent[OURS]))
            times = f"  {added / ours:.1f}x" if added and ours and ours > 0 and name != OURS else ""
            cells.append("" if added is None else f"{added:,.1f}{times}")
        rows.append((name, f"{found[0]:,.1f}", *cells))
    header = ("ms a token", "with an empty cache", *(f"more at {depth:,}" for depth in depths))
    notes = ["an empty cache: what the weights take, which no attention can make less"]
    return Part("What depth adds", header, rows, notes)


_TITLES = {"decode": ("Decode", "ms a token at depth"), "prefill": ("Prompts", "tokens/s of a prompt of")}


def _targets(result: dict[str, Any], ours: str) -> Part:
    rows, header = as_table(targets(result, ours))
    return Part(f"Targets: {ours}", header, rows)
