"""ctypes declarations of `edge_qkv.h`, and nothing else: the native library as Python sees it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from ctypes import POINTER, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import edge_qkv
from edge_qkv.errors import Cancelled, ContextFull, EdgeQKVError, InputError, OverBudget

_ABI_VERSION = 4
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

# eqkv_status -> the exception it becomes.
_ERRORS = {
    1: InputError,
    2: InputError,
    3: InputError,
    4: EdgeQKVError,
    5: ContextFull,
    6: Cancelled,
    7: EdgeQKVError,
    8: OverBudget,
    9: InputError,  # a bad snapshot
}


class _Struct(ctypes.Structure):
    """A struct of the header: its first field says how large the caller believes it to be."""

    def __init__(self, **fields) -> None:
        super().__init__(ctypes.sizeof(self), **fields)


class MemoryInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("resident", c_uint64),
        ("anonymous", c_uint64),
        ("file_backed", c_uint64),
        ("peak_resident", c_uint64),
    ]


class PlanOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("memory", c_uint64),
        ("context", c_int64),
        ("prefill_chunk", c_int64),
        ("threads", c_int32),
        ("cache_type", c_char_p),
        ("packed", c_int32),
        ("engine", c_char_p),
        ("margin", c_int64),
    ]


class PlanInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_int64),
        ("prefill_chunk", c_int64),
        ("threads", c_int32),
        ("cache_type", c_char_p),
        ("weights_file", c_uint64),
        ("weights_anonymous", c_uint64),
        ("cache", c_uint64),
        ("workspace", c_uint64),
        ("engine_file", c_uint64),
        ("engine_anonymous", c_uint64),
        ("expected", c_uint64),
        ("margin", c_uint64),
        ("total", c_uint64),
        ("anonymous", c_uint64),
        ("weight_bytes", c_uint64),
        ("matrix_bytes", c_uint64),
    ]


class ModelOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine_library", c_char_p),
        ("threads", c_int32),
        ("memory", c_uint64),
        ("context", c_int64),
        ("prefill_chunk", c_int64),
        ("packed_weights", c_char_p),
        ("spill", c_char_p),
    ]


class ModelInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine", c_char_p),
        ("cache_type", c_char_p),
        ("vocab_size", c_int64),
        ("layers", c_int64),
        ("max_positions", c_int64),
        ("cache_bytes_per_token", c_int64),
        ("packed", c_int32),
        ("context", c_int64),
        ("fingerprint", c_char * 65),
        ("description", c_char_p),
    ]


class SessionOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_int64),
        ("prefill_chunk", c_int64),
        ("overflow", c_int32),
        ("sinks", c_int64),
        ("window", c_int64),
        ("block", c_int64),
        ("margin", c_int64),
    ]


class SamplerOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("repetition_window", c_int32),
        ("seed", c_uint64),
    ]


class SessionInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("length", c_int64),
        ("context", c_int64),
        ("cache_used", c_uint64),
        ("cache_committed", c_uint64),
        ("cache_reserved", c_uint64),
        ("dropped", c_int64),
    ]


PROGRESS = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)  # eqkv_progress

# name -> argument types, for the functions that return an eqkv_status.
_FUNCTIONS = {
    "eqkv_memory": [POINTER(MemoryInfo)],
    "eqkv_plan": [c_char_p, POINTER(PlanOptions), POINTER(PlanInfo)],
    "eqkv_plan_package": [c_char_p, POINTER(PlanOptions), POINTER(PlanInfo)],
    "eqkv_model_pack": [c_char_p, POINTER(ModelOptions)],
    "eqkv_model_is_packed": [c_char_p, POINTER(ModelOptions), POINTER(c_int32)],
    "eqkv_model_open": [c_char_p, POINTER(ModelOptions), POINTER(c_void_p)],
    "eqkv_model_get_info": [c_void_p, POINTER(ModelInfo)],
    "eqkv_model_trim": [c_void_p, c_int],
    "eqkv_model_watch_pressure": [c_void_p, c_char_p],
    "eqkv_session_open": [c_void_p, POINTER(SessionOptions), POINTER(c_void_p)],
    "eqkv_session_evaluate": [c_void_p, POINTER(c_int32), c_size_t, POINTER(c_float)],
    "eqkv_session_logits": [c_void_p, POINTER(POINTER(c_float))],
    "eqkv_session_set_sampler": [c_void_p, POINTER(SamplerOptions)],
    "eqkv_session_sample": [c_void_p, POINTER(c_int32)],
    "eqkv_sample": [POINTER(c_float), c_size_t, POINTER(c_int32), c_size_t, POINTER(SamplerOptions), POINTER(c_int32)],
    "eqkv_session_rewind": [c_void_p, c_int64, PROGRESS, c_void_p, POINTER(c_int64)],
    "eqkv_session_match": [c_void_p, POINTER(c_int32), c_size_t, POINTER(c_int64)],
    "eqkv_session_fork": [c_void_p, POINTER(c_void_p)],
    "eqkv_session_save": [c_void_p, c_char_p],
    "eqkv_session_restore": [c_void_p, c_char_p],
    "eqkv_session_tokens": [c_void_p, POINTER(c_int32), c_size_t, POINTER(c_size_t)],
    "eqkv_session_fill": [c_void_p, c_int64, c_uint64],
    "eqkv_session_length": [c_void_p, POINTER(c_int64)],
    "eqkv_session_get_info": [c_void_p, POINTER(SessionInfo)],
}
_CLOSERS = ("eqkv_model_close", "eqkv_session_close", "eqkv_session_cancel")


def library_path() -> Path:
    """Where libedge_qkv is: EDGE_QKV_LIBRARY, or beside the installed package."""
    if forced := os.environ.get("EDGE_QKV_LIBRARY"):
        return Path(forced)
    for folder in edge_qkv.__path__:
        if (path := Path(folder) / "lib" / f"libedge_qkv{_SUFFIX}").exists():
            return path
    raise InputError("libedge_qkv is not beside the edge_qkv package; install it with `pip install .`")


def onnxruntime_path() -> Path:
    """The shared library inside the installed onnxruntime wheel; the wheel itself is not imported."""
    spec = importlib.util.find_spec("onnxruntime")
    folders = [Path(p) / "capi" for p in (spec.submodule_search_locations if spec else ())]
    found = [p for folder in folders for p in sorted(folder.glob(f"*onnxruntime*{_SUFFIX}*")) if _is_runtime(p.name)]
    if not found:
        raise InputError("onnxruntime is not installed; install it with `pip install onnxruntime`")
    return found[-1]


def _is_runtime(name: str) -> bool:
    return name.startswith(("libonnxruntime.", "onnxruntime.dll"))


def executorch_path() -> Path | None:
    """Our library for ExecuTorch, beside libedge_qkv; None where it was not built, which libedge_qkv reports."""
    path = library_path().with_name(f"libedge_qkv_executorch{_SUFFIX}")
    return path if path.exists() else None


# Target of a package -> where the shared library of its engine is, unless libedge_qkv finds it by itself.
_ENGINE_LIBRARIES = {"onnx": onnxruntime_path}


def engine_library(target: str) -> Path | None:
    """The shared library of the engine that runs a target's packages; None: libedge_qkv finds it."""
    find = _ENGINE_LIBRARIES.get(target)
    return find() if find else None


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library once and declares its functions."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
        version = lib.eqkv_abi_version()
    except (OSError, AttributeError) as error:
        raise InputError(f"{path}: cannot be loaded ({error}); install edge-qkv again") from None
    if version != _ABI_VERSION:
        raise InputError(
            f"{path}: has ABI version {version}, this package needs {_ABI_VERSION}; install edge-qkv again"
        )
    for name, arguments in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int
    for name in _CLOSERS:
        function = getattr(lib, name)
        function.argtypes, function.restype = [c_void_p], None
    for name in ("eqkv_isa", "eqkv_last_error"):
        getattr(lib, name).restype = c_char_p
    return lib


def call(name: str, *arguments) -> None:
    """Calls a function that returns a status; raises the exception of this package that fits it."""
    lib = library()
    if status := getattr(lib, name)(*arguments):
        raise _ERRORS.get(status, EdgeQKVError)(lib.eqkv_last_error().decode(errors="replace"))
