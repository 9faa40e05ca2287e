"""Exports a checkpoint to GGUF: a package whose model file llama.cpp runs as one of its own architectures."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

from edge_qkv.attention import FP16_MAX
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.errors import InputError
from edge_qkv.estimate import estimate
from edge_qkv.export.gguf import latent
from edge_qkv.export.gguf import tokenizer as gguf_tokenizer
from edge_qkv.export.gguf.architectures import GgufModel, GgufTensor
from edge_qkv.export.packaging import ModelFile, Runner, check_space, open_session, write_package
from edge_qkv.export.progress import Progress, silent
from edge_qkv.targets import cache_bytes_per_token, named, stored_as
from edge_qkv.tokenizer import load_tokenizer, stop_tokens

MODEL = named("gguf").model_file
_F32, _F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
_Q8_0, _Q4_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0
# The type of each role of a tensor. Head and embedding have 8 bits beside layers of 4, as in the other targets.
TYPES = {
    "f32": dict.fromkeys(("matrix", "head", "table", "wide"), _F32),
    "f16": dict.fromkeys(("matrix", "head", "table", "wide"), _F16),
    "q8_0": {"matrix": _Q8_0, "head": _Q8_0, "table": _Q8_0, "wide": _F16},
    "q4_0": {"matrix": _Q4_0, "head": _Q8_0, "table": _Q8_0, "wide": _F16},
}
_FILE_TYPE = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_k": LlamaFileType.MOSTLY_Q4_K_M,
}
_ROWS_AT_ONCE = 1 << 22  # values of a tensor that are converted at a time


def export_gguf(
    checkpoint: Checkpoint,
    output: Path,
    *,
    weights: str = "q4_0",
    cache: str = "fp16",
    block_size: int | None = None,
    tokenizer: Path | None = None,
    progress: Progress = silent,
    text: str | None = None,
    run_parity: bool = True,
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Writes the package `output` and returns its manifest (`edge_qkv.json`).

    weights: 'f32', 'f16', 'q8_0' (int8), 'q4_0' (int4; head and embedding then have 8 bits) or 'q4_k', for which
    llama-cpp-python decides over each tensor (llama.cpp's Q4_K_M). Norms and biases are float32, and so is a matrix
    whose rows are no whole blocks. cache: 'fp32' or 'fp16', the type that a session gives llama.cpp's cache.
    block_size: must be None, a file fixes none. Without llama-cpp-python there is no parity report,
    unless a `runner` makes it. The rest is as in `edge_qkv.export.onnx.exporter.export_onnx`.

    No more of the weights is in memory than one tensor of the file and what it is made of. Raises `InputError`, for a
    model or a tokenizer that llama.cpp cannot express before any long work; then no file is left and an earlier
    package at `output` is untouched.
    """
    weights, _, _ = stored_as("gguf", weights, block_size)
    config = checkpoint.config
    if weights == "q4_k" and importlib.util.find_spec("llama_cpp") is None:
        raise InputError(
            "--weights q4_k: needs llama-cpp-python, whose quantiser it is; install it (pip install "
            "'edge-qkv[llama-cpp]') or choose q4_0"
        )
    model = latent.map_model(config)
    cached = cache_bytes_per_token(config, cache, "gguf")
    vocabulary = _vocabulary(tokenizer or checkpoint.tokenizer, config.vocab_size)
    own_metadata = {"description": estimate(config, weights, target="gguf", cache=cache).description}

    def write_model(directory: Path) -> None:
        if weights != "q4_k":
            check_space(directory, stored_bytes(model, weights))
            _write(directory / MODEL, checkpoint, model, weights, vocabulary, own_metadata, progress)
            return
        check_space(directory, stored_bytes(model, "f16") + stored_bytes(model, "q8_0"))
        _write(directory / "f16", checkpoint, model, "f16", vocabulary, own_metadata, progress)
        progress("Quantising with llama.cpp", 0, 0)
        _quantize(directory / "f16", directory / MODEL, model)
        (directory / "f16").unlink()

    if run_parity and runner is None:
        if importlib.util.find_spec("llama_cpp") is None:
            progress("No parity report: it needs llama-cpp-python", 0, 0)
        else:
            runner = open_session
    more = {
        "architecture": model.architecture,
        "cache_bytes_per_token": cached,
    }
    return write_package(
        checkpoint,
        output,
        ModelFile("gguf", weights, cache, None, more),
        write_model,
        tokenizer=tokenizer,
        text=text,
        runner=runner if run_parity else None,
        progress=progress,
    )


def _vocabulary(tokenizer: Path | None, vocab_size: int) -> dict[str, Any]:
    if tokenizer is None:
        return gguf_tokenizer.metadata(None, vocab_size, ())
    stops = stop_tokens(load_tokenizer(Path(tokenizer), vocab_size))
    return gguf_tokenizer.metadata(Path(tokenizer), vocab_size, stops)


# ---- the file ----


def stored_type(tensor: GgufTensor, weights: str) -> GGMLQuantizationType:
    """The type of a tensor in a file."""
    kind = _F32 if tensor.role == "exact" else TYPES[weights][tensor.role]
    return _F32 if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def stored_bytes(model: GgufModel, weights: str) -> int:
    """Bytes of all tensors of a file."""
    return sum(_bytes(tensor, stored_type(tensor, weights)) for tensor in model.tensors)


def _bytes(tensor: GgufTensor, kind: GGMLQuantizationType) -> int:
    values, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(tensor.shape)) // values * size


def _write(
    path: Path,
    checkpoint: Checkpoint,
    model: GgufModel,
    weights: str,
    vocabulary: dict[str, Any],
    own_metadata: dict[str, str],
    progress: Progress,
) -> None:
    writer = GGUFWriter(path, model.architecture)
    try:
        writer.add_name(f"edge-qkv {checkpoint.config.variant}")
        writer.add_file_type(_FILE_TYPE[weights])
        writer.add_quantization_version(2)
        for prefix, values in (
            (model.architecture, model.metadata),
            ("tokenizer.ggml", vocabulary),
            ("edge_qkv", own_metadata),
        ):
            for name, value in values.items():
                _ADD[type(value)](writer, f"{prefix}.{name}", value)
        for tensor in model.tensors:
            kind = stored_type(tensor, weights)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), _bytes(tensor, kind), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, stored_bytes(model, weights)
        progress("Writing the weights", done, total)
        for tensor in model.tensors:
            kind = stored_type(tensor, weights)
            writer.write_tensor_data(_converted(tensor, kind, checkpoint))
            done += _bytes(tensor, kind)
            progress("Writing the weights", done, total)
    finally:
        writer.close()


_ADD: dict[type, Callable[[GGUFWriter, str, Any], None]] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def _converted(tensor: GgufTensor, kind: GGMLQuantizationType, checkpoint: Checkpoint) -> np.ndarray:
    """The bytes of a tensor in a file."""

    def read(name: str) -> np.ndarray:
        weight = checkpoint.tensors[name]().float().numpy()
        if not np.isfinite(weight).all():
            raise InputError(f"{name} holds values that are not finite; the checkpoint is damaged")
        return weight

    made = tensor.make(read)
    made = np.ascontiguousarray(made, np.float32).reshape(-1, tensor.shape[-1])
    if kind == _F32:
        return made
    if max(abs(float(made.min())), abs(float(made.max()))) > FP16_MAX:
        raise InputError(f"--weights {kind.name.lower()}: {tensor.name} has values beyond fp16's range; choose f32")
    step = max(1, _ROWS_AT_ONCE // made.shape[1])
    return np.concatenate([quantize(made[i : i + step], kind) for i in range(0, len(made), step)])


def _quantize(source: Path, path: Path, model: GgufModel) -> None:
    """Lets llama.cpp write Q4_K_M of a file in f16."""
    import ctypes

    import llama_cpp

    # What must not have few bits keeps the type it has.
    kept = [t for t in model.tensors if t.role in ("exact", "wide")]
    overrides = (llama_cpp.llama_model_tensor_override * (len(kept) + 1))()
    for override, tensor in zip(overrides, kept, strict=False):
        override.pattern = f"^{tensor.name}$".replace(".", "\\.").encode()
        override.type = stored_type(tensor, "f16")
    llama_cpp.llama_log_set(_no_log(), None)  # a line a tensor, otherwise
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(LlamaFileType.MOSTLY_Q4_K_M)
    params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params)):
        raise InputError("--weights q4_k: llama.cpp could not quantise this model; choose q4_0")


@functools.cache  # llama.cpp calls it whenever it likes
def _no_log() -> Any:
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)
