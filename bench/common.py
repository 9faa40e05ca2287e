"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from edge_qkv.errors import Cancelled, EdgeQKVError


def command_line(name: str, summary: str, repeats: int, repeated: str, examples: str = "") -> argparse.ArgumentParser:
    """The parser of edge_qkv.bench.NAME with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m edge_qkv.bench.{name}",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--threads", type=int, default=0, help="0: one for each core; default: %(default)s")
    add("--repeats", type=int, default=repeats, help=f"{repeated}; default: %(default)s")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Runs a benchmark; returns 0, 2 after an error a user can act on, 130 after Ctrl-C or a request to end."""
    name = parser.prog.split()[-1]
    arguments = parser.parse_args(argv)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
        action(arguments)
    except (KeyboardInterrupt, Cancelled):
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130
    except EdgeQKVError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
    except OSError as error:
        print(f"{name}: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
