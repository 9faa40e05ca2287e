"""Exporters, a directory a target. Each takes the same arguments and writes a whole package."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from edge_qkv import files
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.checks import whole
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress, interruptible, quiet, silent
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
        capacity: int | None = None,
        prefill_chunk: int | None = None,
        tokenizer: Path | None = None,
        held_text: Path | None = None,
        parity: bool = True,
        progress: Progress = silent,
    ) -> dict[str, Any]:
        """Exports the checkpoint at `checkpoint` to the directory `output` and returns the manifest.

        window, sinks: a query then sees the last `window` tokens and the first `sinks`; 0: as the checkpoint says.
        capacity: the longest context of the package; None: all that the model allows. prefill_chunk: the most tokens
        of one call, of a target whose files fix that; others refuse it.
        held_text: UTF-8 file on which the parity report compares the two; default: the held-out.txt beside the
        checkpoint, else random tokens. Raises `InputError`.
        """


def _exporter(target: str) -> Callable[..., dict[str, Any]]:
    """Imports the module of a target. Libraries lose a Ctrl-C there, or fail of it: some import others in a `try`."""
    with quiet(), interruptible():
        return getattr(importlib.import_module(f"edge_qkv.export.{target}.exporter"), f"export_{target}")


def _onnx(checkpoint: str, output: Path, *, prefill_chunk: int | None = None, **options) -> dict[str, Any]:
    if prefill_chunk is not None:
        raise InputError(
            f"--prefill-chunk {prefill_chunk}: an ONNX model takes any number of tokens at once; "
            "leave it out, and choose when the package is run"
        )
    return _export(_exporter("onnx"), checkpoint, output, **options)


def _executorch(checkpoint: str, output: Path, **options) -> dict[str, Any]:
    missing = [name for name in ("executorch", "torchao") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"--target executorch needs {' and '.join(missing)}; install executorch and torchao, and then edge-qkv "
            "once more from its sources, part of which is compiled against ExecuTorch: pip install executorch torchao, "
            "and there pip install '.[executorch]'"
        )
    return _export(_exporter("executorch"), checkpoint, output, **options)


def _coreml(checkpoint: str, output: Path, **options) -> dict[str, Any]:
    if importlib.util.find_spec("coremltools") is None:
        raise InputError("--target coreml needs coremltools; install it: pip install coremltools")
    return _export(_exporter("coreml"), checkpoint, output, **options)


def _gguf(checkpoint: str, output: Path, **options) -> dict[str, Any]:
    if importlib.util.find_spec("gguf") is None:
        raise InputError("--target gguf needs gguf; install it: pip install gguf")
    return _export(_exporter("gguf"), checkpoint, output, **options)


# Target name -> its exporter; the heavy libraries are imported when one is called.
TARGETS: dict[str, Exporter] = {"onnx": _onnx, "executorch": _executorch, "coreml": _coreml, "gguf": _gguf}


def _export(
    export: Callable[..., dict[str, Any]],
    checkpoint: str,
    output: Path,
    *,
    window: int = 0,
    sinks: int = 0,
    capacity: int | None = None,
    held_text: Path | None = None,
    parity: bool = True,
    **options,
) -> dict[str, Any]:
    """What every target does with its arguments."""
    source = _windowed(_shortened(read_checkpoint(checkpoint), capacity), window, sinks)
    if held_text is not None and not (options.get("tokenizer") or source.tokenizer):
        raise InputError(f"--parity-text {held_text}: text needs a tokenizer; give --tokenizer as well")
    return export(source, output, text=_held_text(held_text, source), run_parity=parity, **options)


def _shortened(checkpoint: Checkpoint, capacity: int | None) -> Checkpoint:
    """The checkpoint as a model of at most `capacity` tokens, which computes the same as far as it goes."""
    if capacity is None:
        return checkpoint
    config, most = checkpoint.config, checkpoint.config.max_positions
    capacity = whole(capacity, "--capacity", 1, most, ", the most this model allows")
    # A window that is longer than the context hides nothing.
    limited = {name: min(getattr(config, name), capacity) for name in ("window", "sinks", "trained_context")}
    tensors = checkpoint.tensors
    if config.positions == "learned":
        load = tensors["positions.weight"]
        tensors = {**tensors, "positions.weight": lambda: load()[:capacity]}
    config = dataclasses.replace(config, max_positions=capacity, **limited)
    return dataclasses.replace(checkpoint, config=config, tensors=tensors)


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
