"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_qkv.errors import Cancelled, EdgeQKVError, InputError

PROGRAM = "edge-qkv bench"


def command_line(name: str, summary: str, examples: str = "") -> argparse.ArgumentParser:
    """The parser of `edge-qkv bench NAME`, with the option that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}".rstrip(),
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_measuring(parser: argparse.ArgumentParser, repeats: int, repeated: str) -> None:
    """The options of whatever measures."""
    add = parser.add_argument
    add("--threads", type=int, default=0, help="0: one for each core; default: %(default)s")
    add("--repeats", type=int, default=repeats, help=f"{repeated}; default: %(default)s")


def add_output(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"also write {files} there, and plots")


def prepare_output(output: Path | None) -> None:
    """Makes the directory of --output, before anything is measured."""
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be made a directory ({error.strerror})") from None


def say(text: str) -> None:
    """Progress and notes: what is printed on standard output are the figures."""
    print(text, file=sys.stderr, flush=True)


def run(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Runs a benchmark; returns 0, 2 after an error a user can act on, 130 after Ctrl-C or a request to end."""
    arguments = parser.parse_args(argv)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
        action(arguments)
    except (KeyboardInterrupt, Cancelled):
        say(f"\n{parser.prog}: stopped")
        return 130
    except EdgeQKVError as error:
        say(f"{parser.prog}: {error}")
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
    except OSError as error:
        say(f"{parser.prog}: {error.filename or 'the output'}: {error.strerror}")
        return 2
    return 0
