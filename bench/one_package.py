"""What `edge_qkv.bench.engines` measures of one package, each of `MEASUREMENTS` in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from edge_qkv import EdgeQKVError, Model, Session, _native, pack
from edge_qkv.bench import page_cache
from edge_qkv.packing import is_packed

PREFILL = 64  # tokens
TIMED = 8  # tokens at each depth
PREFILLS = 3
# Largest difference between the logits of tokens read as a chunk and one by one, in standard deviations of the
# logits. Engines add up a chunk in another order than a row; where values are rounded to 8 bits (activations with all
# weights but fp32, rows of an int8 cache) the last bit of a sum may move one of them to the next step.
TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.25


@dataclass(frozen=True)
class Request:
    """What a process is asked for."""

    kind: str  # one of MEASUREMENTS
    package: str
    packed: str | None  # directory of packed weights
    threads: int
    depths: list[int]
    files: list[str]  # of the package and of its packed weights


def measure(request: Request) -> dict:
    return MEASUREMENTS[request.kind](request)


def _pack(request: Request) -> dict:
    if is_packed(request.package, request.packed):
        return {"pack_seconds": None}
    return {"pack_seconds": _seconds(lambda: pack(request.package, request.packed, request.threads, verify=False))}


def _check(request: Request) -> dict:
    """What the package is, and whether a chunk of tokens gives the logits that they give one by one."""
    with _opened(request) as model, Session(model, context=PREFILL, prefill_chunk=PREFILL) as session:
        tokens = [(11 + 37 * i) % model.config.vocab_size for i in range(PREFILL)]
        chunk = session.score(tokens)  # [PREFILL, V]
        session.rewind(0)
        single = np.concatenate([session.score([token]) for token in tokens])
        weights = model.package.manifest["weights"]
        exact = weights == "fp32" and model.cache_type != "int8"
        tolerance = TOLERANCE if exact else ROUNDED_TOLERANCE
        return {
            "engine": model.info.engine.decode(),
            "version": _ENGINE_VERSIONS[model.package.target](),
            "weights": weights,
            "cache": model.cache_type,
            "fingerprint": model.info.fingerprint.decode(),
            "chunk_difference": difference(chunk, single, tolerance, request.package),
            "chunk_tolerance": tolerance,
            "greedy": chunk.argmax(-1).tolist(),
        }


def difference(chunk: np.ndarray, single: np.ndarray, tolerance: float, package: str) -> float:
    """The largest difference of two logits [T, V] in standard deviations; raises `EdgeQKVError` beyond `tolerance`."""
    found = float(np.abs(chunk - single).max() / chunk.std())
    if not found <= tolerance:  # also where it is not a number
        raise EdgeQKVError(
            f"{package}: gives other logits for {len(chunk)} tokens read as a chunk than one by one (they differ by "
            f"{found:.2g} standard deviations, {tolerance} are allowed), so its speed means nothing; export it again"
        )
    return found


def _cold(request: Request) -> dict:
    files = [Path(file) for file in request.files]
    page_cache.drop(files)
    stayed = page_cache.cached_share(files)
    began = time.perf_counter()
    with _opened(request):
        return {"load_cold_ms": (time.perf_counter() - began) * 1e3, "cached_after_drop": stayed}


def _warm(request: Request) -> dict:
    page_cache.read(Path(file) for file in request.files)
    before = _before()
    began = time.perf_counter()
    with _opened(request):
        milliseconds = (time.perf_counter() - began) * 1e3
        loaded = _beyond(before)
    return {"load_warm_ms": milliseconds, "loaded_resident": loaded.resident, "loaded_anonymous": loaded.anonymous}


def _speed(request: Request) -> dict:
    found, before = {}, _before()
    context = max(max(request.depths) + 1, PREFILL)
    with _opened(request) as model, Session(model, context=context) as session:
        prefill = lambda: (session.rewind(0), session.evaluate([0] * PREFILL))  # noqa: E731
        prefill()  # touches the pages of the weights, starts the threads
        found["prefill_tokens_per_second"] = PREFILL / median(_seconds(prefill) for _ in range(PREFILLS))
        session.rewind(0)
        for depth in sorted(request.depths):
            session.fill(depth)
            decode = lambda depth=depth: (session.rewind(depth), session.evaluate([0]))  # noqa: E731
            decode()
            found[f"decode_ms_at_{depth}"] = median(_seconds(decode) for _ in range(TIMED)) * 1e3
            full, cache = _beyond(before), session.memory()["cache_used"]
            session.rewind(depth)
    memory = {"full_resident": full.resident, "full_anonymous": full.anonymous, "full_peak": full.peak_resident}
    return found | memory | {"cache_bytes": cache}


MEASUREMENTS: dict[str, Callable[[Request], dict]] = {
    "pack": _pack,
    "check": _check,
    "cold load": _cold,
    "warm load": _warm,
    "speed": _speed,
}


# ---- means ----


@contextlib.contextmanager
def _opened(request: Request) -> Iterator[Model]:
    with Model(request.package, request.threads, verify=False, packed=request.packed or False) as model:
        if bool(model.info.packed) != bool(request.packed):
            raise EdgeQKVError(
                f"{request.packed}: the packed weights there are not those of {request.package} for this processor and "
                "engine, or damaged; give another directory"
            )
        yield model


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _before() -> _native.MemoryInfo:
    """The memory of this process before the model is opened; the peak begins anew, where the system lets it."""
    _native.library()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory()


def _beyond(before: _native.MemoryInfo) -> _native.MemoryInfo:
    """What came since; the peak counts from what was resident."""
    now = _memory()
    now.peak_resident -= before.resident
    now.resident -= before.resident
    now.anonymous -= before.anonymous
    return now


def _memory() -> _native.MemoryInfo:
    found = _native.MemoryInfo()
    _native.call("eqkv_memory", ctypes.byref(found))
    return found


def _onnxruntime_version() -> str:
    base = ctypes.CDLL(str(_native.engine_library("onnx"))).OrtGetApiBase
    base.restype = ctypes.POINTER(ctypes.c_void_p)  # OrtApiBase: GetApi, GetVersionString
    return ctypes.CFUNCTYPE(ctypes.c_char_p)(base()[1])().decode()


def _executorch_version() -> str:
    return importlib.metadata.version("executorch")  # the library refuses any other


# Target of a package -> the version that the library of its engine reports.
_ENGINE_VERSIONS = {"onnx": _onnxruntime_version, "executorch": _executorch_version}
