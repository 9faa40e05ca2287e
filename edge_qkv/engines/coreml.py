"""Core ML packages on macOS 15 and later, through coremltools. On other systems they can be made, not run."""

from __future__ import annotations

import functools
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_qkv.config import CacheTensor, ModelConfig
from edge_qkv.engines import ModelOptions
from edge_qkv.engines.hosted import HostedModel, refuse_options
from edge_qkv.errors import EdgeQKVError, InputError, one_line
from edge_qkv.package import Package
from edge_qkv.targets import named


def runs_here() -> bool:
    """Whether this system's Core ML knows states."""
    return sys.platform == "darwin" and int(platform.mac_ver()[0].partition(".")[0] or 0) >= 15


def load_function(path: Path, function: str) -> Any:
    """A function of the model as Core ML runs it, a coremltools `MLModel`; raises `InputError`."""
    if not runs_here():
        raise InputError(
            f"{path}: Core ML runs it on macOS 15 or iOS 18 and later, which this is not; "
            "export to onnx or executorch to run the model here"
        )
    try:
        from coremltools.models import MLModel
    except ImportError:
        raise InputError(f"{path}: needs coremltools; run pip install 'edge-qkv[coreml]'") from None
    try:
        with warnings.catch_warnings():
            # What Core ML reports coremltools only warns of, and without a Core ML of its own it says nothing: such a
            # model makes no states.
            warnings.simplefilter("error", RuntimeWarning)
            model = MLModel(str(path), function_name=function)
        model.make_state()
    except Exception as error:  # of many kinds
        raise InputError(
            f"{path}: Core ML cannot open it ({one_line(error)}); export it again, or install coremltools again"
        ) from None
    return model


def state_name(tensor: CacheTensor) -> str:
    """A state's name is that of the buffer it is made of, which has no dots."""
    return tensor.name.replace(".", "_")


def states(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape [1, G, C, D or V] of each state of a program, by name."""
    tensors = config.cache_tensors("fp16")
    return {state_name(t): (1, t.kv_heads, config.max_positions, t.dim) for t in tensors}


def open_model(package: Package, options: ModelOptions) -> HostedModel:
    refuse_options(package, options, threads=False)
    chunk = package.manifest.get("prefill_chunk")
    if not isinstance(chunk, int) or chunk < 1:
        raise InputError(f"{package.path}: does not say its prefill_chunk; export the package again")
    # Core ML prepares a function for the device when it is opened: only those that are used.
    function = functools.cache(lambda name: load_function(package.path / named("coreml").model_file, name))
    function("decode")
    return HostedModel(package, "coreml", lambda *_: StateCache(package.config, chunk, function), function.cache_clear)


class StateCache:
    """The states of one conversation. They have room for all positions of the model, whatever its context."""

    def __init__(self, config: ModelConfig, chunk: int, function: Callable[[str], Any]) -> None:
        self._config = config
        self._function = functools.cache(function)  # a session may go on after its model has dropped them
        # All functions declare the same states, so the state of one serves each of them.
        self._state = self._function("decode").make_state()
        self._shapes = states(config)
        self._spoilt = False
        self._check_against_manifest()
        # A window hides rows, and frees none.
        self.most_tokens = chunk
        self.bytes = named("coreml").cached(config).cache_bytes(config.max_positions, "fp16")

    def _check_against_manifest(self) -> None:
        for name, shape in self._shapes.items():
            try:
                found = np.shape(self._state.read_state(name))
            except RuntimeError as error:
                raise InputError(f"edge_qkv.json and the model disagree ({one_line(error)}); export again") from None
            if found != shape:
                raise InputError(
                    f"edge_qkv.json and the model disagree on the cache {name} ({list(shape)}, {list(found)}); "
                    "export again"
                )

    def evaluate(self, tokens: np.ndarray, past: int, every: bool) -> np.ndarray:
        if self._spoilt:
            # A row that is hidden has a weight of 0, which times infinity is no number: no later call would be sound.
            self.write(self.read(past), past)
            self._spoilt = False
        count, chunk = len(tokens), self.most_tokens
        if count == 1 or past + chunk > self._config.max_positions:
            # A chunk is written whole, and one that does not fit before the end has no place.
            parts = [self._predict("decode", tokens[i : i + 1], past + i) for i in range(count)]
            return np.concatenate(parts if every else parts[-1:])
        # What follows the tokens in their chunk is overwritten before a later token can see it; the last token once
        # more, for another might overflow where these do not.
        padded = np.concatenate([tokens, np.repeat(tokens[-1:], chunk - count)])
        if every:
            return self._predict("score", padded, past)[:count]
        return self._predict("prefill", padded, past, logit_row=np.array([count - 1], np.int32))

    def _predict(self, function: str, tokens: np.ndarray, past: int, **more: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": tokens[None].astype(np.int32), "past": np.array([past], np.int32), **more}
        try:
            logits = self._function(function).predict(inputs, self._state)["logits"]  # [1, R, V]
        except RuntimeError as error:
            raise EdgeQKVError(f"Core ML cannot evaluate {function} ({one_line(error)})") from None
        logits = np.asarray(logits, np.float32)[0]
        self._spoilt = self._spoilt or not np.isfinite(logits).all()
        return logits

    def rewind(self, length: int) -> None:
        """Rows are overwritten when they are used again."""

    def read(self, length: int) -> dict[str, np.ndarray]:
        return {name: np.array(self._state.read_state(name))[:, :, :length] for name in self._shapes}

    def write(self, parts: dict[str, np.ndarray], length: int) -> None:
        if sorted(parts) != sorted(self._shapes) or any(
            parts[name].shape != _first(shape, length) or parts[name].dtype != np.float16
            for name, shape in self._shapes.items()
        ):
            raise InputError("its cache has another shape than this model's")
        for name, shape in self._shapes.items():
            rows = np.zeros(shape, np.float16)
            rows[:, :, :length] = parts[name]
            self._state.write_state(name, rows)

    def fill(self, past: int, length: int, seed: int) -> None:
        generator, rows = np.random.default_rng(seed), self.read(past)
        for name, shape in self._shapes.items():
            noise = generator.standard_normal(_first(shape, length - past), np.float32).astype(np.float16)
            rows[name] = np.concatenate([rows[name], noise], axis=2)
        self.write(rows, length)

    def close(self) -> None:
        self._state = self._function = None


def _first(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The shape of the first rows of a state."""
    return (*shape[:2], rows, shape[3])
