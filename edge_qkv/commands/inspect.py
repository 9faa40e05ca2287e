"""`edge-qkv inspect`: what there is to say of a checkpoint or a package, without running it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import printable
from edge_qkv.package import MANIFEST, Package
from edge_qkv.tables import size, table
from edge_qkv.targets import named

SUMMARY = "Show config, sizes and cache table of a checkpoint or package."
_PARITY_NUMBERS = (
    "max_logit_error",
    "mean_logit_error",
    "top1_agreement",
    "perplexity_export",
    "perplexity_checkpoint",
    "perplexity_change",
    "tokens",
)
# What only some targets or weight types have: name in the manifest -> what `describe` calls it.
_OWN_FACTS = {
    "block_size": "block size",
    "prefill_chunk": "tokens of a call",
    "cache_rows": "cache rows",
    "neural_engine_misfits": "Neural Engine",
    "architecture": "llama.cpp's graph",
}
CONTEXTS = (1024, 4096, 8192, 16384, 32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="package, checkpoint, or random:PRESET such as random:1.2B/Q-MQA")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    facts = inspect(arguments.path)
    print(json.dumps(facts, indent=2) if arguments.json else describe(arguments.path, facts))


def inspect(path: str) -> dict[str, Any]:
    """Facts of a package directory, a checkpoint, or `random:PRESET`; raises `InputError`."""
    if (Path(path) / MANIFEST).exists():
        package = Package.open(path, verify=False)
        manifest = package.manifest
        facts = {
            "kind": "package",
            "target": manifest.get("target"),
            "weights": manifest.get("weights"),
            "cache": manifest.get("cache"),
            "weight_bytes": package.weight_bytes,
            "tokenizer": package.tokenizer_file is not None,
            "parity": manifest.get("parity"),
        }
        facts |= {name: value for name in _OWN_FACTS if (value := manifest.get(name)) is not None}
        config = package.config
        known = named(package.target)
        kept, caches = known.cached(config), known.caches
    else:
        from edge_qkv.checkpoints import read_checkpoint

        checkpoint = read_checkpoint(path)
        config = checkpoint.config
        kept, caches = config, tuple(CACHE_BYTES)
        facts = {"kind": "checkpoint", "format": checkpoint.format, "tokenizer": checkpoint.tokenizer is not None}
    return facts | {
        "variant": config.variant,
        "parameters": config.parameters(),
        "config": config.to_dict(),
        "cache_bytes_per_token": {cache: kept.cache_bytes_per_token(cache) for cache in caches},
        "cache_bytes": cache_table(config, kept, caches),
    }


def cache_table(config: ModelConfig, kept: ModelConfig, caches: Iterable[str]) -> list[dict[str, int]]:
    """Cache bytes at each context of the model as it is kept, beside `config` with a key and a value a head."""
    full = config.multi_head
    return [
        {"context": n} | {c: kept.cache_bytes(n, c) for c in caches} | {"qkv": full.cache_bytes(n)} for n in CONTEXTS
    ]


def describe(path: str, facts: dict[str, Any]) -> str:
    """The same facts as text."""
    kind = facts["kind"]
    what = f"{facts['target']} package" if kind == "package" else f"{facts['format']} checkpoint"
    rows = [("variant", facts["variant"]), ("parameters", f"{facts['parameters']:,}")]
    if kind == "package":
        rows += [
            ("weights", f"{facts['weights']}, {size(facts['weight_bytes'])}"),
            ("cache type", facts["cache"]),
            *((what, _listed(facts[name])) for name, what in _OWN_FACTS.items() if name in facts),
        ]
        if facts["parity"]:
            rows.append(("parity", parity_line(facts["parity"])))
    rows.append(
        ("tokenizer", "yes" if facts["tokenizer"] else "none: token ids only; export with --tokenizer to add one")
    )
    rows += _config_rows(facts["config"])
    lines = [f"{path}: {what}", *(f"{name:<18} {value}" for name, value in rows)]
    lines = [*map(printable, lines), ""]
    caches = [
        (
            f"{row['context']:,} tokens",
            *(f"{row[c]:,} ({size(row[c])})" for c in facts["cache_bytes_per_token"]),
            f"{row['qkv'] / row['fp16']:.0f}x",
        )
        for row in facts["cache_bytes"]
    ]
    lines.append(table(caches, ("cache bytes", *facts["cache_bytes_per_token"], "QKV/this, fp16")))
    return "\n".join(lines)


def _config_rows(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config, those of its kinds of layers below their names."""
    for name, value in config.items():
        if name != "kinds":
            yield f"  {name}", value
    for name, spec in config["kinds"].items():
        yield f"  layers {name}", ""
        yield from ((f"    {field}", _written(value)) for field, value in spec.items())


def _written(value: Any) -> Any:
    """A list of numbers may have hundreds of them."""
    if not isinstance(value, list):
        return value
    text = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(value)} numbers)"


def _listed(fact: Any) -> Any:
    return "; ".join(map(str, fact)) or "all sizes suit it" if isinstance(fact, list) else fact


def _is_figure(value: Any) -> bool:
    """Whether it can be written as a float: JSON has whole numbers beyond those."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def parity_line(parity: dict[str, Any]) -> str:
    """One line of a parity report: how far the export is from the checkpoint."""
    if any(not _is_figure(parity.get(name)) for name in _PARITY_NUMBERS):
        return "incomplete; export again to measure it"
    return (
        f"logit error max {parity['max_logit_error']:.2g}, mean {parity['mean_logit_error']:.2g}; "
        f"top-1 agreement {parity['top1_agreement']:.1%}; perplexity {parity['perplexity_export']:.3f} "
        f"against {parity['perplexity_checkpoint']:.3f} ({parity['perplexity_change']:+.2%}) "
        f"over {parity['tokens']:,} tokens ({parity.get('input')})"
    )
