"""`edge-qkv demo`: bundled checkpoint -> int4 and int8 packages -> text, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_qkv.errors import EdgeQKVError
from edge_qkv.tables import size, table

CHECKPOINT = Path(__file__).parent / "bundled"
CONTEXT = 32768


def demo(output: Path, prompt: str, max_tokens: int, threads: int) -> None:
    """Exports the bundled model both ways below `output`, writes text with each and prints the table.

    Each package runs in a process of its own, as it would on a device, so that its peak memory is its own
    and not the exporter's.
    """
    from edge_qkv.export import TARGETS

    rows = []
    for weights in ("int4", "int8"):
        package = output / f"shakespeare-{weights}"
        print(f"== export {CHECKPOINT.name} checkpoint to {weights} ONNX", flush=True)
        manifest = TARGETS["onnx"](str(CHECKPOINT), package, weights=weights)
        print(f"== {max_tokens} tokens from {package}\n", flush=True)
        figures = _run(package, prompt, max_tokens, threads)
        memory, parity = figures["memory"], manifest["parity"]
        rows.append(
            (
                weights,
                size(figures["weight_bytes"]),
                f"{memory['cache_used']:,}",
                f"{memory['cache_reserved']:,}",
                size(memory["peak_resident"]),
                size(memory["anonymous"]),
                figures["prefill_tokens_per_second"],
                figures["decode_tokens_per_second"],
                f"{parity['perplexity_export']:.2f} / {parity['perplexity_checkpoint']:.2f}",
            )
        )
        print()
    header = (
        "weights",
        "model files",
        "cache bytes used",
        f"reserved for {CONTEXT:,}",
        "peak memory",
        "anonymous",
        "prefill tok/s",
        "decode tok/s",
        "perplexity / checkpoint",
    )
    print(table(rows, header))


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
