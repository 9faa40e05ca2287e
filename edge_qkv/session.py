"""Models and sessions: a thin layer over the C ABI that adds text.

A `Model` is loaded once; each `Session` on it is one conversation with its own cache. A session is used by
one thread at a time, `cancel` excepted; sessions of one model may run in parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from edge_qkv import _native
from edge_qkv.errors import ContextFull, InputError
from edge_qkv.package import Package, encode
from edge_qkv.text import stream_text, until_stop

DEFAULT_CONTEXT = 4096
DEFAULT_CHUNK = 128


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; 0, 1, 0 and 1 leave a filter out.

    Filters act in this order: repetition penalty, temperature, top-k, top-p, min-p. A choice depends on the
    seed, the logits and the tokens so far alone, so the same seed and prompt give the same text, after a
    rewind as well. `seed` None draws a new one each time.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, sound, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "must be 0 (greedy) or above"),
            ("top_k", 0 <= self.top_k < 2**31, "must be 0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 (off) and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "must be above 0; 1 is off"),
            ("repetition_window", 0 <= self.repetition_window < 2**31, "must be 0 (the whole session) or above"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "must be from 0 to 2**64 - 1"),
        ):
            if not sound:
                raise InputError(f"{name} = {getattr(self, name)}: {rule}")


class _NativeObject:
    """Owns a handle of the native library: closed once, at the end of `with` or of the object's life."""

    _close_function: str

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        self._in_use = threading.Lock()  # held during a call, so that closing waits for it

    def _call(self, name: str, *arguments) -> None:
        with self._in_use:
            if not self._handle:
                raise InputError(f"the {type(self).__name__.lower()} is closed; open a new one")
            _native.call(name, self._handle, *arguments)

    def close(self) -> None:
        """Frees the memory, after a call that another thread is in; the object must not be used after."""
        with self._in_use:
            handle, self._handle = self._handle, ctypes.c_void_p()
            if handle:
                getattr(_native.library(), self._close_function)(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Model(_NativeObject):
    """A loaded package. `threads` 0 uses one a core; `verify` checks every file's SHA-256 first."""

    _close_function = "eqkv_model_close"

    def __init__(self, package: str | Path, threads: int = 0, verify: bool = True) -> None:
        super().__init__()
        if not 0 <= threads <= 256:
            raise InputError(f"threads = {threads}: must be between 0 (one for each core) and 256")
        self.package = Package.open(package, verify)
        options = _native.ModelOptions(engine_library=os.fsencode(_native.onnxruntime_path()), threads=threads)
        path = os.fsencode(self.package.path)
        _native.call("eqkv_model_open", path, ctypes.byref(options), ctypes.byref(self._handle))
        self.config = self.package.config
        self.info = _native.ModelInfo()
        self._call("eqkv_model_get_info", ctypes.byref(self.info))
        cache = self.info.cache_type.decode()
        if cache != self.package.manifest.get("cache") or self.info.cache_bytes_per_token != (
            self.config.cache_bytes_per_token(cache)
        ):
            raise InputError(
                f"{self.package.path}: edge_qkv.json and the model file disagree on the cache; export again"
            )
        for field in ("vocab_size", "layers", "kv_heads", "head_dim", "max_positions"):
            if getattr(self.info, field) != getattr(self.config, field):
                raise InputError(
                    f"{self.package.path}: edge_qkv.json and the model file disagree on {field} "
                    f"({getattr(self.config, field)} and {getattr(self.info, field)}); export the package again"
                )


class Session(_NativeObject):
    """One conversation.

    package: a package directory or a loaded `Model`; context: capacity in tokens (memory is committed as
    rows are written); prefill_chunk: tokens evaluated at once. Raises `InputError`.
    """

    _close_function = "eqkv_session_close"

    def __init__(
        self,
        package: str | Path | Model,
        context: int | None = None,
        prefill_chunk: int = DEFAULT_CHUNK,
        threads: int = 0,
        verify: bool = True,
    ) -> None:
        super().__init__()
        self.model = package if isinstance(package, Model) else Model(package, threads, verify)
        limit = self.model.config.max_positions
        context = min(DEFAULT_CONTEXT, limit) if context is None else context
        if not 1 <= context <= limit:
            raise InputError(f"context = {context}: must be between 1 and {limit}, the most this model allows")
        if not 1 <= prefill_chunk <= 1 << 20:
            raise InputError(f"prefill_chunk = {prefill_chunk}: must be between 1 and {1 << 20}")
        self.context, self.prefill_chunk = context, prefill_chunk
        options = _native.SessionOptions(context=context, prefill_chunk=prefill_chunk)
        self.model._call("eqkv_session_open", ctypes.byref(options), ctypes.byref(self._handle))
        self.tokens: list[int] = []  # the conversation; the last one may not be evaluated yet
        self.timing = Timing()

    # ---- tokens ----

    def evaluate(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> None:
        """Appends tokens to the conversation and computes what follows them.

        progress(done, total) is called after each chunk. Raises `ContextFull` before anything is evaluated
        when the tokens do not fit, `Cancelled` after `cancel` (chunks already evaluated stay).
        """
        self._append(tokens)
        self._evaluate_rest(progress)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Like `evaluate`, and returns the logits after each of the tokens: [len(tokens), vocab_size]."""
        self._evaluate_rest()
        self._append(tokens)
        logits = np.empty((len(tokens), self.model.config.vocab_size), np.float32)
        self._evaluate_rest(logits=logits)
        return logits

    def logits(self) -> np.ndarray:
        """The logits after the last token, [vocab_size]."""
        self._evaluate_rest()
        pointer = ctypes.POINTER(ctypes.c_float)()
        self._call("eqkv_session_logits", ctypes.byref(pointer))
        return np.ctypeslib.as_array(pointer, (self.model.config.vocab_size,)).copy()

    def set_sampling(self, sampling: Sampling) -> None:
        """Chooses how `sample` works from now on."""
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        values = {f.name: getattr(sampling, f.name) for f in fields(sampling)} | {"seed": seed}
        options = _native.SamplerOptions(**values)
        self._call("eqkv_session_set_sampler", ctypes.byref(options))

    def sample(self) -> int:
        """Chooses the next token; it is not appended."""
        self._evaluate_rest()
        token = ctypes.c_int32()
        self._call("eqkv_session_sample", ctypes.byref(token))
        return token.value

    def rewind(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise InputError(f"rewind to {length}: the session has {len(self.tokens)} tokens")
        if length < self._rows():
            self._call("eqkv_session_rewind", length)
        del self.tokens[length:]

    def fill(self, length: int, seed: int = 0) -> None:
        """Fills the cache to `length` rows of noise, to measure a deep context without its prefill."""
        self._evaluate_rest()
        self._call("eqkv_session_fill", length, seed)
        self.tokens += [0] * (length - len(self.tokens))

    def cancel(self) -> None:
        """Stops the evaluation that is running, or else the next one.

        Any thread may call it, but not at the same time as `close`.
        """
        if self._handle:
            _native.library().eqkv_session_cancel(self._handle)

    # ---- text ----

    def generate_tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[int]:
        """Appends the prompt and yields the tokens that follow, until one that ends a text or `max_tokens`."""
        if max_tokens < 1:
            raise InputError(f"max_tokens = {max_tokens}: must be at least 1")
        if not len(prompt) and not self.tokens:
            raise InputError("the prompt has no tokens; give at least one")
        self.set_sampling(sampling or Sampling())
        before = self._rows()
        began = time.perf_counter()
        self.evaluate(prompt, progress)
        self.timing = Timing(prefill_tokens=self._rows() - before, prefill_seconds=time.perf_counter() - began)
        for _ in range(max_tokens):
            began = time.perf_counter()
            # One token ahead of the cache: what was yielded is evaluated only when more is asked for.
            self._evaluate_rest(keep=True)
            token = self.sample()
            self.timing.decode_seconds += time.perf_counter() - began
            self.timing.decode_tokens += 1
            if token in self.model.package.stop_tokens:
                return
            self._append([token])
            yield token

    def generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[str]:
        """Appends the prompt and yields the text that follows in pieces of whole characters.

        Ends at a token that ends a text, at a stop string (not yielded), or after `max_tokens`; raises
        `ContextFull` when the context is full before that.
        """
        tokenizer = self.model.package.tokenizer()
        ids = encode(tokenizer, prompt, self.model.package.stop_tokens, start=not self.tokens)
        stop = [stop] if isinstance(stop, str) else stop
        return until_stop(stream_text(tokenizer, ids, self.generate_tokens(ids, max_tokens, sampling, progress)), stop)

    # ---- state ----

    def memory(self) -> dict[str, int]:
        """Bytes, from the kernel's own accounting: this process (resident, anonymous, file_backed,
        peak_resident) and this session's cache (cache_used, cache_committed, cache_reserved)."""
        process, session = _native.MemoryInfo(), self._info()
        _native.call("eqkv_memory", ctypes.byref(process))
        names = ("resident", "anonymous", "file_backed", "peak_resident")
        caches = ("cache_used", "cache_committed", "cache_reserved")
        return {n: getattr(process, n) for n in names} | {n: getattr(session, n) for n in caches}

    # ---- inside ----

    def _info(self) -> _native.SessionInfo:
        info = _native.SessionInfo()
        self._call("eqkv_session_get_info", ctypes.byref(info))
        return info

    def _rows(self) -> int:
        """Tokens in the cache."""
        length = ctypes.c_int64()
        self._call("eqkv_session_length", ctypes.byref(length))
        return length.value

    def _append(self, tokens: Sequence[int]) -> None:
        vocabulary, total = self.model.config.vocab_size, len(self.tokens) + len(tokens)
        bad = next((t for t in tokens if not 0 <= t < vocabulary), None)
        if bad is not None:
            raise InputError(f"token {bad} is outside the model's vocabulary of {vocabulary}")
        if total > self.context:
            raise ContextFull(
                f"{len(tokens)} more tokens do not fit: {len(self.tokens)} of the context of {self.context} are used; "
                f"give a larger context (this model allows {self.model.config.max_positions}) or fewer tokens"
            )
        self.tokens.extend(int(t) for t in tokens)

    def _evaluate_rest(
        self,
        progress: Callable[[int, int], None] | None = None,
        logits: np.ndarray | None = None,
        keep: bool = False,
    ) -> None:
        """Evaluates the tokens that are not in the cache yet, a chunk at a time so that Ctrl-C is heard.

        logits [tokens, vocab_size] receives those of each of them when given. When it is stopped, the tokens
        that are left are forgotten, unless `keep` says that the caller was already given them.
        """
        start = self._rows()
        total, done = len(self.tokens) - start, 0
        try:
            while done < total:
                done += self._evaluate_chunk(None if logits is None else logits[done:])
                if progress:
                    progress(done, total)
        except BaseException:
            if not keep:
                del self.tokens[self._rows() :]
            raise

    def _evaluate_chunk(self, logits: np.ndarray | None) -> int:
        start = self._rows()
        chunk = np.asarray(self.tokens[start : start + self.prefill_chunk], np.int32)
        tokens = chunk.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        out = logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if logits is not None else None
        self._call("eqkv_session_evaluate", tokens, len(chunk), out)
        return len(chunk)


@dataclass
class Timing:
    """Where the last generation's time went."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
