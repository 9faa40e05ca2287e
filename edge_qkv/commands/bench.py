"""`edge-qkv bench`: the benchmarks, which have commands and options of their own."""

from __future__ import annotations

import argparse

SUMMARY = "Measure a package on this machine; edge-qkv bench --help says what else it does."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of a benchmark")


def run(arguments: argparse.Namespace) -> int:
    from edge_qkv.bench.__main__ import main

    return main(arguments.arguments)
