"""`edge-qkv export`: checkpoint -> model package."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge_qkv.commands import need
from edge_qkv.config import CACHE_BYTES
from edge_qkv.targets import BLOCK_SIZES, TARGETS, WEIGHTS

SUMMARY = "Export a checkpoint to a model package and compare the two."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="checkpoint file or directory, or random:PRESET for random weights")
    add("--target", default="onnx", choices=tuple(TARGETS), help="engine that is to run the package")
    add(
        "--weights",
        default="int4",
        choices=WEIGHTS,
        help="weight type: " + "; ".join(f"{', '.join(_weights_of(target))} for {target}" for target in TARGETS),
    )
    add("--cache", default="fp16", choices=tuple(CACHE_BYTES), help="cache type; fixed at export")
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        help=f"weights that share a scale; default: {_default_blocks()}",
    )
    add(
        "--window",
        type=int,
        default=0,
        metavar="W",
        help="a token sees the last W tokens, in the layers that see the most; 0: as the checkpoint says",
    )
    add("--sinks", type=int, default=0, metavar="S", help="and the first S tokens; 0: as the checkpoint says")
    add("--capacity", type=int, metavar="TOKENS", help="longest context of the package; default: all the model allows")
    add(
        "--prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="most tokens of one call, where files fix it; default: "
        + ", ".join(f"{known.prefill_chunk} for {name}" for name, known in TARGETS.items() if known.prefill_chunk),
    )
    add("--output", type=Path, required=True, help="package directory to write; replaced as a whole")
    add("--tokenizer", type=Path, help="tokenizer.json; default: the one beside the checkpoint")
    add("--parity-text", type=Path, help="held-out text to compare on; default: the checkpoint's own, or random tokens")
    add("--no-parity", action="store_true", help="skip the comparison with the checkpoint")
    add("--json", action="store_true", help="print the manifest as JSON")


def run(arguments: argparse.Namespace) -> None:
    need("torch", "export")
    from edge_qkv.commands.inspect import describe, inspect
    from edge_qkv.export import export_package
    from edge_qkv.export.progress import Bar

    bar = Bar()
    try:
        manifest = export_package(
            arguments.target,
            arguments.checkpoint,
            arguments.output,
            weights=arguments.weights,
            cache=arguments.cache,
            block_size=arguments.block_size,
            window=arguments.window,
            sinks=arguments.sinks,
            capacity=arguments.capacity,
            prefill_chunk=arguments.prefill_chunk,
            tokenizer=arguments.tokenizer,
            held_text=arguments.parity_text,
            parity=not arguments.no_parity,
            progress=bar,
        )
    finally:
        bar.close()
    if arguments.json:
        print(json.dumps(manifest, indent=2))
        return
    print(describe(str(arguments.output), inspect(str(arguments.output))))
    prompt = "--prompt TEXT" if "tokenizer.json" in manifest["files"] else "--tokens 1,2,3"
    runs_on = TARGETS[arguments.target].runs_on
    where = f" {runs_on}" if runs_on else ""
    print(f"\nrun it{where}: edge-qkv run {arguments.output} {prompt}")


def _weights_of(target: str) -> list[str]:
    """The weight types of a target, with the names that they have in others."""
    return [f"{name} ({how.also})" if how.also else name for name, how in TARGETS[target].weights.items()]


def _default_blocks() -> str:
    blocks = [
        f"{how.default_block} in {target} {name}"
        for target, known in TARGETS.items()
        for name, how in known.weights.items()
        if how.default_block
    ]
    return ", ".join(blocks)
