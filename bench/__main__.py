"""`edge-qkv bench`: measures a package, or does one of the named benchmarks.

Each is a module here with `main(argv) -> exit code`; a further one is a further line of `COMMANDS`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Name of a benchmark -> its module. Any other first word is the package that `package.command` takes.
COMMANDS = {
    "attention": "edge_qkv.bench.attention.command",
    "compare": "edge_qkv.bench.compare",
    "engines": "edge_qkv.bench.package.engines",
    "peers": "edge_qkv.bench.peers.command",
    "quality": "edge_qkv.bench.quality.command",
    "restore": "edge_qkv.bench.package.snapshots",
    "variants": "edge_qkv.bench.package.variants",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `edge-qkv bench ARGV`; returns 0, 2 after an error a user can act on, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    from edge_qkv.bench.package import command

    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
