"""Exporters, a directory a target. Each takes the same arguments and writes a whole package."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_qkv import files
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.checks import whole
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress, interruptible, quiet, silent
from edge_qkv.layer import LayerSpec
from edge_qkv.recipe import HELD_TEXT
from edge_qkv.targets import check_cache, named


def export_package(
    target: str,
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
    """Exports the checkpoint at `checkpoint` to a package for `target` in the directory `output`, and returns the
    manifest.

    window, sinks: of layers that see all tokens, a query then sees the last `window` of them and the first `sinks`; 0:
    as the checkpoint says. capacity: the longest context of the package; None: all that the model allows.
    prefill_chunk: the most tokens of one call, of a target whose files fix that; others refuse it. held_text: UTF-8
    file on which the parity report compares the two; default: the held-out.txt beside the checkpoint, else random
    tokens. Raises `InputError`.
    """
    known = named(target)
    missing = [name for name in known.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--target {target} needs {' and '.join(missing)}; {known.needs[missing[0]]}")
    options: dict[str, Any] = {"weights": weights, "cache": cache, "block_size": block_size, "tokenizer": tokenizer}
    if known.prefill_chunk:
        options["prefill_chunk"] = prefill_chunk
    elif prefill_chunk is not None:
        raise InputError(
            f"--prefill-chunk {prefill_chunk}: a package for {target} takes any number of tokens at once; "
            "leave it out, and choose when it is run"
        )
    check_cache(target, cache)
    export = _exporter(target)
    source = _windowed(_shortened(read_checkpoint(checkpoint), capacity), window, sinks)
    if held_text is not None and not (tokenizer or source.tokenizer):
        raise InputError(f"--parity-text {held_text}: text needs a tokenizer; give --tokenizer as well")
    text = _held_text(held_text, source)
    return export(source, output, text=text, run_parity=parity, progress=progress, **options)


def _exporter(target: str) -> Callable[..., dict[str, Any]]:
    """Imports the module of a target. Libraries lose a Ctrl-C there, or fail of it: some import others in a `try`."""
    with quiet(), interruptible():
        return getattr(importlib.import_module(f"edge_qkv.export.{target}.exporter"), f"export_{target}")


def _shortened(checkpoint: Checkpoint, capacity: int | None) -> Checkpoint:
    """The checkpoint as a model of at most `capacity` tokens, which computes the same as far as it goes."""
    if capacity is None:
        return checkpoint
    config, most = checkpoint.config, checkpoint.config.max_positions
    capacity = whole(capacity, "--capacity", 1, most, ", the most this model allows")
    # A window that is longer than the context hides nothing.
    kinds = {
        name: dataclasses.replace(spec, window=min(spec.window, capacity), sinks=min(spec.sinks, capacity))
        for name, spec in config.kinds.items()
    }
    trained = min(config.trained_context, capacity)
    tensors = checkpoint.tensors
    if config.learned_positions:
        load = tensors["positions.weight"]
        tensors = {**tensors, "positions.weight": lambda: load()[:capacity]}
    config = dataclasses.replace(config, max_positions=capacity, kinds=kinds, trained_context=trained)
    return dataclasses.replace(checkpoint, config=config, tensors=tensors)


def _windowed(checkpoint: Checkpoint, window: int, sinks: int) -> Checkpoint:
    """The checkpoint with the window and sinks that are not 0, in its layers that see all tokens or as many."""
    given = {name: value for name, value in (("window", window), ("sinks", sinks)) if value}
    config = checkpoint.config
    longest = max(spec.window or config.max_positions for spec in config.kinds.values())

    def changed(spec: LayerSpec) -> LayerSpec:
        local = (spec.window or config.max_positions) < longest
        return spec if local else dataclasses.replace(spec, **given)

    try:
        kinds = {name: changed(spec) for name, spec in config.kinds.items()}
        return dataclasses.replace(checkpoint, config=dataclasses.replace(config, kinds=kinds))
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
