"""`edge-qkv demo`: bundled checkpoint -> packages for each engine -> text, and what it costs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_qkv.commands import need
from edge_qkv.errors import EdgeQKVError, InputError
from edge_qkv.planning import plan
from edge_qkv.tables import size, table

SUMMARY = "Export the bundled model for each engine, write text, and show the memory table."
CHECKPOINT = Path(__file__).parents[1] / "bundled"
CONTEXT = 32768
PACKAGES = (("onnx", "int4"), ("onnx", "int8"), ("executorch", "8da4w"))  # target and weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, default=Path("demo"), help="directory for the packages")
    add("--prompt", default="KING HENRY.\n", help="text to go on from")
    add("--max-tokens", type=int, default=128, help="tokens to write")
    add("--threads", type=int, default=0, help="0: one for each core")


def run(arguments: argparse.Namespace) -> None:
    """Exports the bundled model in each way below --output, writes text with each and prints the table.

    Each package runs in a process of its own, as it would on a device, so that its peak memory is its own
    and not the exporter's. ExecuTorch is left out where it is not installed.
    """
    need("torch", "export")
    from edge_qkv.export import export_package

    max_tokens, threads = arguments.max_tokens, arguments.threads
    columns = {}
    for target, weights in PACKAGES:
        package = arguments.output / f"shakespeare-{target}-{weights}"
        print(f"== export the bundled checkpoint to {target}, {weights} weights", flush=True)
        try:
            manifest = export_package(target, str(CHECKPOINT), package, weights=weights)
        except InputError as error:
            if target != "executorch":
                raise
            print(f"left out: {error}\n", flush=True)
            continue
        print(f"== {max_tokens} tokens from {package}\n", flush=True)
        needed = plan(package, context=CONTEXT, threads=threads).total
        columns[f"{target} {weights}"] = _column(_run(package, arguments.prompt, max_tokens, threads), manifest, needed)
        print()
    names = next(iter(columns.values()))
    print(table([(name, *(column[name] for column in columns.values())) for name in names], ("", *columns)))


def _column(figures: dict, manifest: dict, needed: int) -> dict[str, str]:
    memory, parity = figures["memory"], manifest["parity"]
    prompt = figures["timing"]["prefill_tokens"]
    cached = memory["cache_used"] // manifest["cache_bytes_per_token"]
    return {
        "model files": size(figures["weight_bytes"]),
        "cache used": f"{memory['cache_used']:,} B ({cached} tokens)",
        f"cache reserved for {CONTEXT:,} tokens": f"{memory['cache_reserved']:,} B",
        f"least budget for {CONTEXT:,} tokens": size(needed),
        "peak memory, Python included": size(memory["peak_resident"]),
        "of it anonymous": size(memory["anonymous"]),
        "prefill": f"{figures['prefill_tokens_per_second']:,.0f} tokens/s ({prompt} tokens)",
        "decode": f"{figures['decode_tokens_per_second']:,.0f} tokens/s",
        "perplexity on held-out text": f"{parity['perplexity_export']:.2f}",
        "perplexity of the checkpoint": f"{parity['perplexity_checkpoint']:.2f}",
    }


def _run(package: Path, prompt: str, max_tokens: int, threads: int) -> dict:
    """Runs the command a user would run, text to the terminal; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        options = {
            "--prompt": prompt,
            "--max-tokens": max_tokens,
            "--context": CONTEXT,
            "--threads": threads,
            "--seed": 7,
            "--stats": stats,
        }
        arguments = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", "edge_qkv", "run", str(package), "--quiet", *arguments]
        if code := subprocess.run(command).returncode:
            raise EdgeQKVError(f"running {package} failed with exit code {code}")
        return json.loads(stats.read_text())
