"""Exports a checkpoint to ExecuTorch: a package whose program runs on XNNPACK with our attention operator."""

from __future__ import annotations

import hashlib
import mmap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_qkv import _native
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.description import DESCRIPTION, FINGERPRINT, OPERATOR, describe
from edge_qkv.errors import InputError
from edge_qkv.export.executorch import program
from edge_qkv.export.executorch import weights as executorch_weights
from edge_qkv.export.packaging import ModelFile, Runner, check_space, open_session, write_package
from edge_qkv.export.progress import Progress, silent
from edge_qkv.targets import named, stored_as

MODEL = named("executorch").model_file
MOST_TOKENS_AT_ONCE = 4096  # buffers are planned for as many
_UNKNOWN = "0" * 64  # stands for the fingerprint until the rest of the file is known


def export_executorch(
    checkpoint: Checkpoint,
    output: Path,
    *,
    weights: str = "8da4w",
    cache: str = "fp16",
    block_size: int | None = None,
    prefill_chunk: int | None = None,
    tokenizer: Path | None = None,
    progress: Progress = silent,
    text: str | None = None,
    run_parity: bool = True,
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Writes the package `output` and returns its manifest (`edge_qkv.json`).

    weights: 'fp32', '8da8w' (int8) or '8da4w' (int4; the head then has 8 bits, the embedding has 4 in both);
    block_size: weights that share a scale, with 8da4w: 32, 64 or 128. cache: 'fp32', 'fp16' or 'int8'. prefill_chunk:
    tokens that a call takes at most. The cache has room for all positions of the checkpoint's config. The rest is as
    in `edge_qkv.export.onnx.exporter.export_onnx`.

    The quantised weights are in memory at a byte each, float ones whole. Raises `InputError`; then no file is left
    and an earlier package at `output` is untouched.
    """
    if run_parity and runner is None and _native.executorch_path() is None:  # before minutes of work, not after
        raise InputError(
            "--target executorch: the parity report needs the ExecuTorch engine, which edge-qkv was built without; "
            "install edge-qkv once more from its sources, now that executorch is there (pip install --force-reinstall "
            "--no-deps .), or leave the report out (--no-parity)"
        )
    weights, how, block = stored_as("executorch", weights, block_size)
    config = checkpoint.config
    if config.max_positions < 2:
        raise InputError(f"--capacity {config.max_positions}: a program has room for at least 2 tokens; give more")
    most = min(MOST_TOKENS_AT_ONCE, config.max_positions)
    chunk = min(named("executorch").prefill_chunk, most) if prefill_chunk is None else prefill_chunk
    if not 2 <= chunk <= most:
        raise InputError(f"--prefill-chunk {chunk} is out of range; choose from 2 to {most:,} tokens")

    def write_model(directory: Path) -> None:
        decoder = executorch_weights.load(checkpoint, program.attend, how, progress)
        matrix_bytes, table_bytes = executorch_weights.stored_bytes(decoder, how)
        check_space(directory, matrix_bytes + table_bytes)
        facts = {
            "weight_bits": how.layers.bits,
            "block_size": block,
            "matrix_bytes": matrix_bytes,
            "table_bytes": table_bytes,
            "prefill_chunk": chunk,
            "cache_rows": program.cache_rows(config, cache),
            "operator": OPERATOR,
            "executorch": version("executorch"),
        }
        texts = {DESCRIPTION: describe(config, cache, facts), FINGERPRINT: _UNKNOWN}
        progress("Lowering to XNNPACK (minutes for a model of a billion parameters)", 0, 0)
        lowered = program.lower(decoder, cache, chunk, texts)
        progress("Writing the program", 0, 0)
        with (directory / MODEL).open("wb") as file:
            lowered.write_to_file(file)
        _sign(directory / MODEL)

    return write_package(
        checkpoint,
        output,
        ModelFile("executorch", weights, cache, block or None, {"prefill_chunk": chunk}),
        write_model,
        tokenizer=tokenizer,
        text=text,
        runner=(runner or open_session) if run_parity else None,
        progress=progress,
    )


def _sign(path: Path) -> None:
    """Puts the SHA-256 of the file, taken with zeros in its place, into the fingerprint."""
    unknown = _UNKNOWN.encode() + b"\0"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        at = content.find(unknown)
        if at < 0 or content.find(unknown, at + 1) >= 0:
            raise RuntimeError("the program has not one place for its fingerprint")
        content[at : at + len(_UNKNOWN)] = hashlib.sha256(content).hexdigest().encode()
