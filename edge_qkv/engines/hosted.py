"""Sessions of the engines that Python hosts: all that is not the engine's own arithmetic and cache.

A snapshot of such a session is a NumPy archive (.npz, its parts checked by CRC-32): `version` 1, `fingerprint` of the
model's files, `tokens` [n] int32, `logits` [V] float32 where they are known, and the cache as `cache.NAME`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_qkv import _native, files
from edge_qkv.engines import ModelOptions
from edge_qkv.engines.closable import Closable
from edge_qkv.errors import Cancelled, ContextFull, InputError, one_line
from edge_qkv.package import Package

_VERSION = 1
_SNAPSHOT_OVERHEAD = 16 << 20  # bytes; logits, names and headers are far less
_ERROR = 0  # the overflow option that drops nothing


class Cache(Protocol):
    """The cache of one conversation, and the evaluation that writes it."""

    most_tokens: int  # of a call
    bytes: int  # in memory, at its full context

    def evaluate(self, tokens: np.ndarray, past: int, every: bool) -> np.ndarray:
        """Writes the rows of tokens [n] int32 after the first `past`; returns the logits after each of them [n, V]
        float32, or after the last [1, V].

        There may be rows after the first `past`: of a rewind, or of a call that an exception of a signal handler
        ended. Raises `Cancelled`, with the first `past` rows as they were, where it heard of that.
        """

    def rewind(self, length: int) -> None:
        """The rows from `length` on are no longer needed."""

    def read(self, length: int) -> dict[str, np.ndarray]:
        """The first rows, to be kept; `write` takes them back."""

    def write(self, parts: dict[str, np.ndarray], length: int) -> None:
        """Raises `InputError` for parts of another shape, and is then as it was."""

    def fill(self, past: int, length: int, seed: int) -> None:
        """Noise as the rows from `past` on."""

    def close(self) -> None: ...


# (context, largest chunk, not 0 while an evaluation is to stop) -> the cache of a session.
NewCache = Callable[[int, int, ctypes.c_int32], Cache]


class HostedModel(Closable):
    """What the models of these engines have in common."""

    _what = "model"

    def __init__(self, package: Package, engine: str, new_cache: NewCache, close: Callable[[], None]) -> None:
        super().__init__()
        config, cache = package.config, package.manifest.get("cache")
        self.package, self.new_cache, self._close_engine = package, new_cache, close
        self.info = _native.ModelInfo(
            engine=engine.encode(),
            cache_type=str(cache).encode(),
            vocab_size=config.vocab_size,
            layers=len(config.layers),
            max_positions=config.max_positions,
            cache_bytes_per_token=package.cache_bytes_per_token,
            context=config.max_positions,
            fingerprint=_fingerprint(package),
        )

    def open_session(self, options: _native.SessionOptions) -> HostedSession:
        if options.overflow != _ERROR:
            raise InputError(
                f"overflow: rows cannot be moved in a {self.package.target} package; use 'error' and rewind, "
                "or export to onnx or executorch"
            )
        for name in ("sinks", "window", "block"):
            if getattr(options, name):
                raise InputError(f"{name}: belongs to an overflow option that a {self.package.target} package has not")
        with self._call():
            return HostedSession(self, options.context, options.prefill_chunk)

    def trim(self, level: int) -> None:
        """There is nothing that the engine would give back."""

    def watch_pressure(self, cgroup: bytes | None) -> None:
        raise InputError(
            f"watch_pressure: the engine of a {self.package.target} package gives no memory back; leave it out"
        )

    def _free(self) -> None:
        self._close_engine()


def refuse_options(package: Package, options: ModelOptions, *, threads: bool) -> None:
    """Raises `InputError` for what these engines have not. threads: whether their number can be chosen."""
    packed = options.packed not in (None, False)
    for name, given in (("packed", packed), ("spill", options.spill), ("threads", options.threads and not threads)):
        if given:
            raise InputError(
                f"{name}: is for packages that the native runtime runs, not for {package.target}; leave it out"
            )


class HostedSession(Closable):
    """An `EngineSession` on a `Cache`.

    An exception out of a signal handler may end any of this anywhere. So what is known of the cache is never more
    than what is in it: it is forgotten before the cache changes, and noted after.
    """

    _what = "session"

    def __init__(self, model: HostedModel, context: int, chunk: int) -> None:
        super().__init__()
        self._model, self._context, self._chunk = model, context, chunk
        self._cancelled = ctypes.c_int32()
        self._cache = model.new_cache(context, chunk, self._cancelled)
        self._tokens: list[int] = []
        self._logits: np.ndarray | None = None
        self._sampler = _native.SamplerOptions(top_p=1.0, repetition_penalty=1.0)

    def evaluate(self, tokens: np.ndarray, logits: np.ndarray | None) -> None:
        with self._call():
            self._check_fits(len(tokens))
            most = self._cache.most_tokens
            for begin in range(0, len(tokens), most):
                part = tokens[begin : begin + most]
                after = self._evaluate(part, logits is not None)
                self._logits = None
                self._tokens += part.tolist()
                self._logits = after[-1].astype(np.float32)
                if logits is not None:
                    logits[begin : begin + len(part)] = after

    def _evaluate(self, tokens: np.ndarray, every: bool) -> np.ndarray:
        try:
            if self._cancelled.value:
                raise Cancelled("The evaluation was cancelled.")
            return self._cache.evaluate(tokens, len(self._tokens), every)
        except Cancelled:
            self._cancelled.value = 0
            raise

    def logits(self) -> np.ndarray:
        with self._call():
            return self._known_logits().copy()

    def set_sampler(self, options: _native.SamplerOptions) -> None:
        with self._call():
            self._sampler = options

    def sample(self) -> int:
        with self._call():
            logits, tokens = self._known_logits(), np.asarray(self._tokens, np.int32)
            token = ctypes.c_int32()
            _native.call(
                "eqkv_sample",
                logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                len(logits),
                tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
                len(tokens),
                ctypes.byref(self._sampler),
                ctypes.byref(token),
            )
            return token.value

    def rewind(self, length: int, progress: Callable[[int, int], None] | None = None) -> int:
        with self._call():
            self._rewind(length)
        return 0  # all rows are kept

    def match(self, tokens: np.ndarray) -> int:
        with self._call():
            most = min(len(tokens), len(self._tokens))
            differ = np.flatnonzero(tokens[:most] != np.asarray(self._tokens[:most], np.int32))
            kept = int(differ[0]) if len(differ) else most
            finished = kept == len(self._tokens) and self._logits is not None
            if kept == len(tokens) and kept > 0 and not finished:
                kept -= 1  # so that its logits are computed
            self._rewind(kept)
            return kept

    def fill(self, length: int, seed: int) -> None:
        with self._call():
            more = length - len(self._tokens)
            if more < 0:
                raise InputError(f"cannot fill up to {length} tokens: the session holds {len(self._tokens)}")
            self._check_fits(more)
            if more:
                self._logits = None
                self._cache.fill(len(self._tokens), length, seed)
                self._tokens += [0] * more

    def cancel(self) -> None:
        self._cancelled.value = 1

    def save(self, path: bytes) -> None:
        with self._call():
            parts = {f"cache.{name}": part for name, part in self._cache.read(len(self._tokens)).items()}
            if self._logits is not None:
                parts["logits"] = self._logits
            tokens = np.asarray(self._tokens, np.int32)
            try:
                with files.written_atomically(Path(os.fsdecode(path))) as file:
                    np.savez(file, version=_VERSION, fingerprint=self._model.info.fingerprint, tokens=tokens, **parts)
            except OSError as error:
                raise InputError(f"{os.fsdecode(path)}: cannot be written ({error.strerror})") from None

    def restore(self, path: bytes) -> None:
        with self._call():
            name = os.fsdecode(path)
            with contextlib.suppress(OSError):  # reading says what is wrong
                if os.path.getsize(name) > 2 * self._cache.bytes + _SNAPSHOT_OVERHEAD:  # read whole
                    raise ContextFull(
                        f"{name}: is larger than any snapshot that fits into the context of {self._context}"
                    )
            saved = _read_snapshot(name)
            if saved["fingerprint"].tobytes().rstrip(b"\0") != self._model.info.fingerprint:
                raise InputError(
                    f"{name}: is a snapshot of another model; restore it with the package it was saved with"
                )
            tokens, logits = saved["tokens"], saved.get("logits")
            vocabulary = self._model.info.vocab_size
            if tokens.dtype != np.int32 or tokens.ndim != 1 or ((tokens < 0) | (tokens >= vocabulary)).any():
                raise InputError(f"{name}: is damaged (its tokens are none of this model)")
            if logits is not None and (logits.dtype != np.float32 or logits.shape != (vocabulary,)):
                raise InputError(f"{name}: is damaged (its logits have the wrong shape)")
            if len(tokens) > self._context:
                raise ContextFull(f"{name}: its {len(tokens)} tokens do not fit into the context of {self._context}")
            parts = {key.removeprefix("cache."): part for key, part in saved.items() if key.startswith("cache.")}
            before = self._tokens, self._logits
            self._tokens, self._logits = [], None
            try:
                self._cache.write(parts, len(tokens))
            except InputError as error:
                self._tokens, self._logits = before
                raise InputError(f"{name}: is damaged ({error})") from None
            self._tokens, self._logits = tokens.tolist(), logits

    def fork(self) -> HostedSession:
        with self._call():
            other = HostedSession(self._model, self._context, self._chunk)
            other._cache.write(self._cache.read(len(self._tokens)), len(self._tokens))
            other._tokens, other._logits = list(self._tokens), self._logits
            return other

    def tokens(self) -> np.ndarray:
        with self._call():
            return np.asarray(self._tokens, np.int32)

    def info(self) -> _native.SessionInfo:
        with self._call():
            return _native.SessionInfo(
                length=len(self._tokens),
                context=self._context,
                cache_used=len(self._tokens) * self._model.info.cache_bytes_per_token,
                cache_committed=self._cache.bytes,
                cache_reserved=self._cache.bytes,
            )

    def _check_fits(self, more: int) -> None:
        if len(self._tokens) + more > self._context:
            raise ContextFull(
                f"{more} more tokens do not fit: {len(self._tokens)} of the context of {self._context} "
                "are used; rewind the session or open one with a larger context"
            )

    def _known_logits(self) -> np.ndarray:
        if self._logits is None:
            raise InputError("The session has no logits here; evaluate a token first.")
        return self._logits

    def _rewind(self, length: int) -> None:
        if length < len(self._tokens):
            self._logits = None
            del self._tokens[length:]
            self._cache.rewind(length)

    def _free(self) -> None:
        self._cache.close()


def _read_snapshot(name: str) -> dict[str, np.ndarray]:
    foreign = f"{name}: is no snapshot of such a session, or a damaged one"
    try:
        with open(name, "rb") as file:
            if not zipfile.is_zipfile(file):  # NumPy would take it for a pickle, and say how to load it unsafely
                raise InputError(f"{foreign} (it is no archive)")
            with zipfile.ZipFile(file) as archive:  # a few bytes of compressed zeros would fill the memory
                if sum(part.file_size for part in archive.infolist()) > os.path.getsize(name):
                    raise InputError(f"{foreign} (its parts are larger than the file)")
        with np.load(name, allow_pickle=False) as archive:
            if any(member.compress_type for member in archive.zip.infolist()):  # a small file may be endless so
                raise InputError(f"{foreign} (its parts are compressed)")
            if (version := int(archive["version"])) != _VERSION:
                raise InputError(f"{name}: is a snapshot of version {version}, this edge-qkv reads {_VERSION}")
            parts = {key: archive[key] for key in ("fingerprint", "tokens", *archive.files)}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or one_line(error)})") from None
    except Exception as error:  # NumPy and zipfile raise many kinds for what they cannot read
        raise InputError(f"{foreign} ({one_line(error)})") from None
    if not all(isinstance(part, np.ndarray) for part in parts.values()):
        raise InputError(f"{foreign} (it holds files that are no arrays)")
    return parts


def _fingerprint(package: Package) -> bytes:
    """Of the model's files, by the hashes in its manifest."""
    names = sorted(set(package.manifest["files"]) - {"tokenizer.json"})
    hashes = [(name, str(package.manifest["files"][name].get("sha256"))) for name in names]
    return hashlib.sha256(repr(hashes).encode()).hexdigest().encode()
