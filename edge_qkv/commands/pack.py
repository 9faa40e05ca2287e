"""`edge-qkv pack`: weights prepared for this processor."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge_qkv.commands import terminal
from edge_qkv.targets import named

SUMMARY = "Prepare a package's weights for this processor: they load faster and take less anonymous memory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("package", help="directory written by edge-qkv export")
    add("--output", type=Path, help="directory; default: edge-qkv below the user's cache directory")
    add("--threads", type=int, default=0, help="0: one for each core")


def run(arguments: argparse.Namespace) -> None:
    from edge_qkv.package import Package
    from edge_qkv.packing import is_packed, pack
    from edge_qkv.tables import size

    package = Package.open(arguments.package, verify=False)
    before = is_packed(package, arguments.output)
    if not before and named(package.target).native:  # those are refused
        print(f"packing {arguments.package}: once for this processor", file=sys.stderr)
    folder = pack(arguments.package, arguments.output, arguments.threads, progress=terminal.hashing())
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {'was packed already' if before else 'packed'}; all packed weights there: {size(on_disk)} on disk"
    )
