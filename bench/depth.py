"""Decode speed and memory of a package at given depths of context.

    python -m edge_qkv.bench.depth PACKAGE --depths 0 4096 32767

The cache is filled directly, so that a depth of 32k takes seconds and not the prefill it stands for. Times are
medians; memory is the kernel's own accounting of this process, Python included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median

from edge_qkv import Model, Session
from edge_qkv.bench.common import command_line, run
from edge_qkv.tables import size, table

DEPTHS = 0, 1024, 8192, 32767


def measure(session: Session, depths: Sequence[int], repeats: int) -> list[dict]:
    """One row a depth, in the order of depth: decode milliseconds (median, fastest) and memory in bytes."""
    rows = []
    for depth in sorted(depths):
        session.fill(depth)
        session.evaluate([0])  # warm: pages of the weights, threads
        seconds = []
        for _ in range(repeats):
            session.rewind(depth)
            began = time.perf_counter()
            session.evaluate([0])
            seconds.append(time.perf_counter() - began)
        memory = session.memory()
        session.rewind(depth)
        rows.append({"depth": depth, "median_ms": median(seconds) * 1e3, "fastest_ms": min(seconds) * 1e3} | memory)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    summary = "Decode speed and memory of a package at given depths of context."
    parser = command_line("depth", summary, 5, "measurements a depth")
    parser.add_argument("package", help="directory written by edge-qkv export")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        help="tokens in the cache; default: 0 1024 8192 32767, as far as the model goes",
    )
    return run(parser, _report, argv)


def _report(arguments: argparse.Namespace) -> None:
    with Model(arguments.package, arguments.threads) as model:
        depths = arguments.depths or sorted({min(depth, model.info.context - 1) for depth in DEPTHS})
        with Session(model, context=max(depths) + 1) as session:
            loaded = session.memory()
            rows = measure(session, depths, max(1, arguments.repeats))
    if arguments.json:
        print(json.dumps({"loaded": loaded, "depths": rows}, indent=2))
        return
    header = ("depth", "decode", "tokens/s", "cache used", "resident", "anonymous", "peak")
    cells = [
        (
            f"{row['depth']:,}",
            f"{row['median_ms']:.1f} ms",
            f"{1e3 / row['median_ms']:.1f}",
            f"{row['cache_used']:,} B",
            *(size(row[name]) for name in ("resident", "anonymous", "peak_resident")),
        )
        for row in rows
    ]
    print(table(cells, header))
    print(f"loaded, before the first token: resident {size(loaded['resident'])}, anonymous {size(loaded['anonymous'])}")


if __name__ == "__main__":
    sys.exit(main())
