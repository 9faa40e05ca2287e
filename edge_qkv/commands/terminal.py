"""What a command shows of its progress: a line on a terminal, nothing in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable

_ERASED = "\r\033[K"


def counter(what: str, unit: Callable[[int], str], least: int) -> Callable[[int, int], None] | None:
    """progress(done, total) that keeps a line such as "prefill, tokens: 1,024 of 9,000" on standard error until all is
    done; None where that is no terminal. unit: how a count is written; least: a total below that is not worth it."""
    if not sys.stderr.isatty():
        return None

    def progress(done: int, total: int) -> None:
        if total >= least:
            line = f"{_ERASED}{what} {unit(done)} of {unit(total)}" if done < total else _ERASED
            print(line, end="", file=sys.stderr, flush=True)

    return progress


def hashing() -> Callable[[int, int], None] | None:
    """The progress of `Package.verify`."""
    from edge_qkv.tables import size

    return counter("checking the files,", size, 64 << 20)
