"""Exporters, one file a target. Each takes the same arguments and writes a whole package."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from edge_qkv import files
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress, silent
from edge_qkv.recipe import HELD_TEXT


class Exporter(Protocol):
    def __call__(
        self,
        checkpoint: str,
        output: Path,
        *,
        weights: str = "int4",
        cache: str = "fp16",
        block_size: int | None = None,
        window: int = 0,
        sinks: int = 0,
        tokenizer: Path | None = None,
        held_text: Path | None = None,
        parity: bool = True,
        progress: Progress = silent,
    ) -> dict[str, Any]:
        """Exports the checkpoint at `checkpoint` to the directory `output` and returns the manifest.

        window, sinks: a query then sees the last `window` tokens and the first `sinks`; 0: as the checkpoint says.
        held_text: UTF-8 file on which the parity report compares the two; default: the held-out.txt beside the
        checkpoint, else random tokens. Raises `InputError`.
        """


def _onnx(
    checkpoint: str,
    output: Path,
    *,
    window: int = 0,
    sinks: int = 0,
    held_text: Path | None = None,
    parity: bool = True,
    **options,
):
    from edge_qkv.export.onnx import export_onnx

    source = _windowed(read_checkpoint(checkpoint), window, sinks)
    if held_text is not None and not (options.get("tokenizer") or source.tokenizer):
        raise InputError(f"--parity-text {held_text}: text needs a tokenizer; give --tokenizer as well")
    return export_onnx(source, output, text=_held_text(held_text, source), run_parity=parity, **options)


# Target name -> its exporter; the heavy libraries are imported when one is called.
TARGETS: dict[str, Exporter] = {"onnx": _onnx}


def _windowed(checkpoint: Checkpoint, window: int, sinks: int) -> Checkpoint:
    """The checkpoint with the window and sinks that are not 0."""
    given = {name: value for name, value in (("window", window), ("sinks", sinks)) if value}
    try:
        return dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **given))
    except InputError as error:
        options = " ".join(f"--{name} {value}" for name, value in given.items())
        raise InputError(f"{options}: {error}") from None


def _held_text(path: Path | None, checkpoint: Checkpoint) -> str | None:
    if path is None:
        folder = checkpoint.path if checkpoint.path is None or checkpoint.path.is_dir() else checkpoint.path.parent
        if folder is None or not (folder / HELD_TEXT).is_file():
            return None
        path = folder / HELD_TEXT
    text = files.read_text(path, "--parity-text")
    if len(text.split()) < 2:
        raise InputError(f"--parity-text {path}: holds less than two words; give some text to compare on")
    return text
