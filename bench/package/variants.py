"""What sharing keys and values saves: `edge-qkv bench variants 1.2B`.

Each variant is exported with random weights and measured whole: its cache at full context by the session's own
accounting, beside its plan and the bytes of arXiv 2606.04032; decode speed and memory at depth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_qkv import EdgeQKVError, InputError, ModelConfig, Package, plan
from edge_qkv.bench import machine, plots, report
from edge_qkv.bench.common import add_measuring, add_output, command_line, prepare_output, run
from edge_qkv.bench.figures import written
from edge_qkv.bench.package.command import SECONDS, Bench, add_random, checked_depths, exported, reachable, verified
from edge_qkv.bench.package.processes import Processes
from edge_qkv.bench.package.random_weights import named_config
from edge_qkv.bench.results import Result
from edge_qkv.checks import thread_count, whole
from edge_qkv.presets import PRESETS, apply_variant
from edge_qkv.tables import size

DEPTHS = 0, 4096, 32767
# Bytes at 32,768 tokens with an fp16 cache, from the deployment tables of arXiv 2606.04032 (which rounds them, and
# mixes decimal and binary units; these are the exact ones).
PAPER = {
    "300M": {
        "QKV": 2_684_354_560,
        "Q-K=V": 1_342_177_280,
        "GQA-4": 671_088_640,
        "MQA": 167_772_160,
        "Q-GQA-4": 335_544_320,
        "Q-MQA": 83_886_080,
    },
    "1.2B": {
        "QKV": 5_905_580_032,
        "Q-K=V": 2_952_790_016,
        "GQA-8": 1_476_395_008,
        "MQA": 184_549_376,
        "Q-MQA": 92_274_688,
    },
}

SUMMARY = "Measure the variants of a model: the cache of each as measured, as planned and as published; its speed."
EXAMPLES = """\
examples:
  edge-qkv bench variants 300M --output 300M      six variants of 20 layers: minutes, and 1.4 GB of packages
  edge-qkv bench variants 1.2B                    six of 22 layers: 6 GB of memory free for QKV at 32k, 4 GB of packages
  edge-qkv bench variants 1.2B --layers 2         of each the first two layers: a quick look, not the published model
  edge-qkv bench variants config.json             a model of your own

"reserved" is the address space of the session's cache at full context, "used" and "committed" what it holds after the
deepest measurement. Depths whose plan does not fit into the free memory are left out and listed. The packages stay in
--directory; later runs take them from there.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("variants", SUMMARY, EXAMPLES)
    add = parser.add_argument
    add("model", help=f"{', '.join(PRESETS)}, or the path of a config.json")
    add_output(parser, "bench.json and bench.md")
    add_measuring(parser, 3, "measurements of a figure")
    add("--depths", type=int, nargs="+", metavar="N", help="tokens in the cache; default: 0 4096 32767")
    add("--variants", nargs="+", metavar="NAME", help="of QKV, GQA-N, MQA, Q-K=V, Q-GQA-N, Q-MQA; default: all six")
    add("--layers", type=int, metavar="N", help="only the first N layers; every figure is then of such a model")
    add_random(parser)
    return run(parser, _variants, argv)


@dataclass(frozen=True)
class _Model:
    name: str
    config: ModelConfig
    whole: bool  # all layers of it

    def paper(self, variant: str, cache: str) -> int | None:
        """What the paper says of a variant's cache, where this is a model of the paper."""
        return PAPER.get(self.name, {}).get(variant) if self.whole and cache == "fp16" else None


def _variants(arguments: argparse.Namespace) -> None:
    prepare_output(arguments.output)
    model = _model(arguments)
    configs = {name: apply_variant(model.config, name) for name in arguments.variants or _names(model.config)}
    depths = checked_depths(model.config, model.name, arguments.depths, DEPTHS)
    repeats, threads = whole(arguments.repeats, "--repeats", 1), thread_count(arguments.threads)
    threads = plan(model.config, context=1, threads=threads).threads
    processes = Processes(2 * len(configs))
    result = Result(
        "variants",
        arguments.output,
        machine=machine.describe(),
        options={"threads": threads, "repeats": repeats, "seconds": SECONDS},
        model=model.name if model.whole else f"{model.name}, first {len(model.config.layers)} layers",
        layers=len(model.config.layers),
        target=arguments.target or "onnx",
        weights=arguments.weights or "int4",
        cache=arguments.cache or "fp16",
        context=model.config.max_positions,
        variants=[],
    )
    with result.kept():
        for name, config in configs.items():
            package = exported(f"{model.name}/{name}", config, arguments)
            row = _measured(package, name, depths, threads, repeats, processes)
            row["cache_paper"] = model.paper(name, row["cache"])
            _check(row, config)
            result.add("variants", [*result.content["variants"], row])
    content = result.finish()
    print(json.dumps(content, indent=2) if arguments.json else report.as_text(of_variants(content)))
    if arguments.output is not None:
        report.write(arguments.output, of_variants(content), plots.of_variants(content))


def _model(arguments: argparse.Namespace) -> _Model:
    name, is_file = arguments.model, arguments.model.endswith(".json")
    if name not in PRESETS and not is_file:
        raise InputError(f"{name}: must be one of {', '.join(PRESETS)}, or the path of a config.json")
    config, name = named_config(name), Path(name).stem if is_file else name
    layers = arguments.layers
    if layers is None:
        return _Model(name, config, True)
    most = len(config.layers)
    layers = whole(layers, "--layers", 1, most, f", the layers of {name}")
    return _Model(name, replace(config, pattern=config.pattern[:layers]), layers == most)


def _names(config: ModelConfig) -> list[str]:
    """The six variants of the paper's deployment tables that fit the number of heads."""
    heads = config.only.heads
    grouped = 4 if heads <= 16 else 8
    names = ("QKV", f"GQA-{grouped}", "MQA", "Q-K=V", "Q-GQA-4", "Q-MQA")
    return [name for name in names if "GQA" not in name or heads % int(name[-1]) == 0]


def _measured(
    package: Package, name: str, depths: list[int], threads: int, repeats: int, processes: Processes
) -> dict[str, Any]:
    depths, left_out = reachable(package, depths)
    most = package.config.max_positions
    request = dict(
        package=str(package.path), packed=None, threads=threads, repeats=repeats, limit=SECONDS, context=most
    )
    bench = Bench(package, request, depths, left_out, [], [], None, processes)
    found = bench.measure("decode", f"{name}: decode at {', '.join(f'{depth:,}' for depth in depths)}", depths=depths)
    return {
        "variant": name,
        "cache": package.manifest["cache"],
        "file_bytes": package.weight_bytes,
        "cache_planned": plan(package, context=most).cache,
        "cache_reserved": found["loaded"]["cache_reserved"],
        "depths": found["depths"],
        "left_out": left_out,
        "verified": verified(bench, found["depths"]),
    }


def _check(row: dict[str, Any], config: ModelConfig) -> None:
    """Measured = planned = published, or `EdgeQKVError`."""
    name, planned = row["variant"], row["cache_planned"]
    for decoded in row["depths"]:
        cached, used = decoded["depth"] + len(decoded["tokens"]), decoded["memory"]["cache_used"]
        if used != (expected := config.cache_bytes(cached, row["cache"])):
            raise EdgeQKVError(f"{name}: {cached:,} tokens take {used:,} bytes of cache, and should {expected:,}")
    for what, count in (("reserves", row["cache_reserved"]), ("is published with", row["cache_paper"])):
        if count not in (None, planned):
            raise EdgeQKVError(f"{name}: {what} {count:,} bytes of cache, {planned:,} are planned")


def of_variants(result: dict[str, Any]) -> list[report.Part]:
    """The tables of what was measured."""
    head = report.Part(
        f"{result['model']}: variants with random weights",
        notes=[
            f"{result['target']}, {result['weights']} weights, {result['cache']} cache",
            machine.one_line(result["machine"]),
            f"{result['options']['threads']} threads; medians of up to {result['options']['repeats']} (least..most)",
        ],
    )
    return [head, _caches(result), _speeds(result)]


def _caches(result: dict[str, Any]) -> report.Part:
    rows, largest = [], max(row["cache_planned"] for row in result["variants"])
    for row in result["variants"]:
        last = row["depths"][-1]
        paper = "" if row["cache_paper"] is None else f"{row['cache_paper']:,}"
        rows.append(
            (
                row["variant"],
                *(f"{row[name]:,}" for name in ("cache_reserved", "cache_planned")),
                paper,
                f"{largest / row['cache_planned']:.0f}x",
                f"{last['depth'] + len(last['tokens']):,}",
                *(f"{last['memory'][name]:,}" for name in ("cache_used", "cache_committed")),
            )
        )
    full = f"{result['context']:,} tokens"
    header = (f"cache, {full}", "reserved", "planned", "published", "largest/this", "filled to", "used", "committed")
    return report.Part("Cache, bytes", header, rows)


def _speeds(result: dict[str, Any]) -> report.Part:
    depths = sorted({row["depth"] for variant in result["variants"] for row in variant["depths"]})
    rows, notes = [], []
    for variant in result["variants"]:
        found = {row["depth"]: row for row in variant["depths"]}
        memory = variant["depths"][-1]["memory"]
        cells = (written(found[depth]["ms_per_token"]) if depth in found else "left out" for depth in depths)
        rows.append((variant["variant"], *cells, *(size(memory[name]) for name in ("anonymous", "resident", "peak"))))
        for row in variant["left_out"]:
            need = f"needs {size(row['needs'])}, {size(row['available'])} were free"
            notes.append(f"{variant['variant']}: {row['depth']:,} tokens left out: {need}")
    tokens = sum(variant["verified"]["tokens"] for variant in result["variants"])
    equal = sum(variant["verified"]["equal"] for variant in result["variants"])
    notes.append(f"verified: {equal} of {tokens} timed tokens are those of the plainest kernel reading chunks")
    header = ("decode, ms/token", *(f"at {depth:,}" for depth in depths), "anonymous", "resident", "peak")
    return report.Part("Decode, and memory at the deepest", header, rows, notes)


if __name__ == "__main__":
    sys.exit(main())
