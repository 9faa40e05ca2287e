"""The native library's engines: models and sessions of the C ABI."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

from edge_qkv import _native
from edge_qkv.engines import ModelOptions
from edge_qkv.engines.closable import Closable
from edge_qkv.errors import Cancelled, InputError
from edge_qkv.package import Package
from edge_qkv.packing import model_options


class _Handle(Closable):
    """Owns a handle of the library."""

    _close_function: str

    def __init__(self) -> None:
        super().__init__()
        self._handle = ctypes.c_void_p()

    def call(self, name: str, *arguments) -> None:
        with self._call():
            _native.call(name, self._handle, *arguments)

    def _free(self) -> None:
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            getattr(_native.library(), self._close_function)(handle)


class NativeModel(_Handle):
    _what, _close_function = "model", "eqkv_model_close"

    def __init__(self, package: Package, options: ModelOptions) -> None:
        super().__init__()
        given = model_options(package, options.packed, threads=options.threads)
        given.memory, given.context, given.prefill_chunk = options.memory, options.context, options.prefill_chunk
        given.spill = None if options.spill is None else os.fsencode(options.spill)
        path = os.fsencode(package.path)
        _native.call("eqkv_model_open", path, ctypes.byref(given), ctypes.byref(self._handle))
        self.info = _native.ModelInfo()
        self.call("eqkv_model_get_info", ctypes.byref(self.info))
        self._check_against_manifest(package)

    def open_session(self, options: _native.SessionOptions) -> NativeSession:
        session = NativeSession(self.info.vocab_size, options.context)
        self.call("eqkv_session_open", ctypes.byref(options), ctypes.byref(session._handle))
        return session

    def trim(self, level: int) -> None:
        self.call("eqkv_model_trim", level)

    def watch_pressure(self, cgroup: bytes | None) -> None:
        self.call("eqkv_model_watch_pressure", cgroup)

    def _check_against_manifest(self, package: Package) -> None:
        config, path, info = package.config, package.path, self.info
        cache = info.cache_type.decode()
        if cache != package.manifest.get("cache") or info.cache_bytes_per_token != config.cache_bytes_per_token(cache):
            raise InputError(f"{path}: edge_qkv.json and the model file disagree on the cache; export again")
        expected = {
            "vocab_size": config.vocab_size,
            "layers": len(config.layers),
            "max_positions": config.max_positions,
        }
        for field, value in expected.items():
            if getattr(info, field) != value:
                raise InputError(
                    f"{path}: edge_qkv.json and the model file disagree on {field} ({value} and "
                    f"{getattr(info, field)}); export the package again"
                )


class NativeSession(_Handle):
    _what, _close_function = "session", "eqkv_session_close"

    def __init__(self, vocab_size: int, context: int) -> None:
        super().__init__()
        self._vocab_size, self._context = vocab_size, context

    def evaluate(self, tokens: np.ndarray, logits: np.ndarray | None) -> None:
        out = None if logits is None else _pointer(logits, ctypes.c_float)
        self.call("eqkv_session_evaluate", _pointer(tokens, ctypes.c_int32), len(tokens), out)

    def logits(self) -> np.ndarray:
        pointer = ctypes.POINTER(ctypes.c_float)()
        with self._call():  # what it points to is the session's
            _native.call("eqkv_session_logits", self._handle, ctypes.byref(pointer))
            return np.ctypeslib.as_array(pointer, (self._vocab_size,)).copy()

    def set_sampler(self, options: _native.SamplerOptions) -> None:
        self.call("eqkv_session_set_sampler", ctypes.byref(options))

    def sample(self) -> int:
        token = ctypes.c_int32()
        self.call("eqkv_session_sample", ctypes.byref(token))
        return token.value

    def rewind(self, length: int, progress: Callable[[int, int], None] | None = None) -> int:
        again, raised = ctypes.c_int64(), []

        def report(_, done: int, total: int) -> None:
            """What is raised here, a Ctrl-C too, would be lost in the library: it is raised again after the call."""
            try:
                if progress:
                    progress(done, total)
            except BaseException as error:
                raised.append(error)
                if done < total:  # else there is nothing left to stop, and the next evaluation would be
                    self.cancel()

        try:
            self.call("eqkv_session_rewind", length, _native.PROGRESS(report), None, ctypes.byref(again))
        except Cancelled:
            if not raised:
                raise
        if raised:
            raise raised[0]
        return again.value

    def match(self, tokens: np.ndarray) -> int:
        kept = ctypes.c_int64()
        self.call("eqkv_session_match", _pointer(tokens, ctypes.c_int32), len(tokens), ctypes.byref(kept))
        return kept.value

    def fill(self, length: int, seed: int) -> None:
        self.call("eqkv_session_fill", length, seed)

    def cancel(self) -> None:
        if self._handle:  # not through `call`, which would wait for what is to be stopped
            _native.library().eqkv_session_cancel(self._handle)

    def save(self, path: bytes) -> None:
        self.call("eqkv_session_save", path)

    def restore(self, path: bytes) -> None:
        self.call("eqkv_session_restore", path)

    def fork(self) -> NativeSession:
        other = NativeSession(self._vocab_size, self._context)
        self.call("eqkv_session_fork", ctypes.byref(other._handle))
        return other

    def tokens(self) -> np.ndarray:
        count, tokens = ctypes.c_size_t(), np.empty(self._context, np.int32)
        self.call("eqkv_session_tokens", _pointer(tokens, ctypes.c_int32), len(tokens), ctypes.byref(count))
        return tokens[: count.value]

    def info(self) -> _native.SessionInfo:
        info = _native.SessionInfo()
        self.call("eqkv_session_get_info", ctypes.byref(info))
        return info


def _pointer(array: np.ndarray, kind: type):
    return array.ctypes.data_as(ctypes.POINTER(kind))


open_model = NativeModel
