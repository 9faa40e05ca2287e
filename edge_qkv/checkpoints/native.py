"""edge-qkv's own checkpoints: a directory with config.json, model.safetensors and, optionally, tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from edge_qkv.checkpoints.checkpoint import Checkpoint, NeedsTorch, Source, assemble, beside, has_torch, plain_name
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError, one_line

NAME = "edge-qkv"
SUMMARY = "a directory with config.json and model.safetensors, as `edge-qkv train` writes it"

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # safetensors' names


def read(directory: Path) -> Checkpoint:
    """Reads a directory; the weights stay in their file until they are asked for."""
    config = ModelConfig.from_file(directory / CONFIG)
    path = directory / WEIGHTS
    tokenizer = beside(path)
    if not has_torch():
        return Checkpoint(config, NeedsTorch(str(directory)), NAME, directory, tokenizer)
    return assemble(config, _sources(path), NAME, directory, str(path), tokenizer)


def _sources(path: Path) -> dict[str, Source]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt", device="cpu")
        sources = {}
        for name in file.keys():  # noqa: SIM118 (it cannot be iterated)
            view = file.get_slice(name)
            dtype = view.get_dtype()
            sources[plain_name(name, sources, str(path))] = Source(
                name, tuple(view.get_shape()), _DTYPES.get(dtype, dtype), lambda name=name: _read(file, name)
            )
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"{path}: damaged or not a safetensors file ({one_line(error)}); copy or save it again"
        ) from None
    return sources


def _read(file, name: str):
    from safetensors import SafetensorError

    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
