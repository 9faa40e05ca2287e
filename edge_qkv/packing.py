"""Packed weights: prepared once for this processor, then mapped from a file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from edge_qkv import _native
from edge_qkv.checks import thread_count
from edge_qkv.package import Package


def packed_directory() -> Path:
    """Where `pack` keeps packed weights unless told otherwise: edge-qkv below the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "edge-qkv"


def pack(package: str | Path, directory: str | Path | None = None, threads: int = 0, verify: bool = True) -> Path:
    """Prepares the weights of a package for this processor, in files that models then map: they load faster, and
    their memory is the kernel's to drop.

    Needs about twice the package's size in `directory` (None: `packed_directory()`) and, once, the memory of the
    weights. Returns the directory; raises `InputError`.
    """
    checked = Package.open(package, verify)
    folder = Path(directory) if directory is not None else packed_directory()
    _native.call("eqkv_model_pack", os.fsencode(checked.path), ctypes.byref(model_options(folder, threads=threads)))
    return folder


def is_packed(package: str | Path | Package, directory: str | Path | bool | None = None) -> bool:
    """Whether `pack` has prepared the package for this processor in `directory` (None: `packed_directory()`)."""
    path = package.path if isinstance(package, Package) else Path(package)
    packed = ctypes.c_int32()
    _native.call("eqkv_model_is_packed", os.fsencode(path), model_options(directory), ctypes.byref(packed))
    return bool(packed.value)


def model_options(packed: str | Path | bool | None, threads: int = 0) -> _native.ModelOptions:
    """The options of the C ABI; `packed` as `Model` takes it."""
    folder = None if packed is False else os.fsencode(packed_directory() if packed in (None, True) else packed)
    threads = thread_count(threads)
    library = os.fsencode(_native.onnxruntime_path())
    return _native.ModelOptions(engine_library=library, threads=threads, packed_weights=folder)
