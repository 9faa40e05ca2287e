"""Exports a checkpoint to ONNX: a package whose graph runs in ONNX Runtime, with the native kernel or without.

Minimum ONNX Runtime of the files: 1.18 with fp32 weights (opset 21), 1.22 with int4 or int8 ones
(MatMulNBits of 8 bits, GatherBlockQuantized of bytes).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edge_qkv.export import onnx_graph, onnx_weights, parity
from edge_qkv.export.onnx_weights import Pieces, Recipe
from edge_qkv.export.progress import Progress, silent
from edge_qkv.export.quantize import BLOCK_SIZES

from edge_qkv import attention, files, package
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.config import CACHE_BYTES
from edge_qkv.errors import InputError

MODEL, DATA = "model.onnx", "model.onnx.data"
BITS = {"fp32": 0, "int8": 8, "int4": 4}
DEFAULT_BLOCK_SIZE = 32
_PARITY_TOKENS = 192

# Opens the package at a path for `parity.check`: (a function from tokens to logits, the engine's name).
Runner = Callable[[Path, int], tuple[parity.Score, str]]


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

    weights: 'fp32', 'int8' or 'int4'; block_size: weights that share a scale, with int8 and int4; cache:
    'fp16' or 'fp32'. tokenizer: a `tokenizer.json`, default the checkpoint's. text: held-out text on which the
    parity report compares the package with the checkpoint; without it, or without a tokenizer, random token
    ids. runner: opens the package for that, by default natively where our library is installed and else in
    plain ONNX Runtime. accuracy_level: of MatMulNBits; 1 keeps activations in float32, at half the speed.

    The largest thing in memory at any time is one tensor of the checkpoint, except for the parity report,
    which holds the model in float32. Raises `InputError`; then no file is left and an earlier package at
    `output` is untouched.
    """
    output = Path(output)
    recipe = _recipe(weights, block_size, accuracy_level)
    if cache not in CACHE_BYTES:
        raise InputError(f"--cache {cache} is not known; choose one of {', '.join(CACHE_BYTES)}")
    config = checkpoint.config
    tokenizer = tokenizer or checkpoint.tokenizer
    encoder = None if tokenizer is None else package.load_tokenizer(Path(tokenizer), config.vocab_size)
    decoder, storage = onnx_weights.prepare(config, onnx_graph.symbolic_attend, recipe)
    data = onnx_weights.DataFile(onnx_graph.named_weights(decoder), storage)
    with files.directory_written_whole(output, package.MANIFEST) as directory:
        _check_space(directory, data.bytes)
        progress("Tracing the graph", 0, 0)
        model = onnx_graph.build(decoder, cache)
        onnx_graph.finish(model, config, cache, _version())
        _write_data(checkpoint, storage, data, directory / DATA, progress)
        onnx_graph.fill(model, lambda name: data.tensor(name, directory / DATA))
        (directory / MODEL).write_bytes(ir.serde.serialize_model(model).SerializeToString())
        del model, decoder
        if tokenizer is not None:
            shutil.copyfile(tokenizer, directory / "tokenizer.json")
        manifest = {
            "format": package.FORMAT,
            "target": "onnx",
            "created_by": f"edge-qkv {_version()}",
            "checkpoint_format": checkpoint.format,
            "config": config.to_dict(),
            "weights": weights,
            "block_size": recipe.block_size if recipe.bits else None,
            "cache": cache,
            "cache_bytes_per_token": config.cache_bytes_per_token(cache),
            "stop_tokens": [] if encoder is None else package.stop_tokens(encoder),
            "files": _listed(directory, progress),
            "parity": None,
        }
        files.write_json(directory / package.MANIFEST, manifest)
        if run_parity:
            ids = encoder.encode(text).ids if text and encoder is not None else None
            manifest["parity"] = _parity(checkpoint, directory, runner or open_runner, ids, progress)
            files.write_json(directory / package.MANIFEST, manifest)
    return manifest


def open_runner(directory: Path, context: int) -> tuple[parity.Score, str]:
    """Opens a package in the native runtime where that is installed, else in plain ONNX Runtime."""
    from edge_qkv import _native

    try:
        _native.library_path()
    except InputError:  # not installed; a library that is there but fails to load is an error, not a reason to switch
        import onnxruntime
        from edge_qkv.export.onnx_stock import StockSession

        return StockSession(directory, context).score, f"onnxruntime {onnxruntime.__version__}"
    from edge_qkv.session import Session

    return Session(directory, context=context, prefill_chunk=64, verify=False).score, "edge-qkv"


def _recipe(weights: str, block_size: int | None, accuracy_level: int) -> Recipe:
    if weights not in BITS:
        raise InputError(f"--weights {weights} is not known; choose one of {', '.join(BITS)}")
    bits = BITS[weights]
    if block_size is not None and not bits:
        raise InputError("--block-size applies to --weights int8 and int4 only; leave it out with fp32")
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise InputError(
            f"--block-size {block_size} is not supported; choose one of {', '.join(map(str, BLOCK_SIZES))}"
        )
    wide = 8 if bits else 0
    return Recipe(bits, bits, wide, block_size or DEFAULT_BLOCK_SIZE, accuracy_level)


def _write_data(checkpoint: Checkpoint, storage, data, path: Path, progress: Progress) -> None:
    config = checkpoint.config
    sizes = dict.fromkeys(storage.convert, 0)

    def source(name: str) -> Callable[[], Pieces]:
        def make() -> Pieces:
            tensor = checkpoint.tensors[name]()
            sizes[name] = tensor.numel() * 4
            try:
                return storage.convert[name](tensor)
            except InputError as error:
                raise InputError(f"{checkpoint.path or checkpoint.format}: tensor {name}: {error}") from None

        return make

    sources: dict[str, Callable[[], Pieces]] = {name: source(name) for name in storage.convert}
    if config.rotary:
        sources["rotary tables"] = lambda: dict(zip(("cos", "sin"), attention.rotary_tables(config), strict=True))
    total, done = config.parameters() * 4, 0

    def report(name: str) -> None:
        nonlocal done
        done += sizes.get(name, 0)
        progress("Writing weights", done, total)

    data.write(path, sources, report)


def _listed(directory: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    progress("Hashing the files", 0, 0)
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)} for path in paths}


def _parity(
    checkpoint: Checkpoint, directory: Path, runner: Runner, ids: Sequence[int] | None, progress: Progress
) -> dict[str, Any]:
    progress("Comparing with the checkpoint", 0, 0)
    count = min(_PARITY_TOKENS, checkpoint.config.max_positions)
    score, engine = runner(directory, count)
    return parity.check(checkpoint.load(), score, engine, ids, count)


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed * 1.01:
        raise InputError(
            f"--output {directory.parent}: has {free:,} bytes free, the package needs {needed:,}; free some or go elsewhere"
        )


def _version() -> str:
    import edge_qkv

    return edge_qkv.__version__
