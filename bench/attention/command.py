"""The attention operator alone beside what other runtimes have for such models.

    edge-qkv bench attention --depths 8192 32768 --threads 1 2

One token attends over a cache of the given depth, all operators in one process. They take turns, so that what else the
machine does meets all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_qkv.bench import machine, plots, report
from edge_qkv.bench.attention import executorch, onnx
from edge_qkv.bench.attention.problem import HEAD_DIM, HEADS, Bound, Contestant, Missing, check, make_problem
from edge_qkv.bench.common import add_output, command_line, prepare_output, run, say
from edge_qkv.bench.figures import figure, written
from edge_qkv.bench.peers.targets import Target, as_table
from edge_qkv.bench.results import Result
from edge_qkv.checks import MOST_CHUNK, thread_count, whole
from edge_qkv.errors import InputError
from edge_qkv.processors import processors

DEPTHS = 1024, 8192, 32768
LAYERS = 22
SECONDS = 20.0
TARGET_DEPTH = 32768
FIRST = "GroupQueryAttention, fp32"
FIRST_FP16 = "GroupQueryAttention, fp16"
FP16, INT8 = "UnifiedKVAttention, fp16", "UnifiedKVAttention, int8"

CONTESTANTS = (
    Contestant(FIRST, onnx.group_query(np.float32), 1e-4),
    Contestant(FIRST_FP16, onnx.group_query(np.float16), 1e-2),
    Contestant(FP16, onnx.operator("fp16"), 1e-4, ours=True),
    Contestant(INT8, onnx.operator("int8"), 1e-3, ours=True),
    Contestant("its function, fp16", onnx.function("fp16"), 1e-4),
    Contestant("its function, int8", onnx.function("int8"), 1e-3),
    Contestant("ExecuTorch sdpa_with_kv_cache, fp32", executorch.sdpa, 1e-4),
    Contestant("ExecuTorch custom_quantized_sdpa, int8", executorch.quantized_sdpa, 3e-2),
    Contestant("UnifiedKVAttention in ExecuTorch, fp16", executorch.operator("fp16"), 1e-4),
    Contestant("UnifiedKVAttention in ExecuTorch, int8", executorch.operator("int8"), 1e-3),
)

SUMMARY = "Compare the attention operator with those of ONNX Runtime and ExecuTorch: one token over one kv head."
NOTES = f"""\
Milliseconds a layer; "x": how many times faster than {FIRST}, of the same round. Figures are
medians of the rounds (least..most). The function is what an exported file brings for an ONNX Runtime without our
library: standard operators. ExecuTorch's operators are called by programs in its own runtime. Those of others keep keys
and values apart, ours keeps one row for both. What is not installed is left out; an operator takes no further turns
after --seconds. Before anything is timed, each output is compared with attention in float64 over the rows as that cache
holds them.
"""


# ---- measuring ----


@dataclass
class _Turn:
    """A contestant with so many threads, ready for one depth."""

    contestant: Contestant
    threads: int
    bound: Bound
    ms: list[float] = field(default_factory=list)  # a layer, of each round from the first on

    def take(self, layers: int) -> None:
        _settle()
        began = time.perf_counter()
        self.bound.run()
        self.ms.append((time.perf_counter() - began) * 1e3 / layers)


def _settle() -> None:
    """Waits until the threads of the one before, which look for more work a while, are asleep."""
    for _ in range(50):
        busy = time.process_time()
        time.sleep(0.002)
        if time.process_time() - busy < 0.0005:
            return


def compare(
    depths: Sequence[int],
    rounds: int,
    threads: Sequence[int],
    seconds: float = SECONDS,
    tokens: int = 1,
    layers: int = LAYERS,
    grown: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Milliseconds a layer of each contestant at each depth, as plain data: see `schema.md`, kind "attention".

    All are measured with the most `threads`, ours with the others as well. tokens: queries of a call. `grown` is given
    what there is after each depth. Raises `EdgeQKVError` where an output is wrong.
    """
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "kv_heads": 1, "layers": layers, "tokens": tokens}
    result: dict[str, Any] = sizes | {"threads": sorted(set(threads)), "results": [], "scaling": [], "left_out": []}
    for depth in depths:
        turns = _bind(depth, result)
        for turn in range(rounds):
            for one in turns if turn % 2 == 0 else reversed(turns):
                if not one.ms or sum(one.ms) * layers / 1e3 < seconds:
                    one.take(layers)
        result["results"] += _results(depth, turns)
        result["scaling"] += _scaling(depth, turns)
        grown(result)
    return result


def _bind(depth: int, result: dict[str, Any]) -> list[_Turn]:
    """Everyone who is there, checked and warm; who is not is added to what the result leaves out."""
    *fewer, most = result["threads"]
    problem = make_problem(depth, result["tokens"], result["layers"], most)
    absent = {row["operator"] for row in result["left_out"]}
    turns = []
    for contestant in CONTESTANTS:
        if contestant.name in absent:
            continue
        say(f"depth {depth:,}: {contestant.name}")
        try:
            for threads in (*(fewer if contestant.ours else ()), most):
                given = replace(problem, threads=threads)
                bound = contestant.bind(given)
                bound.run()
                check(contestant, given, bound)
                turns.append(_Turn(contestant, threads, bound))
        except Missing as why:
            say(f"{contestant.name} is left out: {why}")
            result["left_out"].append({"operator": contestant.name, "why": str(why)})
    return turns


def _ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Of the rounds that both have."""
    return [a / b for a, b in zip(slower, faster, strict=False)]


def _results(depth: int, turns: list[_Turn]) -> list[dict[str, Any]]:
    most = max(one.threads for one in turns)
    all_of = {one.contestant.name: one.ms for one in turns if one.threads == most}
    rows = []
    for name, ms in all_of.items():
        times = figure(_ratios(all_of[FIRST], ms)) if FIRST in all_of else None
        rows.append({"depth": depth, "operator": name, "ms": ms, "ms_per_layer": figure(ms), "times_faster": times})
    return rows


def _scaling(depth: int, turns: list[_Turn]) -> list[dict[str, Any]]:
    """How many times faster ours are with more threads than with the fewest."""
    rows = []
    for name in dict.fromkeys(one.contestant.name for one in turns if one.contestant.ours):
        fewest, *others = (one for one in turns if one.contestant.name == name)
        for one in others:
            ratios = _ratios(fewest.ms, one.ms)
            row = {"depth": depth, "operator": name, "from": fewest.threads, "threads": one.threads}
            rows.append(row | {"ratios": ratios, "times_faster": figure(ratios)})
    return rows


# ---- what is wanted ----

_FASTER = (
    (FP16, FIRST, 4, ""),
    (FP16, FIRST_FP16, 9, ""),
    (INT8, FIRST, 10, ""),
    (INT8, FIRST, 16, "the aim"),
)
_NO_DEPTH = f"needs both at depth {TARGET_DEPTH:,}, one token"
_NO_THREADS = f"needs --threads 1 2 at depth {TARGET_DEPTH:,}, one token"


def targets(result: dict[str, Any]) -> list[Target]:
    """What was aimed at for one token at depth 32,768, beside what `compare` found."""
    decoded = [row for row in result["results"] if (row["depth"], result["tokens"]) == (TARGET_DEPTH, 1)]
    ms = {row["operator"]: row["ms"] for row in decoded}
    scaling = {
        row["operator"]: row["ratios"]
        for row in result["scaling"]
        if (row["depth"], result["tokens"], row["from"], row["threads"]) == (TARGET_DEPTH, 1, 1, 2)
    }
    made = []
    for ours, theirs, wanted, note in _FASTER:
        found = _ratios(ms[theirs], ms[ours]) if {ours, theirs} <= set(ms) else []
        made.append(Target(f"{ours}: faster than {theirs}", wanted, "at least", found, note if found else _NO_DEPTH))
    for ours in (FP16, INT8):
        found = scaling.get(ours, [])
        made.append(Target(f"{ours}: 2 threads over 1", 1.8, "at least", found, "" if found else _NO_THREADS))
    return made


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("attention", SUMMARY, NOTES)
    add = parser.add_argument
    add_output(parser, "bench.json and bench.md")
    add("--depths", type=int, nargs="+", default=list(DEPTHS), help="rows in the cache; default: %(default)s")
    add("--threads", type=int, nargs="+", default=[0], help="several: how ours scale; 0: one for each core")
    add("--tokens", type=int, default=1, help="queries of a call, more than one as in a prefill; default: %(default)s")
    add("--layers", type=int, default=LAYERS, help="caches that take turns, as in a model; default: %(default)s")
    add("--repeats", type=int, default=15, help="rounds a depth; default: %(default)s")
    add("--seconds", type=float, default=SECONDS, help="longest an operator takes turns; default: %(default)s")
    return run(parser, _measure, argv)


def _measure(arguments: argparse.Namespace) -> None:
    for name in ("onnx", "onnxruntime", "torch"):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{name} is not installed; install it with `pip install {name}`")
    depths = sorted({whole(depth, "--depths", 0, 1 << 20) for depth in arguments.depths})
    threads = sorted({thread_count(count) or processors() for count in arguments.threads})
    repeats, tokens = whole(arguments.repeats, "--repeats", 1), whole(arguments.tokens, "--tokens", 1, MOST_CHUNK)
    layers, limit = whole(arguments.layers, "--layers", 1, 1024), arguments.seconds
    if not 0 < limit < 1e6:
        raise InputError(f"--seconds {limit}: must be above 0 and below 1,000,000")
    prepare_output(arguments.output)
    options = {"threads": threads[-1], "repeats": repeats, "seconds": limit}
    result = Result("attention", arguments.output, machine=machine.describe(), options=options)
    with result.kept():
        grown = lambda found: result.add("attention", found)  # noqa: E731
        found = compare(depths, repeats, threads, limit, tokens, layers, grown)
        result.add("targets", [target.as_json() for target in targets(found)])
    content = result.finish()
    print(json.dumps(content, indent=2) if arguments.json else report.as_text(_parts(content)))
    if arguments.output is not None:
        report.write(arguments.output, _parts(content), plots.of_attention(content))


def _parts(content: dict[str, Any]) -> list[report.Part]:
    found, options = content["attention"], content["options"]
    tokens = "one token" if found["tokens"] == 1 else f"{found['tokens']:,} tokens"
    head = report.Part(
        f"Attention of {tokens}: {HEADS} heads of {HEAD_DIM}, one kv head, {found['layers']} layers",
        notes=[
            machine.one_line(content["machine"]),
            f"threads: {options['threads']}; medians of up to {options['repeats']} rounds (least..most)",
        ],
    )
    cells = []
    for row in found["results"]:
        times = row["times_faster"]
        least = [f"{row['depth']:,}", written(row["ms_per_layer"]), "" if times is None else written(times)]
        cells.append((row["operator"], *least, str(len(row["ms"]))))
    notes = [f"{row['operator']} is left out: {row['why']}" for row in found["left_out"]] + NOTES.splitlines()
    layer = report.Part("A layer", ("operator and cache", "depth", "ms", "x", "rounds"), cells, notes)
    parts = [head, layer]
    if found["scaling"]:
        header = ("operator and cache", "depth", "threads", "x")
        cells = [
            (row["operator"], f"{row['depth']:,}", f"{row['from']} to {row['threads']}", written(row["times_faster"]))
            for row in found["scaling"]
        ]
        parts.append(report.Part("More threads", header, cells))
    cells, header = as_table(targets(found))
    return [*parts, report.Part(f"Targets, one token at depth {TARGET_DEPTH:,}", header, cells)]


if __name__ == "__main__":
    sys.exit(main())
