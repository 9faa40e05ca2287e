"""What runs a package: the native library, or an engine that Python hosts. One file each, and one interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_qkv import _native
from edge_qkv.package import Package
from edge_qkv.targets import named


@dataclass(frozen=True)
class ModelOptions:
    """What a model is opened with; the names are those of `edge_qkv.Model`."""

    threads: int = 0
    memory: int = 0  # bytes; 0: no budget
    context: int = 0  # tokens; 0: the longest that the budget holds
    prefill_chunk: int = 0
    packed: object = None
    spill: object = None


class EngineSession(Protocol):
    """One conversation in an engine: its tokens, their cache, and the logits after the last of them."""

    def evaluate(self, tokens: np.ndarray, logits: np.ndarray | None) -> None:
        """Appends tokens [n] int32; `logits` [n, V] float32 receives those after each of them."""

    def logits(self) -> np.ndarray:
        """[V] float32, of the caller."""

    def set_sampler(self, options: _native.SamplerOptions) -> None: ...

    def sample(self) -> int: ...

    def rewind(self, length: int, progress: Callable[[int, int], None] | None = None) -> int:
        """Forgets all but the first `length` tokens; returns how many of them had to be evaluated again, of which
        progress(done, total) is told."""

    def match(self, tokens: np.ndarray) -> int:
        """Rewinds to what the conversation has in common with `tokens`, leaving one of them to evaluate where the
        logits are not there; returns its length."""

    def fill(self, length: int, seed: int) -> None: ...

    def cancel(self) -> None: ...

    def save(self, path: bytes) -> None: ...

    def restore(self, path: bytes) -> None: ...

    def fork(self) -> EngineSession: ...

    def tokens(self) -> np.ndarray: ...

    def info(self) -> _native.SessionInfo: ...

    def close(self) -> None: ...


class EngineModel(Protocol):
    info: _native.ModelInfo

    def open_session(self, options: _native.SessionOptions) -> EngineSession: ...

    def trim(self, level: int) -> None: ...

    def watch_pressure(self, cgroup: bytes | None) -> None: ...

    def close(self) -> None: ...


def open_model(package: Package, options: ModelOptions) -> EngineModel:
    """Opens a package in the engine of its target; raises `InputError`."""
    engine = importlib.import_module(f"edge_qkv.engines.{named(package.target).hosted or 'native'}")
    return engine.open_model(package, options)
