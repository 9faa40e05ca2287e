"""What a snapshot saves: restoring a conversation beside the prefill that it replaces.

    edge-qkv bench restore PACKAGE --tokens 32767

The prefill is measured at several depths, a chunk each, and summed up over the conversation; --whole runs all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edge_qkv import EdgeQKVError, Model, Session
from edge_qkv.bench.common import add_measuring, command_line, run
from edge_qkv.bench.figures import figure, seconds, written
from edge_qkv.tables import size, table

DEPTHS = 8
TOKENS = 32767


def measure(model: Model, tokens: int, folder: Path, repeats: int, whole: bool) -> dict[str, Any]:
    """Seconds to prefill and figures of saving and restoring a conversation of `tokens`, and bytes of its snapshot."""
    path = folder / "snapshot"
    context = min(tokens + 1, model.info.context)
    with Session(model, context=context) as session:
        prefill = _whole_prefill(session, tokens) if whole else _sampled_prefill(session, tokens)
        session.rewind(0)
        session.fill(tokens - 1)
        session.evaluate([0])
        saves = [1e3 * seconds(lambda: session.save(path)) for _ in range(repeats)]
        logits = session.logits()
    restores = []
    for _ in range(repeats):
        with Session(model, context=context) as session:
            restores.append(1e3 * seconds(lambda session=session: session.restore(path)))
            if session.logits().tobytes() != logits.tobytes():
                raise EdgeQKVError("the restored logits differ from those that were saved")
    return {
        "tokens": tokens,
        "snapshot_bytes": path.stat().st_size,
        "prefill_seconds": prefill,
        "prefill_measured": "whole" if whole else f"chunks at {DEPTHS} depths",
        "save_ms": figure(saves),
        "restore_ms": figure(restores),
        "prefill_over_restore": prefill * 1e3 / median(restores),
    }


def _whole_prefill(session: Session, tokens: int) -> float:
    return seconds(lambda: session.evaluate([i % 100 for i in range(tokens)], _progress))


def _sampled_prefill(session: Session, tokens: int) -> float:
    chunk = min(session.prefill_chunk, tokens)
    times = []
    for step in range(DEPTHS):
        depth = (tokens - chunk) * step // (DEPTHS - 1)
        session.rewind(0)
        session.fill(depth)
        times.append(seconds(lambda: session.evaluate([0] * chunk)))
    # Trapezoids between the depths: what a token costs grows evenly with depth.
    mean = (sum(times) - (times[0] + times[-1]) / 2) / (DEPTHS - 1)
    return mean * tokens / chunk


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rprefill {done:,} of {total:,} tokens", end="\r", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    summary = "Restoring a conversation beside the prefill that it replaces."
    parser = command_line("restore", summary)
    add_measuring(parser, 5, "measurements of saving and restoring")
    parser.add_argument("package", help="directory written by edge-qkv export")
    parser.add_argument(
        "--tokens", type=int, help=f"length of the conversation; default: {TOKENS:,}, or what the model allows"
    )
    parser.add_argument("--whole", action="store_true", help="run the whole prefill: minutes for a large model")
    return run(parser, _report, argv)


def _report(arguments: argparse.Namespace) -> None:
    with Model(arguments.package, arguments.threads) as model, tempfile.TemporaryDirectory() as folder:
        limit = model.info.context
        tokens = min(TOKENS, limit - 1) if arguments.tokens is None else arguments.tokens
        if not 1 <= tokens <= limit:
            raise EdgeQKVError(f"--tokens must be from 1 to {limit}, the most this model allows")
        figures = measure(model, tokens, Path(folder), max(1, arguments.repeats), arguments.whole)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    print(table(rows(figures), (f"{figures['tokens']:,} tokens", "time", "")))


def rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured, as rows of a table."""
    save, restore = (written(figures[name]) for name in ("save_ms", "restore_ms"))
    return [
        ("prefill", f"{figures['prefill_seconds']:.2f} s", figures["prefill_measured"]),
        ("save", f"{save} ms", size(figures["snapshot_bytes"])),
        ("restore", f"{restore} ms", f"{figures['prefill_over_restore']:,.0f}x faster"),
    ]


if __name__ == "__main__":
    sys.exit(main())
