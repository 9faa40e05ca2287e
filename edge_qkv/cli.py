"""The command line: `edge-qkv export | run | pack | inspect | plan | bench | train | demo`."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
from collections.abc import Sequence

from edge_qkv import __version__
from edge_qkv.commands import bench, demo, export, inspect, pack, plan, run, train
from edge_qkv.errors import Cancelled, EdgeQKVError, printable

COMMANDS = {
    "export": export,
    "run": run,
    "pack": pack,
    "inspect": inspect,
    "plan": plan,
    "bench": bench,
    "train": train,
    "demo": demo,
}
_EXAMPLES = """\
examples:
  edge-qkv export checkpoint.pt --output model --tokenizer tokenizer.json
  edge-qkv run model --prompt "Once upon a time"
  edge-qkv inspect random:1.2B/Q-MQA
  edge-qkv plan model --memory 512MB
  edge-qkv bench model --output results
  edge-qkv train --data corpus.txt --output checkpoint --variant Q-MQA
  edge-qkv demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 2 after an error a user can act on, 130 after Ctrl-C or a request to end."""
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
        for stream in (sys.stdout, sys.stderr):  # not a caller's own, which may be of any kind
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # what the terminal cannot show
        argv = list(sys.argv[1:] if argv is None else argv)
        if argv[:1] == ["bench"]:  # argparse would take the options of its commands for its own
            return bench.run(argparse.Namespace(arguments=argv[1:]))
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments) or 0
    except (KeyboardInterrupt, Cancelled):
        print("\nedge-qkv: stopped", file=sys.stderr)
        return 130
    except EdgeQKVError as error:
        print(f"edge-qkv: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a path that is too long
        print(f"edge-qkv: {printable(str(error.filename or 'the output'))}: {error.strerror}", file=sys.stderr)
        return 2


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-qkv",
        description="Language models with a unified KV cache: export a checkpoint, run it in little memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"edge-qkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY, formatter_class=_Help)
        added.set_defaults(run=command.run)
        command.add_arguments(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
