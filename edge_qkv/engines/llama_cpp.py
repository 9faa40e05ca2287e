"""GGUF packages in llama.cpp, through the low-level interface of llama-cpp-python. The processor computes, no GPU.

A session is a context of llama.cpp. It allocates the cache of the whole context at its start, rounded up to 256 tokens,
keys and values both unless the model reads its values from the keys, and beside it buffers that grow with the prefill
chunk: a call takes at most that many tokens (n_batch and n_ubatch). With a cache in fp16 attention is llama.cpp's flash
attention; that computes in fp16 whatever the cache, so one in fp32 does without, and its buffers then grow with the
context as well. Weights stay the pages of the file: llama.cpp is told not to pack them for the processor, which would
copy them into memory of its own.

`cancel` also stops a call: llama.cpp asks after each operation of its graph, and is answered by the native library, for
asking Python would make it wait for whatever else Python does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from edge_qkv import _native
from edge_qkv.engines import ModelOptions
from edge_qkv.engines.hosted import HostedModel, refuse_options
from edge_qkv.engines.llama_state import Layout
from edge_qkv.errors import Cancelled, EdgeQKVError, InputError, one_line
from edge_qkv.package import Package
from edge_qkv.processors import processors
from edge_qkv.targets import named

_TYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}
_ALL = -1  # to the end, of a range of positions
_ABORTED = 2
_ERROR = 4  # a level of llama.cpp's messages
_Result = TypeVar("_Result")


def open_model(package: Package, options: ModelOptions) -> HostedModel:
    refuse_options(package, options, threads=True)
    layout = _layout(package)
    model = _Model(package)
    threads = options.threads or processors()

    def new_cache(context: int, chunk: int, cancelled: ctypes.c_int32) -> LlamaCache:
        return LlamaCache(model, layout, context, min(chunk, context), threads, cancelled)

    return HostedModel(package, "llama.cpp", new_cache, model.drop)


class LlamaCache:
    """A context of llama.cpp, with one sequence in it."""

    def __init__(
        self, model: _Model, layout: Layout, context: int, chunk: int, threads: int, cancelled: ctypes.c_int32
    ) -> None:
        self._llama = llama = _library()
        self._layout, self._cancelled, self._vocabulary = layout, cancelled, model.vocabulary
        self.most_tokens = chunk
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, chunk, chunk
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _ggml_type(llama, layout)
        params.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_DISABLED if layout.transposed else llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        params.offload_kqv = params.op_offload = False
        params.abort_callback = ctypes.cast(_native.library().eqkv_is_set, llama.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(cancelled)
        self._model, self._context = model.take(), None
        try:
            self._context, log = _logged(lambda: llama.llama_init_from_model(model.pointer, params), llama.llama_free)
            if not self._context:
                raise EdgeQKVError(
                    f"{model.path}: llama.cpp cannot open a session of {context} tokens ({log}); "
                    "give a smaller context, or close other sessions"
                )
        except BaseException:
            self.close()
            raise
        self._memory = llama.llama_get_memory(self._context)
        self.bytes = llama.llama_n_ctx(self._context) * layout.bytes_per_token

    def evaluate(self, tokens: np.ndarray, past: int, every: bool) -> np.ndarray:
        # What is not wanted after a rewind, or was left by a call that an exception ended.
        self._forget(past)
        count = len(tokens)
        ids, positions = np.ascontiguousarray(tokens, np.int32), np.arange(past, past + count, dtype=np.int32)
        wanted = np.full(count, every, np.int8)
        wanted[-1] = True
        batch = self._llama.llama_batch(n_tokens=count)  # without sequences all are in the first
        for name, values in (("token", ids), ("pos", positions), ("logits", wanted)):
            setattr(batch, name, values.ctypes.data_as(type(getattr(batch, name))))
        status = self._llama.llama_decode(self._context, batch)
        if status == _ABORTED:
            raise Cancelled("The evaluation was cancelled.")
        if status:
            raise EdgeQKVError(f"llama.cpp could not evaluate {count} tokens (it returned {status})")
        logits = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (count if every else 1, self._vocabulary)).copy()

    def rewind(self, length: int) -> None:
        """The rows go with the next evaluation."""

    def read(self, length: int) -> dict[str, np.ndarray]:
        if length == 0:
            return self._layout.empty()
        state = np.empty(self._llama.llama_state_seq_get_size(self._context, 0), np.uint8)
        written = self._llama.llama_state_seq_get_data(self._context, _pointer(state), len(state), 0)
        return self._layout.split(state[:written], length)

    def write(self, parts: dict[str, np.ndarray], length: int) -> None:
        if not self._layout.fits(parts, length):
            raise InputError("its cache has another shape than this model's")
        if length == 0:
            self._forget(0)
            return
        state = self._layout.join(parts)
        if self._llama.llama_state_seq_set_data(self._context, _pointer(state), len(state), 0) != len(state):
            raise EdgeQKVError("this version of llama.cpp does not take the state of a session back")

    def fill(self, past: int, length: int, seed: int) -> None:
        generator, rows = np.random.default_rng(seed), self.read(past)
        shape = (self._layout.layers, length - past, self._layout.width)
        for name in rows:
            noise = generator.standard_normal(shape, np.float32).astype(self._layout.dtype)
            rows[name] = np.concatenate([rows[name], noise], axis=1)
        self.write(rows, length)

    def close(self) -> None:
        if self._context:
            self._llama.llama_free(self._context)
            self._context = None
        if self._model:
            self._model.drop()
            self._model = None

    def _forget(self, length: int) -> None:
        if self._llama.llama_memory_seq_pos_max(self._memory, 0) >= length:
            self._llama.llama_memory_seq_rm(self._memory, 0, length, _ALL)


class _Model:
    """The weights, freed when the model is closed and the last of its sessions as well."""

    def __init__(self, package: Package) -> None:
        self._llama = llama = _library()
        self.path = path = package.path / named("gguf").model_file
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, False
        self.pointer, log = _logged(
            lambda: llama.llama_model_load_from_file(os.fsencode(path), params), llama.llama_model_free
        )
        if not self.pointer:
            raise InputError(f"{path}: llama.cpp cannot open it ({log}); export the package again")
        self._users, self._lock = 1, threading.Lock()
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.pointer))
        config = package.config
        for field, expected, found in (
            ("vocab_size", config.vocab_size, self.vocabulary),
            ("layers", len(config.layers), llama.llama_model_n_layer(self.pointer)),
            ("width", config.width, llama.llama_model_n_embd(self.pointer)),
            ("heads", config.only.heads, llama.llama_model_n_head(self.pointer)),
            ("max_positions", config.max_positions, llama.llama_model_n_ctx_train(self.pointer)),
        ):
            if expected != found:
                self.drop()
                raise InputError(
                    f"{package.path}: edge_qkv.json and the model file disagree on {field} ({expected} and {found}); "
                    "export the package again"
                )

    def take(self) -> _Model:
        with self._lock:
            self._users += 1
        return self

    def drop(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._llama.llama_model_free(self.pointer)


def _layout(package: Package) -> Layout:
    spec, dtype = package.config.only, _TYPES.get(str(package.manifest.get("cache")))
    for parts in (("keys",), ("keys", "values")):
        layout = Layout(len(package.config.layers), spec.kv_heads * spec.head_dim, dtype, parts, dtype == np.float32)
        if dtype and layout.bytes_per_token == package.cache_bytes_per_token:
            return layout
    raise InputError(f"{package.path}: has a cache that llama.cpp has not; export the package again")


def _ggml_type(llama: Any, layout: Layout) -> int:
    return llama.GGML_TYPE_F32 if layout.dtype == np.float32 else llama.GGML_TYPE_F16


def _pointer(state: np.ndarray):
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


# ---- the library ----


class _Log:
    """The first error of a call that fails, for a sentence of ours."""

    def __init__(self) -> None:
        self.error, self.lock = "", threading.Lock()
        self.hears: Any = None  # `hear`, as llama.cpp calls it, and
        self.ignores: Any = None  # what it calls instead at other times: a function that heeds no argument

    def hear(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR and not self.error:
            self.error = one_line(Exception(text.decode(errors="replace"))).rstrip(".")


_log = _Log()


@functools.cache
def _library() -> Any:
    """The module `llama_cpp`, its messages silenced in this whole process; raises `InputError`."""
    # When llama.cpp finds a file so wrong that it ends the process, it would first wait for a debugger to look at it.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp
    except ImportError:
        raise InputError(
            "GGUF packages need llama-cpp-python; run pip install 'edge-qkv[llama-cpp]', "
            "which builds it from source and takes minutes"
        ) from None
    except Exception as error:  # it raises what it likes where its own library does not load
        raise InputError(f"llama-cpp-python cannot be loaded ({one_line(error)}); install it again") from None
    if not hasattr(llama_cpp, "LLAMA_FLASH_ATTN_TYPE_ENABLED"):
        raise InputError("llama-cpp-python is too old; run pip install --upgrade 'edge-qkv[llama-cpp]'")
    _log.hears = llama_cpp.llama_log_callback(_log.hear)
    _log.ignores = ctypes.cast(_native.library().eqkv_abi_version, llama_cpp.llama_log_callback)
    llama_cpp.llama_log_set(_log.ignores, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _logged(call: Callable[[], _Result], undo: Callable[[_Result], None]) -> tuple[_Result, str]:
    """The result of a call and the first error that llama.cpp reported.

    It reports to Python meanwhile, so the call has a thread of its own: in the main one signals are heard wherever
    Python runs, and no exception leaves a callback.
    """
    llama = _library()
    with _log.lock, ThreadPoolExecutor(1) as pool:
        _log.error = ""
        llama.llama_log_set(_log.hears, None)
        running = pool.submit(call)
        try:
            return running.result(), _log.error
        except BaseException:
            if result := running.result():
                undo(result)
            raise
        finally:
            llama.llama_log_set(_log.ignores, None)
