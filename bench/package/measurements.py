"""What is measured of one package, each of `MEASUREMENTS` in a process of its own, which `processes` starts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from edge_qkv import EdgeQKVError, Model, Session, _native, pack
from edge_qkv.bench.common import command_line, run
from edge_qkv.bench.figures import figure, repeat, seconds
from edge_qkv.bench.package import page_cache, snapshots, speed
from edge_qkv.packing import is_packed

PREFILL = 64  # tokens that `check` and `speed` read
PREFILLS = 3


@dataclass(frozen=True)
class Request:
    """What a process is asked for."""

    kind: str  # one of MEASUREMENTS
    package: str
    packed: str | None = None  # directory of packed weights
    threads: int = 0
    depths: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # of the package and of its packed weights
    context: int = 0  # the most tokens in a cache; 0: those that are decoded at the deepest depth
    repeats: int = 1
    limit: float = 1e9  # seconds after which nothing is repeated
    lengths: list[int] = field(default_factory=list)  # of prompts
    decoded: list[tuple[int, list[int]]] = field(default_factory=list)  # depths, and the tokens that were decoded there


def measure(request: Request) -> dict:
    return MEASUREMENTS[request.kind](request)


def main(argv: Sequence[str] | None = None) -> int:
    """One measurement, in this process: the fields of a Request as JSON -> what was found as JSON."""
    parser = command_line("measurement", "For edge-qkv bench itself: one measurement in this process.")
    parser.add_argument("request")
    return run(parser, _print, argv)


def _print(arguments: argparse.Namespace) -> None:
    print(json.dumps(measure(Request(**json.loads(arguments.request)))))


# ---- what a package is ----


def _pack(request: Request) -> dict:
    if is_packed(request.package, request.packed):
        return {"pack_seconds": None}
    return {"pack_seconds": seconds(lambda: pack(request.package, request.packed, request.threads, verify=False))}


def _facts(request: Request) -> dict:
    with _opened(request) as model:
        return _described(model)


def _check(request: Request) -> dict:
    """What the package is, and whether a chunk of tokens gives the logits that they give one by one."""
    with _opened(request) as model, Session(model, context=PREFILL, prefill_chunk=PREFILL) as session:
        tokens = speed.prompt(PREFILL, model.config.vocab_size)
        chunk = session.score(tokens)  # [PREFILL, V]
        session.rewind(0)
        single = np.concatenate([session.score([token]) for token in tokens])
        tolerance = speed.tolerance(model)
        return _described(model) | {
            "chunk_difference": difference(chunk, single, tolerance, request.package),
            "chunk_tolerance": tolerance,
            "greedy": chunk.argmax(-1).tolist(),
        }


def _described(model: Model) -> dict:
    return {
        "engine": model.info.engine.decode(),
        "version": _ENGINE_VERSIONS.get(model.package.target, lambda: None)(),
        "weights": model.package.manifest["weights"],
        "cache": model.cache_type,
        "fingerprint": model.info.fingerprint.decode(),
    }


def packed_files(directory: Path, facts: dict) -> list[Path]:
    """Those of a model by an engine, of which `facts` tells; see runtime/engines/packed.h."""
    markers = directory.glob(f"packed-{facts['fingerprint'][:16]}-*/packed.txt")
    made = [marker.parent for marker in markers if f"\n{facts['engine']} " in marker.read_text()]
    return sorted(file for folder in made for file in folder.iterdir())


def difference(chunk: np.ndarray, single: np.ndarray, tolerance: float, package: str) -> float:
    """The largest difference of two logits [T, V] in standard deviations; raises `EdgeQKVError` beyond `tolerance`."""
    found = float(np.abs(chunk - single).max() / chunk.std())
    if not found <= tolerance:  # also where it is not a number
        raise EdgeQKVError(
            f"{package}: gives other logits for {len(chunk)} tokens read as a chunk than one by one (they differ by "
            f"{found:.2g} standard deviations, {tolerance} are allowed), so its speed means nothing; export it again"
        )
    return found


# ---- load ----


def _cold(request: Request) -> dict:
    files = [Path(file) for file in request.files]
    page_cache.drop(files)
    stayed = page_cache.cached_share(files)
    opened, first, _ = _loaded(request)
    return {"load_cold_ms": opened, "first_token_cold_ms": first, "cached_after_drop": stayed}


def _warm(request: Request) -> dict:
    page_cache.read(Path(file) for file in request.files)
    opened, first, memory = _loaded(request)
    resident, anonymous = memory["resident"], memory["anonymous"]
    return {
        "load_warm_ms": opened,
        "first_token_warm_ms": first,
        "loaded_resident": resident,
        "loaded_anonymous": anonymous,
    }


def _loaded(request: Request) -> tuple[float, float, dict[str, int]]:
    """Milliseconds until the model is open, and until a prompt of one token has its first; the memory in between."""
    before, began = _before(), time.perf_counter()
    with _opened(request) as model:
        opened, paused = time.perf_counter() - began, time.perf_counter()
        memory = _beyond(before)
        paused = time.perf_counter() - paused
        with Session(model, context=1) as session:
            speed.first_token(session, [0])
            return opened * 1e3, (time.perf_counter() - began - paused) * 1e3, memory


# ---- speed and memory ----


def _decode(request: Request) -> dict:
    """Each depth in turn: milliseconds a token, the tokens, and the memory then."""
    before, rows = _before(), []
    with _opened(request) as model, _deep_session(model, request) as session:
        loaded = _beyond(before, session)
        for depth in sorted(request.depths):
            found, tokens = speed.decode(session, depth, request.repeats, request.limit)
            memory = _beyond(before, session)
            rows.append({"depth": depth, "tokens": tokens, "ms_per_token": figure(found), "memory": memory})
            session.rewind(depth)
    return {"loaded": loaded, "depths": rows}


def _verify(request: Request) -> dict:
    """The tokens that were decoded, beside what this package says when it reads them as chunks."""
    with _opened(request) as model, _deep_session(model, request) as session:
        return speed.verify(session, request.decoded)


def _prefill(request: Request) -> dict:
    with _opened(request) as model, _deep_session(model, request) as session:
        rows = [speed.prefill(session, depth, request.repeats, request.limit) for depth in sorted(request.depths)]
    return {"depths": rows}


def _first_token(request: Request) -> dict:
    with _opened(request) as model, Session(model, context=max(request.lengths)) as session:
        return {"prompts": speed.prompts(session, sorted(request.lengths), request.repeats, request.limit)}


def _threads(request: Request) -> dict:
    """What one number of threads gives: prefill at the least depth, decode at each."""
    with _opened(request) as model, _deep_session(model, request) as session:
        read = speed.prefill(session, min(request.depths), request.repeats, request.limit)
        session.rewind(0)
        rows = []
        for depth in sorted(request.depths):
            found, _ = speed.decode(session, depth, request.repeats, request.limit)
            rows.append({"depth": depth, "ms_per_token": figure(found)})
            session.rewind(depth)
    return {"threads": request.threads, "prefill_tokens_per_second": read["tokens_per_second"], "depths": rows}


def _restore(request: Request) -> dict:
    (depth,) = request.depths
    with _opened(request) as model, tempfile.TemporaryDirectory() as folder:
        return snapshots.measure(model, max(1, depth), Path(folder), request.repeats, whole=False)


def _speed(request: Request) -> dict:
    """For packages side by side: one measurement of each, in this process."""
    found, before = {}, _before()
    with _opened(request) as model, _deep_session(model, request) as session:
        tokens = [0] * PREFILL
        prefill = lambda: seconds(lambda: (session.rewind(0), session.evaluate(tokens)))  # noqa: E731
        prefill()  # touches the pages of the weights, starts the threads
        found["prefill_tokens_per_second"] = PREFILL / median(repeat(prefill, PREFILLS, request.limit))
        session.rewind(0)
        for depth in sorted(request.depths):
            (found[f"decode_ms_at_{depth}"],), _ = speed.decode(session, depth, 1, request.limit)
            full = _beyond(before, session)
            session.rewind(depth)
    memory = {"full_resident": full["resident"], "full_anonymous": full["anonymous"], "full_peak": full["peak"]}
    return found | memory | {"cache_bytes": full["cache_used"]}


MEASUREMENTS: dict[str, Callable[[Request], dict]] = {
    "pack": _pack,
    "facts": _facts,
    "check": _check,
    "cold load": _cold,
    "warm load": _warm,
    "decode": _decode,
    "verify": _verify,
    "prefill": _prefill,
    "first token": _first_token,
    "threads": _threads,
    "restore": _restore,
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


def _deep_session(model: Model, request: Request) -> Session:
    """With room for the tokens that are decoded at the deepest depth, as far as the model goes."""
    depths = request.depths or [depth for depth, _ in request.decoded]
    return Session(model, context=request.context or min(max(depths) + speed.TOKENS, model.info.context))


def _before() -> _native.MemoryInfo:
    """The memory of this process before the model is opened; the peak begins anew, where the system lets it."""
    _native.library()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory()


def _beyond(before: _native.MemoryInfo, session: Session | None = None) -> dict[str, int]:
    """Bytes that came since, and those of the session's cache; the peak counts from what was resident."""
    now = _memory()
    found = {
        "resident": now.resident - before.resident,
        "anonymous": now.anonymous - before.anonymous,
        "peak": now.peak_resident - before.resident,
    }
    if session is not None:
        found |= {name: count for name, count in session.memory().items() if name.startswith("cache_")}
    return found


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

if __name__ == "__main__":
    sys.exit(main())
