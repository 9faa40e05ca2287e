"""The engines, opened: `engine` is each of them unless a test chooses, `model` and `session` are its own."""

from __future__ import annotations

import ctypes
import functools
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import needs, write_checkpoint
from eager import Expected, expect
from edge_qkv import InputError, Model, Session
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.engines import ModelOptions, coreml
from edge_qkv.engines.hosted import HostedModel, refuse_options
from edge_qkv.export import export_package
from edge_qkv.model import Decoder
from edge_qkv.package import Package
from edge_qkv.targets import TARGETS

from .engines import CAPACITY, CHUNK, ENGINES, KNOWN, Engine, Subject
from .hosted_decoder import EagerCache


@pytest.fixture(scope="session")
def made(made_once, tmp_path_factory, bytes_tokenizer):
    """made(engine, seed) -> (the eager decoder, a package of the engine): with a tokenizer, made once."""

    @functools.cache
    def checkpoint(config, seed: int) -> tuple[Path, Decoder]:
        path = write_checkpoint(tmp_path_factory.mktemp("sessions") / "checkpoint", config, bytes_tokenizer, seed)
        return path, read_checkpoint(str(path)).load()

    def make(name: str, seed: int = 0) -> tuple[Decoder, Path]:
        engine = KNOWN[name]
        path, decoder = checkpoint(engine.config, seed)
        options = {"weights": engine.weights, "cache": engine.cache, "parity": False} | engine.export
        export = functools.partial(export_package, engine.target, str(path), **options)
        # llama.cpp and the hosted decoder run the same package.
        same = "llama.cpp" if name == "eager" else name
        return decoder, made_once(f"sessions-{seed}/{same}", export)

    return make


@pytest.fixture(scope="session", params=ENGINES)
def engine(request, made) -> Iterator[Subject]:
    name: str = request.param
    known = KNOWN[name]
    needs(known.target)
    if name.startswith("llama.cpp"):
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    decoder, package = made(name)
    subject = Subject(name, known, decoder, package, _expected(known, decoder), [])
    with pytest.MonkeyPatch.context() as patch:
        if name == "eager":
            _host(patch, decoder, subject.closed)
        if known.target == "coreml":
            # Core ML predicts on Apple's systems only, so the saved program runs in NumPy here.
            from edge_qkv.export.coreml.evaluator import interpreter

            patch.setattr(coreml, "load_function", interpreter.load)
        yield subject


def _expected(engine: Engine, decoder: Decoder) -> Expected:
    expected = expect(decoder, CAPACITY, engine.cache)
    if not engine.of_largest:
        return expected
    return replace(expected, tolerance=engine.of_largest * np.abs(expected.logits).max())


def _host(patch: pytest.MonkeyPatch, decoder: Decoder, closed: list[str]) -> None:
    """The engine of GGUF packages is the decoder itself."""

    def open_model(package: Package, options: ModelOptions) -> HostedModel:
        refuse_options(package, options, threads=False)

        def new_cache(context: int, chunk: int, cancelled: ctypes.c_int32) -> EagerCache:
            return EagerCache(decoder, context, cancelled)

        return HostedModel(package, "eager", new_cache, lambda: closed.append("eager"))

    patch.setitem(TARGETS, "gguf", replace(TARGETS["gguf"], hosted="eager"))
    patch.setitem(sys.modules, "edge_qkv.engines.eager", types.SimpleNamespace(open_model=open_model))


@pytest.fixture(scope="module")
def model(engine) -> Iterator[Model]:
    with engine.model() as model:
        yield model


@pytest.fixture
def session(model) -> Iterator[Session]:
    with Session(model, CAPACITY, CHUNK) as session:
        yield session


@pytest.fixture
def fresh(model) -> Iterator[Session]:
    """Another one, to compare with."""
    with Session(model, CAPACITY, CHUNK) as session:
        yield session


@pytest.fixture
def ids(engine) -> list[int]:
    return engine.ids


@pytest.fixture
def refused(session, ids) -> Callable:
    """refused(path, pattern): a restore is refused in a sentence that names the file, and changes nothing."""
    session.evaluate(ids[:5])
    before = session.logits()

    def check(path: Path, pattern: str, kind: type = InputError) -> None:
        with pytest.raises(kind, match=re.escape(path.name) + "(?s:.)*(?:" + pattern + ")") as error:
            session.restore(path)
        assert "\n" not in str(error.value) and "Traceback" not in str(error.value)
        assert session.tokens == ids[:5]
        np.testing.assert_array_equal(session.logits(), before)

    return check


class Interrupt(BaseException):
    pass


@pytest.fixture
def alarm():
    """alarm(seconds, handler): calls the handler once after that long, at whatever the main thread then does; without
    one an `alarm.Interrupt` is raised."""
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(*_) -> None:
        raise Interrupt

    def arm(seconds: float, handler=interrupt) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    arm.Interrupt = Interrupt
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
