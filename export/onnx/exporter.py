"""Exports a checkpoint to ONNX: a package whose graph runs in ONNX Runtime, with the native kernel or without.

The oldest ONNX Runtime that runs the files (tried): 1.20 with fp32 weights, 1.23 with int4 or int8 ones, whose
GatherBlockQuantized reads 8-bit codes only since then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import edge_qkv
from edge_qkv import files
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.description import FINGERPRINT, OPERATOR
from edge_qkv.errors import InputError
from edge_qkv.export import parity
from edge_qkv.export.onnx import graph
from edge_qkv.export.onnx.weights import Conversion, DataFile, Pieces, prepare, stored_bytes
from edge_qkv.export.packaging import ModelFile, Runner, check_space, open_session, write_package
from edge_qkv.export.progress import Progress, silent
from edge_qkv.model import Decoder
from edge_qkv.targets import check_cache, stored_as

MODEL, DATA = "model.onnx", "model.onnx.data"


def export_onnx(
    checkpoint: Checkpoint,
    output: Path,
    *,
    weights: str = "int4",
    cache: str = "fp16",
    block_size: int | None = None,
    tokenizer: Path | None = None,
    progress: Progress = silent,
    text: str | None = None,
    run_parity: bool = True,
    runner: Runner | None = None,
    accuracy_level: int = 4,
) -> dict[str, Any]:
    """Writes the package `output` and returns its manifest (`edge_qkv.json`).

    weights: 'fp32', 'int8' or 'int4' (head and embedding then have 8 bits); block_size: weights that share a
    scale, with int8 and int4; cache: 'fp32', 'fp16' or 'int8'. tokenizer: a `tokenizer.json`, default the checkpoint's.
    text: held-out text on which the parity report compares the package with the checkpoint; without it, or
    without a tokenizer, random token ids. runner: opens the package for that, by default natively where our
    library is installed and else in plain ONNX Runtime. accuracy_level: of MatMulNBits; 4 rounds activations to
    int8, 1 keeps them in float32.

    No more of the weights is in memory at a time than one tensor of the checkpoint and what is made of it,
    except for the parity report, which holds the model in float32. Raises `InputError`; then no file is left
    and an earlier package at `output` is untouched.
    """
    weights, how, block = stored_as("onnx", weights, block_size)
    check_cache("onnx", cache)
    config = checkpoint.config
    decoder, conversion = prepare(config, graph.attend_in(config), how, accuracy_level)
    data = DataFile(graph.named_weights(decoder), conversion)
    matrix_bytes, table_bytes = stored_bytes(decoder)
    facts = {
        "weight_bits": how.layers.bits,
        "block_size": block,
        "matrix_bytes": matrix_bytes,
        "table_bytes": table_bytes,
        "prefill_chunk": 0,
        "cache_rows": 0,
        "operator": OPERATOR,
    }

    def write_model(directory: Path) -> None:
        check_space(directory, data.bytes)
        progress("Tracing the graph", 0, 0)
        model = graph.build(decoder, cache)
        graph.finish(model, config, cache, edge_qkv.__version__, facts)
        _write_data(checkpoint, decoder, conversion, data, directory / DATA, progress)
        graph.fill(model, lambda name: data.tensor(name, directory / DATA))
        model.metadata_props[FINGERPRINT] = _fingerprint(model, directory / DATA)
        (directory / MODEL).write_bytes(_serialized(model))

    return write_package(
        checkpoint,
        output,
        ModelFile("onnx", weights, cache, block or None),
        write_model,
        tokenizer=tokenizer,
        text=text,
        runner=(runner or open_runner) if run_parity else None,
        progress=progress,
    )


@contextmanager
def open_runner(directory: Path, context: int) -> Iterator[tuple[parity.Score, str]]:
    """Opens a package in the native runtime where that is installed, else in plain ONNX Runtime."""
    try:
        from edge_qkv import _native

        _native.library_path()
    except InputError:
        import onnxruntime

        from edge_qkv.export.onnx.stock import StockSession

        session = StockSession(directory, context)

        def score(tokens: Sequence[int]) -> np.ndarray:
            session.rewind(0)
            return session.score(tokens)

        yield score, f"onnxruntime {onnxruntime.__version__}"
    else:
        with open_session(directory, context) as opened:
            yield opened


def _write_data(
    checkpoint: Checkpoint, decoder: Decoder, conversion: Conversion, data: DataFile, path: Path, progress: Progress
) -> None:
    sizes = dict.fromkeys(conversion.convert, 0)

    def source(name: str) -> Callable[[], Pieces]:
        def make() -> Pieces:
            tensor = checkpoint.tensors[name]()
            sizes[name] = tensor.numel() * 4
            try:
                return conversion.convert[name](tensor)
            except InputError as error:
                raise InputError(f"{checkpoint.path or checkpoint.format}: tensor {name}: {error}") from None

        return make

    sources: dict[str, Callable[[], Pieces]] = {name: source(name) for name in conversion.convert}
    if checkpoint.config.rotary:
        sources["rotary tables"] = decoder.rotary_tables
    total, done = checkpoint.config.parameters() * 4, 0

    def report(name: str) -> None:
        nonlocal done
        done += sizes.get(name, 0)
        progress("Writing weights", done, total)

    data.write(path, sources, report)


def _fingerprint(model: ir.Model, data: Path) -> str:
    """SHA-256 over the graph with its small tensors, and over the file with the large ones."""
    return hashlib.sha256(_serialized(model) + files.sha256(data).encode()).hexdigest()


def _serialized(model: ir.Model) -> bytes:
    return ir.serde.serialize_model(model).SerializeToString(deterministic=True)
