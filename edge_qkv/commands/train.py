"""`edge-qkv train`: a small model from a text file."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from edge_qkv.commands import need
from edge_qkv.config import POSITIONS
from edge_qkv.layer import QUERY
from edge_qkv.recipe import Recipe

SUMMARY = "Train a small model on a text file; stop it and it goes on where it was."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, help="UTF-8 text; <|endoftext|> separates documents")
    add("--output", type=Path, required=True, help="checkpoint directory; an interrupted run goes on")
    add("--variant", default="Q-MQA", help="QKV, Q=K-V, Q-K=V, Q=K=V, GQA-N, MQA, Q-GQA-N or Q-MQA")
    add("--query", default="projected", choices=tuple(QUERY), help="how the query is formed")
    add("--positions", default="rotary-conjugate", choices=POSITIONS, help="position encoding")
    for name, default, what in (("layers", 8, "layers"), ("width", 256, "width"), ("heads", 8, "query heads")):
        add(f"--{name}", type=int, default=default, help=what)
    add("--mlp-width", type=int, default=688, help="inner width of the MLP")
    add("--vocab-size", type=int, default=4096, help="tokens of the byte-level BPE")
    add("--weights", default="fp16", choices=("fp16", "fp32"), help="type the weights are stored in")
    for f in fields(Recipe):
        add(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=f.metadata["help"])


def run(arguments: argparse.Namespace) -> None:
    need("torch", "export")
    from edge_qkv.training import train

    recipe = Recipe(**{f.name: getattr(arguments, f.name) for f in fields(Recipe)})
    options = {n: getattr(arguments, n) for n in ("variant", "query", "positions")}
    options |= {n: getattr(arguments, n) for n in ("layers", "width", "heads", "mlp_width")}
    report = train(arguments.data, arguments.output, recipe, options, arguments.vocab_size, arguments.weights)
    print(
        f"{arguments.output}: {report['variant']}, {report['parameters']:,} parameters, held-out perplexity "
        f"{report['held_out_perplexity']:.2f}, {report['held_out_bits_per_byte']:.3f} bits a byte"
    )
