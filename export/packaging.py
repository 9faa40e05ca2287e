"""What every exporter does around its model file: tokenizer, manifest, parity report, all or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import edge_qkv
from edge_qkv import files, package
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.errors import InputError
from edge_qkv.export import parity
from edge_qkv.export.progress import Progress, interruptible
from edge_qkv.targets import named
from edge_qkv.tokenizer import encode, load_tokenizer, stop_tokens

# Opens the package at a path for sequences of so many tokens, until the end of `with`: (a function from tokens to
# logits, the engine's name).
Runner = Callable[[Path, int], AbstractContextManager[tuple[parity.Score, str]]]


@dataclass(frozen=True)
class ModelFile:
    """What the manifest says of the model file."""

    target: str
    weights: str
    cache: str
    block_size: int | None
    more: dict[str, Any] = field(default_factory=dict)  # what only this target has


def write_package(
    checkpoint: Checkpoint,
    output: Path,
    model_file: ModelFile,
    write_model: Callable[[Path], None],
    *,
    tokenizer: Path | None,
    text: str | None,
    runner: Runner | None,
    progress: Progress,
    parity_tokens: int | None = None,
) -> dict[str, Any]:
    """Writes the package `output` and returns its manifest (`edge_qkv.json`).

    write_model: writes the model's files into a directory. tokenizer: a `tokenizer.json`, default the checkpoint's.
    runner: opens the package for the parity report, on `text` or else on random token ids; None: no report.
    parity_tokens: the most that it takes, where the runner is slow.

    Raises `InputError`; then no file is left and an earlier package at `output` is untouched.
    """
    config = checkpoint.config
    tokenizer = tokenizer or checkpoint.tokenizer
    encoder = None if tokenizer is None else load_tokenizer(Path(tokenizer), config.vocab_size)
    stops = [] if encoder is None else stop_tokens(encoder)
    ids = encode(encoder, text, frozenset(stops), start=True) if text and encoder is not None else None
    with files.directory_written_whole(Path(output), package.is_package_only) as directory, interruptible():
        write_model(directory)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, directory / "tokenizer.json")
        manifest = {
            "format": package.FORMAT,
            "target": model_file.target,
            "created_by": f"edge-qkv {edge_qkv.__version__}",
            "checkpoint_format": checkpoint.format,
            "config": config.to_dict(),
            "weights": model_file.weights,
            "block_size": model_file.block_size,
            "cache": model_file.cache,
            "cache_bytes_per_token": config.cache_bytes_per_token(model_file.cache),
            **model_file.more,
            "stop_tokens": stops,
            "files": _listed(directory, progress),
            "parity": None,
        }
        files.write_json(directory / package.MANIFEST, manifest)
        if runner:
            manifest["parity"] = _parity(checkpoint, directory, runner, ids, parity_tokens, progress)
            files.write_json(directory / package.MANIFEST, manifest)
    return manifest


def check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed * 1.01:
        raise InputError(
            f"--output {directory.parent}: has {free:,} bytes free, the package needs {needed:,}; "
            "free some or choose another place"
        )


@contextmanager
def open_session(directory: Path, context: int) -> Iterator[tuple[parity.Score, str]]:
    """A `Runner` on a session, of whichever engine runs the package."""
    from edge_qkv.loaded import Model
    from edge_qkv.session import Session

    with (
        Model(directory, verify=False, packed=False) as model,
        Session(model, context=context, prefill_chunk=64) as session,
    ):

        def score(tokens: Sequence[int]):
            session.rewind(0)
            return session.score(tokens)

        yield score, "edge-qkv" if named(model.package.target).native else model.info.engine.decode()


def _listed(directory: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    progress("Hashing the files", 0, 0)
    paths = {name: directory / name for name in package.listed_files(directory)}
    return {name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)} for name, path in paths.items()}


def _parity(
    checkpoint: Checkpoint,
    directory: Path,
    runner: Runner,
    ids: Sequence[int] | None,
    most: int | None,
    progress: Progress,
) -> dict[str, Any]:
    progress("Comparing with the checkpoint", 0, 0)
    with runner(directory, parity.lengths(checkpoint.config)[1]) as (score, engine):
        return parity.check(checkpoint.load(), score, engine, ids, most)
