"""What rounding weights costs: perplexity of the bundled model in each form that `edge-qkv bench peers` times.

Speeds are those of random weights, which have no perplexity. The bundled model's is of its held-out text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_qkv import InputError, Package
from edge_qkv.bench.common import say
from edge_qkv.commands.demo import CHECKPOINT
from edge_qkv.targets import stored_as


def perplexity_change(target: str, weights: str, directory: Path) -> float:
    """The part by which perplexity rises, 0.01 being 1 %; packages of the bundled model stay in `directory`.

    Of a GGUF form, which the bundled model's positions do not fit into, the weights are rounded as in the file and the
    rest is computed in float32. Raises `InputError` where an export needs what is not installed.
    """
    weights, *_ = stored_as(target, weights)
    return (_of_file_form if target == "gguf" else _of_package)(target, weights, directory)


def _of_package(target: str, weights: str, directory: Path) -> float:
    from edge_qkv.export import export_package

    path = directory / f"bundled-{target}-{weights}"
    try:
        report = Package.open(path).manifest["parity"]
    except InputError:
        say(f"exporting the bundled model to {path}")
        directory.mkdir(parents=True, exist_ok=True)
        report = export_package(target, str(CHECKPOINT), path, weights=weights)["parity"]
    return report["perplexity_change"]


def _of_file_form(target: str, weights: str, directory: Path) -> float:
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    from edge_qkv.checkpoints import read_checkpoint
    from edge_qkv.export import parity
    from edge_qkv.export.gguf import exporter as gguf
    from edge_qkv.recipe import HELD_TEXT
    from edge_qkv.tokenizer import encode, load_tokenizer, stop_tokens

    say(f"perplexity of the bundled model rounded as in a GGUF file of {weights}")
    checkpoint = read_checkpoint(str(CHECKPOINT))
    encoder = load_tokenizer(checkpoint.tokenizer, checkpoint.config.vocab_size)
    stops = frozenset(stop_tokens(encoder))
    tokens = encode(encoder, (CHECKPOINT / HELD_TEXT).read_text(), stops, start=True)

    def rounded(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 32)))  # a file would keep such a matrix in float32
        return dequantize(quantize(padded, kind), kind)[:, : values.shape[1]]

    changed = checkpoint.load()
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if parameter.ndim == 2:
                kind = gguf.TYPES[weights]["matrix" if name.startswith("layers.") else "head"]
                parameter.copy_(torch.from_numpy(rounded(parameter.numpy(), kind)))
    report = parity.check(checkpoint.load(), lambda ids: parity.score_eagerly(changed, ids), "PyTorch", tokens)
    return report["perplexity_change"]
