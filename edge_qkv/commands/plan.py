"""`edge-qkv plan`: what a model needs of memory, and what fits where."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from importlib.resources import files
from typing import Any

from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import InputError, printable
from edge_qkv.package import Package
from edge_qkv.planning import Plan, fits, plan, planned_model
from edge_qkv.presets import VARIANTS, apply_variant
from edge_qkv.sizes import parse_size, parse_tokens
from edge_qkv.tables import size, table
from edge_qkv.targets import BLOCK_SIZES, TARGETS, WEIGHTS, named

SUMMARY = "Plan memory: what a model needs at a context, and the longest context that a budget holds."
EPILOG = """\
examples:
  edge-qkv plan model --memory 1GB                      the longest context that 1 GB holds
  edge-qkv plan model --context 32768                   what 32,768 tokens need, part by part
  edge-qkv plan model --context 32768 --memory 512MB    does it fit? if not, exit code 2 and what would
  edge-qkv plan 1.2B/Q-MQA --budget min --context max   a published size, before anything is trained
  edge-qkv plan 1.2B/Q-MQA --device all                 phones and boards: the longest context of each
  edge-qkv plan 1.2B --variants                         the cache of all eight ways to share keys and values

MB is 1,000,000 bytes and MiB 1,048,576. A total is memory beyond what the process has without the runtime.
"""
# Bytes of a Plan that make up `expected`: field, what it is, whether the kernel can drop its pages.
_PARTS = (
    ("weights_file", "weights, mapped from files", True),
    ("weights_anonymous", "weights, the engine's own copies", False),
    ("cache", "cache at full context", False),
    ("workspace", "workspace of a prefill chunk", False),
    ("engine_file", "engine, its code", True),
    ("engine_anonymous", "engine, its structures and threads", False),
)
_GROUPS = 4, 8  # kv heads of the grouped variants of arXiv 2606.04032, by the number of heads: 16, and more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    add = parser.add_argument
    add("model", help="package, checkpoint, config.json, or a published size such as 300M or 1.2B/Q-GQA-4")
    add("--memory", "--budget", metavar="BYTES", help="budget as 512MB or 1.5GiB; min: the least that is needed")
    add("--context", default="max", metavar="N", help="tokens; max: the longest that the budget holds")
    add("--cache", choices=tuple(CACHE_BYTES), help="cache type; default: the package's, else fp16")
    add("--target", choices=tuple(TARGETS), help="of a model that is not exported yet; default: onnx")
    add("--weights", choices=WEIGHTS, help="of a model that is not exported yet; default: int4")
    add("--block-size", type=int, choices=BLOCK_SIZES, help="weights that share a scale; default: the export's")
    add("--prefill-chunk", type=int, default=0, help="prompt tokens evaluated at once; 0: 128, or what the package has")
    add("--margin", type=int, default=0, help="rows that layers with a window keep behind it; 0: as many as the window")
    add("--threads", type=int, default=0, help="0: one for each core that this process may use")
    add(
        "--packed",
        action=argparse.BooleanOptionalAction,
        help="weights packed for the processor; default: whether `edge-qkv pack` has packed this package here",
    )
    add("--device", metavar="NAME", help=f"what fits on a device: {', '.join(devices())}, or all")
    add("--variants", action="store_true", help="cache bytes of all variants of the model")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    if arguments.device and (arguments.variants or arguments.memory):
        raise InputError("--device has its own memory and its own table; leave --memory and --variants out")
    if arguments.variants and (arguments.memory or arguments.target):
        raise InputError("--variants shows caches without a budget or a target; leave --memory and --target out")
    model = planned_model(arguments.model)
    config = model.config if isinstance(model, Package) else model
    if isinstance(model, Package) and (arguments.target or arguments.weights or arguments.block_size):
        raise InputError(
            "--target, --weights and --block-size are for models that are not exported yet; a package has its own"
        )
    target = model.target if isinstance(model, Package) else arguments.target or "onnx"
    unknown = named(target).unknown_memory
    if arguments.device and unknown:
        raise InputError(f"--device {arguments.device}: {unknown}, so what fits cannot be told; leave it out")
    own = model.manifest.get("cache") if isinstance(model, Package) else None
    if own and arguments.cache not in (None, own):
        raise InputError(f"--cache {arguments.cache}: this package has the cache type {own}, chosen at its export")
    memory = arguments.memory
    memory = memory if memory in (None, "min") else parse_size(memory, "--memory")
    context = parse_tokens(arguments.context, "--context")
    if arguments.variants:
        return _print_variants(config, context, arguments.json)
    options: dict[str, Any] = dict(
        cache=arguments.cache or own,
        weights=arguments.weights or "int4",
        block_size=arguments.block_size,
        target=target,
        prefill_chunk=arguments.prefill_chunk,
        packed=arguments.packed,
    )
    if arguments.device:
        return _print_devices(model, arguments.device, context, options, arguments.json)
    made = plan(model, memory=memory, context=context, threads=arguments.threads, **options)
    if memory == "min":
        made = replace(made, memory=made.total)
    if arguments.json:
        print(json.dumps(asdict(made) | {"left": made.left}, indent=2))
    else:
        print(describe(arguments.model, made))


def describe(name: str, made: Plan) -> str:
    """A plan as a table: each part, file-backed and anonymous apart."""
    rows = []
    for field, what, dropped in _PARTS:
        count = getattr(made, field)
        if made.unknown and not count:
            continue
        rows.append((what, *((f"{count:,}", "") if dropped else ("", f"{count:,}")), size(count)))
    head = f"{name}: {made.context:,} tokens, {made.cache_type} cache, "
    if made.prefill_chunk:  # 0: nothing that is planned depends on it
        head += f"chunks of {made.prefill_chunk}, "
    if made.unknown:
        head += f"weights and cache {made.total:,} bytes"
    else:
        rows.append(("margin of measurement", "", f"{made.margin:,}", size(made.margin)))
        rows.append(("total", f"{made.total - made.anonymous:,}", f"{made.anonymous:,}", size(made.total)))
        packed = "packed" if made.packed else "not packed"
        head += f"{made.threads} threads, weights {packed}; total {made.total:,} bytes"
    lines = [printable(head), "", table(rows, ("bytes", "file-backed", "anonymous", "together"))]
    if made.unknown:
        lines.append(f"\nno total: {made.unknown}")
    if made.memory is not None:
        lines.append(f"\nbudget {made.memory:,} bytes ({size(made.memory)}), left {made.left:,} ({size(made.left)})")
    return "\n".join(lines)


def devices() -> dict[str, dict[str, Any]]:
    """The presets: each figure beside its source."""
    return json.loads(files("edge_qkv").joinpath("devices.json").read_text(encoding="utf-8"))


# ---- variants ----


def variant_table(config: ModelConfig, tokens: int) -> list[dict[str, int | str]]:
    """Cache bytes of the eight variants of arXiv 2606.04032 for a model of this size, at `tokens` tokens."""
    count = config.only.heads
    grouped = _GROUPS[0] if count <= 16 else _GROUPS[1]
    rows = []
    for name, (_, heads) in VARIANTS.items():
        groups = _GROUPS[0] if name.startswith("Q-") else grouped
        full = f"{name}-{groups}" if heads == "some" else name
        if heads == "some" and count % groups:
            continue
        varied = apply_variant(config.with_layers(query="projected"), full)
        rows.append({"variant": full} | {cache: varied.cache_bytes(tokens, cache) for cache in ("fp16", "int8")})
    return rows


def _print_variants(config: ModelConfig, context: int | str, as_json: bool) -> None:
    tokens = config.max_positions if context == "max" else int(context)
    rows = variant_table(config, tokens)
    if as_json:
        print(json.dumps({"context": tokens, "variants": rows}, indent=2))
        return
    most = rows[0]["fp16"]
    cells = [
        (row["variant"], *(f"{row[c]:,} ({size(row[c])})" for c in ("fp16", "int8")), f"{most / row['fp16']:.0f}x")
        for row in rows
    ]
    print(table(cells, (f"cache, {tokens:,} tokens", "fp16", "int8", "QKV/this")))


# ---- devices ----


def _print_devices(
    model: Package | ModelConfig, name: str, context: int | str, options: dict[str, Any], as_json: bool
) -> None:
    known = devices()
    if name != "all" and name not in known:
        raise InputError(f"--device {name}: is not known; choose one of {', '.join(known)}, or all")
    rows = [_on_device(model, key, known[key], context, options) for key in (known if name == "all" else [name])]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    caches = _device_caches(options)
    if not any(row[cache] for row in rows for cache in caches):
        raise InputError(
            f"{name}: {size(rows[0]['app_memory'])} for one app do not hold this model; "
            "`edge-qkv plan MODEL --budget min` says what it needs"
        )
    cells = []
    for row in rows:
        cells.append((row["name"], size(row["app_memory"])))
        for held in (row[cache] for cache in caches):
            if held:
                cells[-1] += f"{held['context']:,}", size(held["left"]), f"{held['tokens_per_second_bound']:.0f}"
            else:
                cells[-1] += "does not fit", "", ""
    columns = (name for cache in caches for name in (f"{cache} tokens", "left", "decode at most"))
    print(table(cells, ("device", "for an app (assumed)", *columns)))
    print(
        "\ndecode at most: tokens/s with that many tokens in the cache, an upper bound: memory bandwidth over the "
        "bytes that a token reads there"
    )
    if name != "all":
        for figure in ("memory", "app_memory", "cores", "bandwidth"):
            print(f"{figure}: {known[name][figure]['source']}")


def _device_caches(options: dict[str, Any]) -> tuple[str, ...]:
    """A package's cache, or the one that is asked for; else those that there are to choose from."""
    return (options["cache"],) if options["cache"] else ("fp16", "int8")


def _on_device(
    model: Package | ModelConfig, key: str, device: dict[str, Any], context: int | str, options: dict[str, Any]
) -> dict[str, Any]:
    memory, cores = device["app_memory"]["bytes"], device["cores"]["count"]
    row: dict[str, Any] = {"device": key, "name": device["name"], "app_memory": memory}
    for cache in _device_caches(options):
        held = fits(model, memory=memory, context=context, threads=cores, **options | {"cache": cache})
        row[cache] = held and {
            "context": held.context,
            "total": held.total,
            "left": held.left,
            # A token reads every matrix and the whole cache; of the tables a row.
            "tokens_per_second_bound": device["bandwidth"]["bytes_per_second"] / (held.matrix_bytes + held.cache),
        }
    return row
