"""Packed weights: prepared once for this processor, then mapped from a file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from edge_qkv import _native
from edge_qkv.checks import thread_count
from edge_qkv.errors import InputError
from edge_qkv.package import Package, Progress
from edge_qkv.targets import named


def packed_directory() -> Path:
    """Where `pack` keeps packed weights unless told otherwise: edge-qkv below the user's cache directory.

    Raises `InputError` where there is none, as for a process without HOME whose user the system does not know.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise InputError(
            "there is no home directory to keep files in; name a directory (--output), or set XDG_CACHE_HOME"
        ) from None
    return Path(base) / "edge-qkv"


def _packed_directory_if_any() -> Path | None:
    """Nobody can have packed weights by default where there is no such directory."""
    try:
        return packed_directory()
    except InputError:
        return None


def pack(
    package: str | Path,
    directory: str | Path | None = None,
    threads: int = 0,
    verify: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Prepares the weights of a package for this processor, in files that models then map: they load faster, and
    their memory is the kernel's to drop.

    Needs about the package's size in `directory` (None: `packed_directory()`), with ONNX Runtime twice that, and once
    the memory of the weights. progress: of `Package.verify`. Returns the directory; raises `InputError`.
    """
    checked = Package.open(package, verify, progress)
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
    if packed is None:
        packed = _packed_directory_if_any()
    elif packed is True:
        packed = packed_directory()
    folder = os.fsencode(packed) if packed else None
    threads = thread_count(threads)
    library = _native.engine_library(package.target)
    library = None if library is None else os.fsencode(library)
    return _native.ModelOptions(engine_library=library, threads=threads, packed_weights=folder)
