"""Packed weights: prepared once for this processor, then mapped from a file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from edge_qkv import _native
from edge_qkv.checks import thread_count
from edge_qkv.errors import InputError
from edge_qkv.package import Package
from edge_qkv.targets import named


def packed_directory() -> Path:
    """Where `pack` keeps packed weights unless told otherwise: edge-qkv below the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "edge-qkv"


def pack(package: str | Path, directory: str | Path | None = None, threads: int = 0, verify: bool = True) -> Path:
    """Prepares the weights of a package for this processor, in files that models then map: they load faster, and
    their memory is the kernel's to drop.

    Needs about the package's size in `directory` (None: `packed_directory()`), with ONNX Runtime twice that, and once
    the memory of the weights. Returns the directory; raises `InputError`.
    """
    checked = Package.open(package, verify)
    if named(checked.target).hosted:
        raise InputError(f"{checked.path}: the engine of a {checked.target} package prepares its weights by itself")
    folder = Path(directory) if directory is not None else packed_directory()
    options = model_options(checked, folder, threads=threads)
    _native.call("eqkv_model_pack", os.fsencode(checked.path), ctypes.byref(options))
    return folder


def is_packed(package: str | Path | Package, directory: str | Path | bool | None = None) -> bool:
    """Whether `pack` has prepared the package for this processor in `directory` (None: `packed_directory()`)."""
    package = package if isinstance(package, Package) else Package.open(package, verify=False)
    if named(package.target).hosted:
        return False
    packed, options = ctypes.c_int32(), model_options(package, directory)
    _native.call("eqkv_model_is_packed", os.fsencode(package.path), ctypes.byref(options), ctypes.byref(packed))
    return bool(packed.value)


def model_options(package: Package, packed: str | Path | bool | None, threads: int = 0) -> _native.ModelOptions:
    """The options of the C ABI for a package; `packed` as `Model` takes it."""
    folder = None if packed is False else os.fsencode(packed_directory() if packed in (None, True) else packed)
    threads = thread_count(threads)
    library = _native.engine_library(package.target)
    library = None if library is None else os.fsencode(library)
    return _native.ModelOptions(engine_library=library, threads=threads, packed_weights=folder)
