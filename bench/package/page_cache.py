"""The kernel's copies of files in memory: what is left of them, dropping them, and making them again."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop(files: Iterable[Path]) -> None:
    """Asks the kernel to forget the pages of `files`; those that a process maps, and on some systems all, stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not on the disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Iterable[Path]) -> None:
    """Reads `files`, so that their pages are there."""
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(files: Iterable[Path]) -> float:
    """The part of the pages of `files` that is in memory, 0 to 1. Of another user's files the kernel says 1."""
    cached = total = 0
    for path in files:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                continue
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        pages = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size)
        if ctypes.CDLL(None).mincore(address, length, ctypes.c_void_p(pages.ctypes.data)) != 0:
            return 1.0
        cached, total = cached + int((pages & 1).sum()), total + pages.size
    return cached / total if total else 1.0
