"""Exports a checkpoint to Core ML: a program with the cache in states, and functions that share weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from edge_qkv.checkpoints import Checkpoint
from edge_qkv.config import ModelConfig
from edge_qkv.description import OPERATOR, describe
from edge_qkv.engines.coreml import StateCache
from edge_qkv.errors import InputError
from edge_qkv.estimate import estimate
from edge_qkv.export import parity
from edge_qkv.export.coreml import program
from edge_qkv.export.coreml import weights as coreml_weights
from edge_qkv.export.coreml.evaluator import interpreter
from edge_qkv.export.packaging import ModelFile, Runner, check_space, write_package
from edge_qkv.export.progress import Progress, silent
from edge_qkv.package import Package
from edge_qkv.targets import check_cache, named, stored_as

MODEL = named("coreml").model_file
PARITY_TOKENS = 512  # the evaluator takes seconds for a chunk where the capacity is large
MOST_TOKENS_AT_ONCE = 1024  # of each, 1.2B's scores at 32k take 2 MiB
# What the Neural Engine takes as it is; other sizes it pads, or leaves to the processor or GPU.
_STEP, _LONGEST = 32, 16_384


def export_coreml(
    checkpoint: Checkpoint,
    output: Path,
    *,
    weights: str = "int4",
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

    weights: 'fp16', 'int8' (a scale a row) or 'int4' (blocks of `block_size`, 32, 64 or 128, share a scale; head and
    embedding then have 8 bits). cache: 'fp16', the one type that states have. prefill_chunk: tokens of a call of the
    functions prefill and score; decode takes one. The states have room for all positions of the checkpoint's config.
    The rest is as in `edge_qkv.export.onnx.exporter.export_onnx`.

    The weights are in memory at a byte each, fp16 ones at two. Raises `InputError`; then no file is left and an earlier
    package at `output` is untouched.
    """
    if weights == "fp32":
        raise InputError("--weights fp32: Core ML computes and keeps its states in fp16; choose fp16, int8 or int4")
    weights, how, block = stored_as("coreml", weights, block_size)
    check_cache("coreml", cache)
    config = checkpoint.config
    _check_numbers(config)
    if config.max_positions < 2:
        raise InputError(f"--capacity {config.max_positions}: a program has room for at least 2 tokens; give more")
    most = min(MOST_TOKENS_AT_ONCE, config.max_positions)
    chunk = min(named("coreml").prefill_chunk, most) if prefill_chunk is None else prefill_chunk
    if not 2 <= chunk <= most:  # of 1, prefill would be decode once more
        raise InputError(f"--prefill-chunk {chunk} is out of range; choose from 2 to {most:,} tokens")

    def write_model(directory: Path) -> None:
        planned = estimate(config, weights, block or None, "coreml", chunk)
        check_space(directory, 2 * planned.weight_bytes)  # coremltools collects the weights before it makes the package
        decoder = coreml_weights.load(checkpoint, program.attend, how, progress)
        facts = {
            "weight_bits": how.layers.bits,
            "block_size": block,
            "matrix_bytes": planned.matrix_bytes,
            "table_bytes": planned.table_bytes,
            "prefill_chunk": chunk,
            "cache_rows": config.max_positions,
            "operator": OPERATOR,
            "coremltools": version("coremltools"),
        }
        text = describe(config, cache, facts)
        program.lower(decoder, chunk, text, directory / MODEL, progress)

    more = {"prefill_chunk": chunk, "neural_engine_misfits": misfits(config, chunk)}
    return write_package(
        checkpoint,
        output,
        ModelFile("coreml", weights, cache, block or None, more),
        write_model,
        tokenizer=tokenizer,
        text=text,
        runner=(runner or open_evaluator) if run_parity else None,
        progress=progress,
        parity_tokens=PARITY_TOKENS,
    )


@contextmanager
def open_evaluator(directory: Path, context: int) -> Iterator[tuple[parity.Score, str]]:
    """A `Runner` that computes what the program says in numpy, wherever it is: not what a device makes of it."""
    package = Package.open(directory, verify=False)
    function = functools.cache(lambda name: interpreter.load(directory / MODEL, name))
    cache = StateCache(package.config, package.manifest["prefill_chunk"], function)

    def score(tokens: Sequence[int]) -> np.ndarray:
        ids, step = np.array(tokens, np.int32), cache.most_tokens
        parts = [cache.evaluate(ids[past : past + step], past, every=True) for past in range(0, len(ids), step)]
        return np.concatenate(parts)

    yield score, "edge-qkv's evaluator of Core ML programs"


def _check_numbers(config: ModelConfig) -> None:
    """Raises `InputError` for a factor that is infinite or nothing as fp16, in which a program computes."""
    names = ("embedding_scale", "residual_scale", "logit_scale", "logit_softcap")
    factors = [(name, getattr(config, name)) for name in names]
    factors += [("attention_scale", spec.scale) for spec in config.kinds.values()]
    for name, factor in factors:
        with np.errstate(over="ignore"):
            kept = float(np.array(factor, np.float64).astype(np.float16))
        if not np.isfinite(kept) or (factor and not kept):
            raise InputError(f"config field {name} = {factor!r}: fp16, in which Core ML computes, has no such number")


def misfits(config: ModelConfig, chunk: int) -> list[str]:
    """Sizes that do not suit the Neural Engine, each with the reason."""
    sizes = {}
    for kind, spec in config.kinds.items():
        of = "" if config.uniform_layers else f"{kind} "
        own = {"head_dim": spec.head_dim, "value_dim": spec.values, "mlp_width": spec.mlp_width}
        if spec.values == spec.head_dim:
            del own["value_dim"]
        sizes |= {f"{of}{name}": size for name, size in own.items()}
    sizes |= {"width": config.width, "vocab_size": config.vocab_size, "input_embeddings": config.input_embeddings}
    sizes |= {"capacity": config.max_positions, "prefill chunk": chunk}
    uneven = [f"{name} {size} is no multiple of {_STEP}" for name, size in sizes.items() if size % _STEP]
    return uneven + [f"{name} {size} is above {_LONGEST}" for name, size in sizes.items() if size > _LONGEST]
