"""The benchmark of one package: `edge-qkv bench PACKAGE`.

Needs what running a package needs, and matplotlib for the plots alone. What is printed is also a file, see
`schema.md`; every measurement runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_qkv import InputError, ModelConfig, Package, plan
from edge_qkv.bench import machine, plots, report
from edge_qkv.bench.common import add_measuring, add_output, command_line, prepare_output, run, say
from edge_qkv.bench.figures import figure
from edge_qkv.bench.package.measurements import Request, packed_files
from edge_qkv.bench.package.processes import Processes, plainest_kernel
from edge_qkv.bench.package.random_weights import default_directory, named_config, random_package
from edge_qkv.bench.package.speed import TOKENS
from edge_qkv.bench.results import Result
from edge_qkv.checks import thread_count, whole
from edge_qkv.config import CACHE_BYTES
from edge_qkv.package import MANIFEST
from edge_qkv.presets import PRESETS
from edge_qkv.targets import TARGETS, WEIGHTS

DEPTHS = 0, 1024, 4096, 8192, 16384, 32767
PROMPTS = 16, 128, 512, 2048
SECONDS = 20.0
LOADS = 3  # processes of each kind of load, or fewer repeats

SUMMARY = "Measure a package on this machine: speed and memory at depth, load time, first token, threads, restore."
EXAMPLES = f"""\
examples:
  edge-qkv bench model                            what is measured, as tables; minutes for a model of 1.2B
  edge-qkv bench model --output results           and as bench.json, bench.md and plots
  edge-qkv bench 1.2B/Q-MQA --target executorch   a published size with random weights, exported first (needs torch)
  edge-qkv bench compare a/bench.json b/bench.json    results of several devices or packages in one table and plot
  edge-qkv bench variants 1.2B                    what sharing keys and values saves: cache bytes and decode speed
  edge-qkv bench quality                          what sharing costs: perplexity of small models, trained alike
  edge-qkv bench engines onnx executorch          packages side by side, taking turns
  edge-qkv bench peers                            a model of 1.2B beside llama.cpp and ONNX Runtime alone, and targets
  edge-qkv bench attention                        the attention operator beside ONNX Runtime's and ExecuTorch's
  edge-qkv bench restore model                    restoring a conversation beside the prefill it replaces
(a package whose directory has such a name is ./compare)

sections, each in processes of their own:
  load         opening the model, and its first token, with its files out of the page cache (cold) and in it (warm)
  decode       greedy tokens with so many tokens in the cache, and the memory then; {TOKENS} a repeat
  prefill      one chunk of a prompt with so many tokens in the cache
  first-token  from a prompt to the token after it; one that would take longer than --seconds is left out
  threads      prefill and decode with 1, 2, 4 ... threads and one for each core
  restore      restoring a saved conversation; its prefill is summed up from chunks at several depths

The cache is filled with noise up to a depth, which costs the same as text and takes seconds. Depths whose plan does
not fit into the memory that is free are left out. A figure is the median of its repeats (least..most); nothing is
repeated after --seconds. Memory is what the model adds to the process, as the kernel counts it.

Every token that was timed is compared with a reference: the same package, or that of --reference, reads the tokens of
each depth as one chunk in another process, with the plainest kernel that this kind of processor has. A token that the
reference finds clearly worse than another ends the benchmark with an error: a fast wrong answer has no speed.
"""


@dataclass
class Bench:
    """What the sections measure, and with what."""

    package: Package
    request: dict[str, Any]  # fields of all requests
    depths: list[int]
    left_out: list[dict[str, int]]
    lengths: list[int]
    counts: list[int]  # of threads
    reference: Package | None
    processes: Processes
    facts: dict[str, Any] = field(default_factory=dict)  # what the package is, see one_package

    def measure(self, kind: str, what: str = "", kernel: str | None = None, **fields: Any) -> dict:
        return self.processes.measure(Request(kind, **self.request | fields), what or kind, kernel)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("", SUMMARY, EXAMPLES)
    add = parser.add_argument
    add("package", help="directory written by edge-qkv export, or a config: 1.2B/Q-MQA, or the path of a config.json")
    add_output(parser, "bench.json and bench.md")
    add_measuring(parser, 5, "measurements of a figure")
    add("--seconds", type=float, default=SECONDS, help="longest that a figure is repeated; default: %(default)s")
    add("--only", nargs="+", metavar="SECTION", choices=SECTIONS, help=f"of {', '.join(SECTIONS)}; default: all")
    add("--depths", type=int, nargs="+", metavar="N", help=f"tokens in the cache; default: {_listed(DEPTHS)}")
    add("--prompts", type=int, nargs="+", metavar="N", help=f"tokens of the prompts; default: {_listed(PROMPTS)}")
    add("--packed", type=Path, metavar="DIR", help="with packed weights, in DIR or packed there first")
    add("--reference", metavar="PACKAGE", help="whose tokens are right; default: this package's, read as chunks")
    add_random(parser)
    return run(parser, _measure, argv)


def add_random(parser: argparse.ArgumentParser) -> None:
    """The options of packages that are exported first."""
    add = parser.add_argument
    add("--target", choices=tuple(TARGETS), help="of a config: engine; default: onnx")
    add("--weights", choices=WEIGHTS, help="of a config: weight type; default: int4")
    add("--cache", choices=tuple(CACHE_BYTES), help="of a config: cache type; default: fp16")
    add(
        "--directory",
        type=Path,
        metavar="DIR",
        help="of a config: where its package is kept; default: edge-qkv/random below the user's cache directory",
    )


def exported(name: str, config: ModelConfig, arguments: argparse.Namespace) -> Package:
    """The package of a config with random weights, as those options say."""
    target, weights, cache = arguments.target or "onnx", arguments.weights or "int4", arguments.cache or "fp16"
    return random_package(name, config, arguments.directory or default_directory(), target, weights, cache)


def _measure(arguments: argparse.Namespace) -> None:
    prepare_output(arguments.output)
    bench, options = _bench(arguments)
    sections = {name: section for name, section in SECTIONS.items() if name in (arguments.only or SECTIONS)}
    bench.processes.total = 1 + bool(arguments.packed) + sum(count(bench) for _, count in sections.values())
    result = Result("package", arguments.output, machine=machine.describe(), options=options)
    with result.kept():
        result.add("package", _describe(bench))
        for name, (section, _) in sections.items():
            result.add(name.replace("-", "_"), section(bench))
    content = result.finish()
    print(json.dumps(content, indent=2) if arguments.json else report.as_text(report.of_package(content)))
    if arguments.output is not None:
        report.write(arguments.output, report.of_package(content), plots.of_packages([content]))


def _bench(arguments: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """Checks everything that was given before anything is exported or measured."""
    repeats, limit = whole(arguments.repeats, "--repeats", 1), arguments.seconds
    threads = thread_count(arguments.threads)
    if not 0 < limit < 1e6:
        raise InputError(f"--seconds {limit}: must be above 0 and below 1,000,000")
    reference = Package.open(arguments.reference) if arguments.reference else None
    name, config = arguments.package, named_config(arguments.package)
    package = _given(arguments) if config is None else None
    config = config or package.config
    if reference and reference.config.vocab_size != config.vocab_size:
        raise InputError(f"--reference {reference.path}: has another vocabulary than {name}; leave it out")
    most = config.max_positions
    depths = checked_depths(config, name, arguments.depths, DEPTHS)
    lengths = sorted({whole(n, "--prompts", 1, most, f", the most {name} goes") for n in arguments.prompts or ()})
    lengths = lengths or sorted({min(n, most) for n in PROMPTS})
    package = package or exported(Path(name).stem if name.endswith(".json") else name, config, arguments)
    threads = plan(package, context=1, threads=threads).threads  # how many, where it is one for each core
    packed = arguments.packed is not None
    depths, left_out = reachable(package, depths, packed)
    for_all = {"package": str(package.path), "packed": str(arguments.packed) if packed else None, "threads": threads}
    for_all |= {"repeats": repeats, "limit": limit}
    # Of an engine that does not say how many it uses there is only what it chooses.
    counts = sorted({1, *(2**i for i in range(9) if 2**i < threads), threads}) if threads else [0]
    bench = Bench(package, for_all, depths, left_out, lengths, counts, reference, Processes(0))
    return bench, {"threads": threads, "repeats": repeats, "seconds": limit}


def _given(arguments: argparse.Namespace) -> Package:
    name = arguments.package
    if not Path(name).exists():
        raise InputError(f"{name}: is no package, and no config such as {', '.join(PRESETS)} or 1.2B/Q-MQA")
    of_config = ("target", "weights", "cache", "directory")
    if given := [f"--{option}" for option in of_config if getattr(arguments, option) is not None]:
        raise InputError(f"{' and '.join(given)}: a package has its own; leave it out, or give a config")
    return Package.open(name)


def checked_depths(config: ModelConfig, name: str, asked: list[int] | None, usual: Sequence[int]) -> list[int]:
    """The depths to measure, ascending: those asked for, or the usual ones as far as the model goes."""
    most = config.max_positions - 1
    if asked is None:
        return sorted({min(depth, most) for depth in usual})
    return sorted({whole(depth, "--depths", 0, most, f", the most {name} goes") for depth in asked})


def reachable(package: Package, depths: list[int], packed: bool = False) -> tuple[list[int], list[dict[str, int]]]:
    """The depths that the free memory holds by their plans, and what the others need; raises `InputError` where it
    holds none."""
    available, held, left_out = machine.available_memory(), [], []
    for depth in depths:
        needs = plan(package, context=_context(package, depth), packed=packed).total
        if available is None or needs <= available:
            held.append(depth)
        else:
            left_out.append({"depth": depth, "needs": needs, "available": available})
            say(f"{package.path}: depth {depth:,} is left out: it needs {needs:,} bytes, {available:,} are free")
    if not held:
        raise InputError(
            f"{package.path}: needs {left_out[0]['needs']:,} bytes, {available:,} are free; close what needs memory"
        )
    return held, left_out


def _context(package: Package, depth: int) -> int:
    """The most tokens in the cache when a depth is measured."""
    return min(depth + TOKENS, package.config.max_positions)


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) + ", as far as the package goes"


# ---- sections ----


def _describe(bench: Bench) -> dict[str, Any]:
    """Packs the weights where that is asked for, and says what is measured."""
    if bench.request["packed"]:
        bench.measure("pack", "packed weights")
    facts = bench.facts = bench.measure("facts", "what the package is")
    package = bench.package
    return {
        "name": package.path.resolve().name,
        "engine": facts["engine"],
        "version": facts["version"],
        "target": package.target,
        "weights": facts["weights"],
        "block_size": package.manifest.get("block_size"),
        "cache": facts["cache"],
        "variant": package.config.variant,
        "parameters": package.config.parameters(),
        "context": package.config.max_positions,
        "cache_bytes_per_token": package.cache_bytes_per_token,
        "file_bytes": package.weight_bytes,
        "packed": bench.request["packed"] is not None,
        "fingerprint": facts["fingerprint"],
        "config": package.config.to_dict(),
        "parity": package.manifest["parity"],
    }


def _load(bench: Bench) -> dict[str, Any]:
    folder = bench.package.path
    paths = [folder / name for name in (MANIFEST, *bench.package.manifest["files"])]
    if bench.request["packed"]:
        paths += packed_files(Path(bench.request["packed"]), bench.facts)
    found: dict[str, list[float]] = {}
    for turn in range(_loads(bench)):
        for kind in ("cold load", "warm load"):
            what = f"{kind}, {turn + 1} of {_loads(bench)}"
            for name, value in bench.measure(kind, what, files=[str(path) for path in paths]).items():
                found.setdefault(name, []).append(value)
    times = {
        kind: {"open_ms": figure(found[f"load_{kind}_ms"]), "first_token_ms": figure(found[f"first_token_{kind}_ms"])}
        for kind in ("cold", "warm")
    }
    return times | {"cached_after_drop": max(found["cached_after_drop"])}


def _loads(bench: Bench) -> int:
    return min(LOADS, bench.request["repeats"])


def _decode(bench: Bench) -> dict[str, Any]:
    found = bench.measure("decode", f"decode at {_depths(bench)}", depths=bench.depths)
    context = _context(bench.package, bench.depths[-1])
    packed = bench.request["packed"] is not None
    planned = plan(bench.package, context=context, threads=bench.request["threads"], packed=packed)
    sizes = {"depth": context, "cache": planned.cache, "expected": planned.expected, "total": planned.total}
    return found | {"left_out": bench.left_out, "planned": sizes, "verified": verified(bench, found["depths"])}


def verified(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The decoded tokens of `rows` beside the reference's; raises `EdgeQKVError`, naming the first that is wrong."""
    of = bench.reference or bench.package
    kernel = plainest_kernel() if TARGETS[of.target].native else None
    decoded = [(row["depth"], row["tokens"]) for row in rows]
    fields: dict[str, Any] = {"decoded": decoded}
    if bench.reference:
        fields |= {"package": str(of.path), "packed": None}
    found = bench.measure("verify", "the reference's tokens", kernel, **fields)
    how = f" with the kernel {kernel}" if kernel else ""
    return found | {"reference": f"{of.path.resolve().name}, read as chunks{how}"}


def _prefill(bench: Bench) -> list[dict[str, Any]]:
    return bench.measure("prefill", f"prefill at {_depths(bench)}", depths=bench.depths)["depths"]


def _first_token(bench: Bench) -> list[dict[str, Any]]:
    what = f"first token after {', '.join(map(str, bench.lengths))}"
    return bench.measure("first token", what, lengths=bench.lengths)["prompts"]


def _threads(bench: Bench) -> list[dict[str, Any]]:
    depths = [bench.depths[0], bench.depths[-1]]
    return [bench.measure("threads", f"{n} threads", threads=n, depths=sorted(set(depths))) for n in bench.counts]


def _restore(bench: Bench) -> dict[str, Any]:
    return bench.measure("restore", f"restore of {bench.depths[-1]:,}", depths=[bench.depths[-1]])


def _depths(bench: Bench) -> str:
    return ", ".join(f"{depth:,}" for depth in bench.depths)


# Section -> what measures it, and how many processes that starts.
SECTIONS: dict[str, tuple[Callable[[Bench], Any], Callable[[Bench], int]]] = {
    "load": (_load, lambda bench: 2 * _loads(bench)),
    "decode": (_decode, lambda bench: 2),
    "prefill": (_prefill, lambda bench: 1),
    "first-token": (_first_token, lambda bench: 1),
    "threads": (_threads, lambda bench: len(bench.counts)),
    "restore": (_restore, lambda bench: 1),
}
