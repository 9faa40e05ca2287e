"""Sessions of engines that Python hosts, on a small engine of their kind: the eager decoder and its caches."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import threading
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, changed
from eager import TOLERANCE, expect, walk_session
from edge_qkv import Cancelled, ContextFull, InputError, Model, Sampling, Session, _native, pack, plan
from edge_qkv.cli import main
from edge_qkv.engines import ModelOptions
from edge_qkv.engines.hosted import HostedModel, refuse_options
from edge_qkv.model import Decoder
from edge_qkv.package import Package
from edge_qkv.packing import is_packed
from edge_qkv.targets import TARGETS
from other_threads import check_every_method, check_soundness

PLAIN = changed(TINY, positions="rotary-on-read")
CAPACITY, CHUNK = PLAIN.max_positions, 16
AT_ONCE = 6  # tokens of a call: chunks are several, and the last one is shorter
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)


class EagerCache:
    """Caches of the eager decoder, [1, G, C, D] a layer. It hears of a cancellation when the rows are written."""

    most_tokens = AT_ONCE

    def __init__(self, decoder: Decoder, context: int, cancelled: ctypes.c_int32) -> None:
        self._decoder, self._cancelled = decoder, cancelled
        self._caches = decoder.new_caches(context)
        self.bytes = context * decoder.config.cache_bytes_per_token("fp32")

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray, past: int, every: bool) -> np.ndarray:
        logits, self._caches = self._decoder(torch.from_numpy(tokens.astype(np.int64))[None], past, self._caches)
        if self._cancelled.value:
            raise Cancelled("The evaluation was cancelled.")
        return logits[0].numpy() if every else logits[0, -1:].numpy()

    def rewind(self, length: int) -> None:
        """Rows are overwritten when they are used again."""

    def read(self, length: int) -> dict[str, np.ndarray]:
        return {f"kv_{i}": kv[0, :, :length].numpy().copy() for i, (kv,) in enumerate(self._caches)}

    def write(self, parts: dict[str, np.ndarray], length: int) -> None:
        config = self._decoder.config
        shape = (config.only.kv_heads, length, config.only.head_dim)
        if sorted(parts) != [f"kv_{i}" for i in range(len(config.layers))] or any(
            part.shape != shape or part.dtype != np.float32 for part in parts.values()
        ):
            raise InputError("its cache has another shape than this model's")
        for i, (kv,) in enumerate(self._caches):
            kv[0, :, :length] = torch.from_numpy(parts[f"kv_{i}"])

    def fill(self, past: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for (kv,) in self._caches:
            kv[0, :, past:length] = torch.randn(kv[0, :, past:length].shape, generator=generator)

    def close(self) -> None:
        self._caches = None


@pytest.fixture(scope="module")
def closed() -> list[str]:
    """The engines that were closed."""
    return []


@pytest.fixture(scope="module")
def hosted(random_package, closed) -> tuple[Decoder, Path]:
    """(decoder, its package). The engine of GGUF packages is for this module the decoder itself."""
    decoder, package = random_package("gguf", PLAIN, "fp32", weights="f32")

    def open_model(package: Package, options: ModelOptions) -> HostedModel:
        refuse_options(package, options, threads=False)

        def new_cache(context: int, chunk: int, cancelled: ctypes.c_int32) -> EagerCache:
            return EagerCache(decoder, context, cancelled)

        return HostedModel(package, "eager", new_cache, lambda: closed.append("eager"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "gguf", replace(TARGETS["gguf"], hosted="eager"))
        patch.setitem(sys.modules, "edge_qkv.engines.eager", types.SimpleNamespace(open_model=open_model))
        yield decoder, package


@pytest.fixture(scope="module")
def package(hosted) -> Path:
    return hosted[1]


@pytest.fixture
def model(package):
    with Model(package) as model:
        yield model


@pytest.fixture
def session(model):
    with Session(model, CAPACITY, CHUNK) as session:
        yield session


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (CAPACITY,), generator=torch.Generator().manual_seed(1)).tolist()


# ---- tokens and logits ----


@pytest.mark.parametrize("chunk", [CHUNK, CAPACITY])
def test_logits_are_the_decoders(hosted, model, chunk):
    with Session(model, CAPACITY, chunk) as session:
        walk_session(session, expect(hosted[0], CAPACITY), CHUNK)


def test_a_conversation_goes_on_where_generation_stopped(model, ids):
    greedy = Sampling(temperature=0)
    with Session(model, CAPACITY) as once, Session(model, CAPACITY) as twice:
        whole = list(once.generate_tokens(ids[:5], 12, greedy))
        halves = list(twice.generate_tokens(ids[:5], 6, greedy)) + list(twice.generate_tokens([], 6, greedy))
        assert (halves, twice.tokens) == (whole, once.tokens)


def test_reuse_leaves_what_is_needed_for_the_logits(session, ids):
    session.evaluate(ids[:40])
    logits = session.logits()
    assert session.reuse(ids[:40]) == 40
    np.testing.assert_array_equal(session.logits(), logits)
    assert session.reuse(ids[:30] + [255] * 5) == 30
    assert session.reuse(ids[:30]) == 29  # the logits after it are gone
    session.evaluate(ids[29:40])
    np.testing.assert_allclose(session.logits(), logits, atol=TOLERANCE)
    assert session.reuse([]) == 0


def test_a_full_context_is_refused_before_anything_is_evaluated(model, ids):
    with Session(model, 50, CHUNK) as session:
        session.evaluate(ids[:40])
        with pytest.raises(ContextFull):
            session.evaluate(ids[:11])
        session.evaluate(ids[:10])
        with pytest.raises(ContextFull):
            session.fill(51)
        assert session.tokens == ids[:40] + ids[:10]


def test_fill_keeps_the_rows_that_are_there(session, ids):
    session.evaluate(ids[:10])
    rest = session.score(ids[10:20])
    session.rewind(10)
    session.fill(60, seed=1)
    assert session.tokens == ids[:10] + [0] * 50
    for use in (session.logits, session.sample):
        with pytest.raises(InputError, match="no logits"):
            use()
    with pytest.raises(InputError, match="fill up to 59"):
        session.fill(59)
    session.rewind(10)
    np.testing.assert_array_equal(session.score(ids[10:20]), rest)


def test_a_second_thread_is_refused_and_the_session_stays_sound(session, ids, tmp_path):
    check_every_method(session, tmp_path / "saved", ids[:40])
    check_soundness(session, tmp_path / "saved", ids, rounds=5)


def test_the_token_after_a_full_context_and_tokens_that_are_taken_back(model, ids):
    with Session(model, CAPACITY) as session, Session(model, CAPACITY) as fresh:
        given = list(session.generate_tokens(ids, 1, Sampling(temperature=0)))
        assert session.tokens == ids + given and len(given) == 1
        with pytest.raises(ContextFull):
            session.logits()
        session.take_back(10)
        fresh.evaluate(session.tokens)
        assert session.tokens == ids[:-9] and session.generated == []
        np.testing.assert_allclose(session.logits(), fresh.logits(), atol=TOLERANCE)


def test_sampling_is_the_native_engines(model, random_package, ids):
    native = random_package("onnx", PLAIN, "fp32")[1]
    options = Sampling(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, repetition_window=0)
    written = []
    with Model(native, threads=1) as other:
        for opened in (model, other):
            with Session(opened, CAPACITY) as session:
                written.append([])
                for seed in range(5):
                    session.rewind(0)
                    written[-1].append(tuple(session.generate_tokens(ids[:7], 12, replace(options, seed=seed))))
    assert written[0] == written[1]
    assert len(set(written[0])) == 5


# ---- snapshots and forks ----


def test_a_restored_conversation_goes_on_bit_for_bit(model, ids, tmp_path):
    for length in LENGTHS:
        context = min(length + 10, CAPACITY)
        with Session(model, context, CHUNK) as session:
            session.evaluate(ids[:length])
            session.save(tmp_path / "saved")
            now, rest = session.logits(), session.score(ids[length:context])
        with Session(model, CAPACITY, CHUNK) as other:
            other.evaluate(ids[50:80])
            other.restore(tmp_path / "saved")
            assert other.tokens == ids[:length]
            np.testing.assert_array_equal(other.logits(), now)
            np.testing.assert_array_equal(other.score(ids[length:context]), rest)


def test_a_snapshot_without_tokens_or_logits_is_one(session, ids, tmp_path):
    session.save(tmp_path / "empty")
    session.fill(20)
    session.save(tmp_path / "filled")
    session.restore(tmp_path / "empty")
    assert session.tokens == []
    session.restore(tmp_path / "filled")
    assert session.tokens == [0] * 20
    with pytest.raises(InputError, match="no logits"):
        session.logits()


def test_a_fork_goes_its_own_way(session, ids):
    session.evaluate(ids[:40])
    with session.fork() as fork:
        np.testing.assert_array_equal(fork.logits(), session.logits())
        both = [fork.score(ids[60:90]), session.score(ids[40:70])]
    for rest, logits in zip((ids[60:90], ids[40:70]), both, strict=True):
        session.rewind(0)
        session.evaluate(ids[:40])
        np.testing.assert_array_equal(session.score(rest), logits)


@pytest.fixture
def refused(session, ids, tmp_path):
    """refused(path, pattern): a restore is refused in a sentence that names the file, and changes nothing."""
    session.evaluate(ids[:5])
    before = session.logits()

    def check(path: Path, pattern: str, kind: type = InputError) -> None:
        with pytest.raises(kind, match=re.escape(path.name) + ".*" + pattern) as error:
            session.restore(path)
        assert "\n" not in str(error.value) and "Traceback" not in str(error.value)
        assert session.tokens == ids[:5]
        np.testing.assert_array_equal(session.logits(), before)

    return check


@pytest.fixture
def parts(model, ids, tmp_path) -> dict[str, np.ndarray]:
    """Those of a snapshot of 20 tokens, which is `saved`."""
    with Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:20])
        session.save(tmp_path / "saved")
    with np.load(tmp_path / "saved") as archive:
        return dict(archive)


def _written(path: Path, parts: dict[str, np.ndarray]) -> Path:
    with path.open("wb") as file:
        np.savez(file, **parts)
    return path


def test_a_snapshot_of_another_model_is_refused(random_package, refused, ids, tmp_path):
    with Session(random_package("gguf", PLAIN, "fp32", seed=5, weights="f32")[1], CAPACITY) as other:
        other.evaluate(ids[:40])
        other.save(tmp_path / "saved")
    refused(tmp_path / "saved", "another model")
    with Session(random_package("onnx", PLAIN, "fp32")[1], CAPACITY) as native:
        native.evaluate(ids[:40])
        native.save(tmp_path / "saved")
        refused(tmp_path / "saved", "no snapshot of such a session")


def test_a_snapshot_that_is_too_long_is_refused(model, parts, tmp_path):
    with Session(model, 19) as small, pytest.raises(ContextFull, match="saved: its 20 tokens"):
        small.restore(tmp_path / "saved")


def test_a_snapshot_that_no_memory_holds_is_refused_unread(session, tmp_path):
    (tmp_path / "saved").touch()
    os.truncate(tmp_path / "saved", 1 << 40)
    with pytest.raises(ContextFull, match="saved: is larger than any snapshot"):
        session.restore(tmp_path / "saved")


@pytest.mark.parametrize(
    "name, change, pattern",
    [
        ("version", lambda _: np.array(2), "version 2"),
        ("version", lambda _: np.array([1, 1]), "damaged"),
        ("version", lambda _: np.array("one"), "damaged"),
        ("fingerprint", lambda part: part[()][:-1], "another model"),
        ("fingerprint", lambda _: np.zeros(3), "another model"),
        ("tokens", lambda part: part + 250, "tokens are none"),
        ("tokens", lambda part: -part, "tokens are none"),
        ("tokens", lambda part: part.astype(np.int64), "tokens are none"),
        ("tokens", lambda part: part[None], "tokens are none"),
        ("tokens", lambda part: part[:-1], "another shape"),
        ("tokens", lambda _: np.array([[1, 2], "pickled"], object), "damaged"),
        ("logits", lambda part: part[1:], "logits"),
        ("logits", lambda part: part.astype(np.float64), "logits"),
        ("cache.kv_0", lambda part: part[:, 1:], "another shape"),
        ("cache.kv_0", lambda part: part.astype(np.float16), "another shape"),
        ("cache.kv_7", lambda _: np.zeros(3), "another shape"),
        *((name, None, "damaged") for name in ("version", "fingerprint", "tokens", "cache.kv_1")),
    ],
)
def test_a_part_of_another_kind_is_refused(parts, refused, tmp_path, name, change, pattern):
    changed = {n: part for n, part in parts.items() if n != name}
    if change:
        changed[name] = change(parts.get(name))
    refused(_written(tmp_path / "changed", changed), pattern)


def test_a_damaged_file_is_refused(parts, refused, tmp_path):
    whole = (tmp_path / "saved").read_bytes()
    damaged = tmp_path / "damaged"
    generator = np.random.default_rng(0)
    for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:cut])
        refused(damaged, "damaged|cannot be read")
    with zipfile.ZipFile(tmp_path / "saved") as archive:
        members = archive.infolist()
    for member in members:
        names = struct.unpack_from("<HH", whole, member.header_offset + 26)  # sizes of the name and what follows it
        begin = member.header_offset + 30 + sum(names)
        for position in begin + generator.integers(member.file_size, size=4):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << int(generator.integers(8))
            damaged.write_bytes(flipped)
            refused(damaged, "damaged|another model|version")
    np.savez_compressed(damaged.with_suffix(".npz"), **parts)
    refused(damaged.with_suffix(".npz"), "parts are compressed")
    np.save(damaged.with_suffix(".npy"), np.zeros(3))
    refused(damaged.with_suffix(".npy"), "damaged")
    damaged.write_bytes(pickle.dumps({"tokens": [1]}))
    refused(damaged, r"damaged one \(it is no archive\)$")  # without NumPy's advice
    huge = bytearray(whole)  # an array that says it has more numbers than there is memory
    at = huge.index(b"'shape': (20,)")
    huge[at : at + 14 + 9] = b"'shape': (99999999999,)"
    damaged.write_bytes(huge)
    refused(damaged, "damaged")
    refused(tmp_path / "missing", "cannot be read")
    with damaged.open("wb") as file:
        np.savez_compressed(file, **parts | {"cache.kv_0": np.zeros(1 << 20)})  # 8 MiB in 8 KiB
    refused(damaged, "larger than the file")


def test_a_place_that_cannot_be_written_is_one_sentence(session, tmp_path):
    with pytest.raises(InputError, match=r"missing/saved: cannot be written \(No such file"):
        session.save(tmp_path / "missing" / "saved")


# ---- cancelling, interrupting, closing ----


def test_a_cancelled_evaluation_stops_and_the_session_goes_on(model, ids):
    """Between calls, or in one, whose rows are then nobody's."""
    with Session(model, CAPACITY, CAPACITY) as session:
        session.evaluate(ids)
        expected, kept = session.logits(), set()
        for delay in np.linspace(0, 0.02, 60):
            session.rewind(0)
            canceller = threading.Timer(delay, session.cancel)
            canceller.start()
            try:
                session.evaluate(ids)
            except Cancelled:
                kept.add(len(session.tokens))
                canceller.join()
            else:
                canceller.join()  # too late for this one, and so for the next
                session.rewind(CAPACITY - 1)
                with pytest.raises(Cancelled):
                    session.evaluate(ids[-1:])
            session.evaluate(ids[len(session.tokens) :])
            assert session.tokens == ids
            np.testing.assert_allclose(session.logits(), expected, atol=TOLERANCE)
        assert kept & set(range(AT_ONCE, CAPACITY, AT_ONCE)) and all(n % AT_ONCE == 0 for n in kept)


def test_an_engine_may_ask_the_native_library_whether_to_stop():
    """What llama.cpp does after each operation; see engines/llama_cpp.py."""
    asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(("eqkv_is_set", _native.library()))
    for value in (0, 1, 1 << 20, -1):
        flag = ctypes.c_int32(value)
        assert asked(ctypes.addressof(flag)) is bool(value)


def test_a_cancelled_generation_keeps_what_it_yielded(model):
    greedy = Sampling(temperature=0)
    with Session(model, CAPACITY) as session, Session(model, CAPACITY) as other:
        tokens = session.generate_tokens([1, 2], 20, greedy)
        given = [next(tokens), next(tokens)]
        session.cancel()
        with pytest.raises(Cancelled):
            next(tokens)
        assert session.tokens == [1, 2, *given]
        more = list(session.generate_tokens([], 3, greedy))
        assert [*given, *more] == list(other.generate_tokens([1, 2], 5, greedy))


class Interrupt(BaseException):
    pass


def test_an_interrupted_call_leaves_a_sound_session(model, ids, tmp_path):
    """Whatever an exception out of a signal handler ends, the session knows afterwards what its cache holds."""

    def interrupt(*_) -> None:
        raise Interrupt

    before, generator = signal.signal(signal.SIGALRM, interrupt), np.random.default_rng(7)
    try:
        with Session(model, CAPACITY, CHUNK) as session, Session(model, CAPACITY, CHUNK) as fresh:
            session.evaluate(ids[:40])
            session.save(tmp_path / "saved")
            for _ in range(60):
                with contextlib.suppress(Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, 0.02))
                    while True:
                        session.rewind(len(session.tokens) // 2)
                        session.evaluate(ids[: int(generator.integers(1, 45))])
                        session.restore(tmp_path / "saved")
                        session.fill(int(generator.integers(40, 50)))
                        session.reuse(ids[: int(generator.integers(1, 60))])
                        list(session.generate_tokens([1], 3))
                tokens = session.tokens
                assert tokens[: len(tokens) - len(session._pending)] == session._engine.tokens().tolist()
                session.rewind(min(5, len(tokens)))
                session.evaluate(ids[5:30])
                assert session.tokens == tokens[:5] + ids[5:30]
                if tokens[:5] == ids[:5][: len(tokens)]:  # rows of noise are of no token
                    fresh.rewind(0)
                    fresh.evaluate(session.tokens)
                    np.testing.assert_allclose(session.logits(), fresh.logits(), atol=TOLERANCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_closed_says_so(package, closed, ids):
    model = Model(package)
    session = Session(model, CAPACITY, CHUNK)
    session.evaluate(ids[:5])
    closed.clear()
    model.close()
    model.close()
    assert closed == ["eager"]
    with pytest.raises(InputError, match="the model is closed"):
        Session(model)
    session.evaluate(ids[5:9])  # a session may be used after its model
    session.close()
    session.close()
    session.cancel()
    for use in (
        session.logits,
        session.sample,
        session.memory,
        session.fork,
        lambda: session.evaluate([1]),
        lambda: session.rewind(0),
        lambda: session.reuse([1]),
        lambda: session.save("unwritten"),
        lambda: session.restore("unread"),
        lambda: session.set_sampling(Sampling()),
    ):
        with pytest.raises(InputError, match="the session is closed"):
            use()


# ---- memory, and what these engines have not ----


def test_memory_is_the_whole_cache_at_once(session, ids):
    a_token = session.model.info.cache_bytes_per_token
    session.evaluate(ids[:10])
    memory = session.memory()
    assert memory["cache_used"] == 10 * a_token
    assert memory["cache_committed"] == memory["cache_reserved"] == session._engine._cache.bytes
    session.model.trim("all")
    assert session.tokens == ids[:10]


@pytest.mark.parametrize(
    "options",
    [{"memory": "1GB"}, {"packed": "."}, {"packed": True}, {"spill": "."}, {"threads": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_native_runtime_are_refused_by_name(package, options):
    with pytest.raises(InputError, match=f"^(--)?{next(iter(options))}: .*leave it out"):
        Model(package, **options)
    Model(package, packed=False).close()


@pytest.mark.parametrize(
    "options",
    [{"overflow": "shift"}, {"overflow": "window"}, {"sinks": 3}, {"window": 8}, {"block": 8}],
    ids=lambda options: "-".join(map(str, next(iter(options.items())))),
)
def test_overflow_options_are_refused_by_name(model, options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: "):
        Session(model, **options)


def test_pressure_cannot_be_watched(model):
    with pytest.raises(InputError, match=r"^watch_pressure: .*leave it out"):
        model.watch_pressure()


def test_weights_are_not_packed(package, tmp_path, capsys):
    assert not is_packed(package)
    with pytest.raises(InputError, match="prepares its weights by itself"):
        pack(package, tmp_path)
    assert main(["pack", str(package)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_says_what_it_does_not_know(package, random_package, capsys):
    a_token = Package.open(package).cache_bytes_per_token
    planned = plan(package, context=50)
    assert (planned.cache, planned.cache_type) == (256 * a_token, "fp32")  # llama.cpp rounds a context up
    assert planned.weights_file == planned.weight_bytes == (package / "model.gguf").stat().st_size
    assert planned.total == planned.cache + planned.weights_file
    assert "llama.cpp" in planned.unknown and planned.memory is None
    assert plan(package, context=50, cache="fp16").cache == 128 * a_token
    with pytest.raises(InputError, match=r"^--cache int8: "):
        plan(package, cache="int8")
    with pytest.raises(InputError, match=r"^--memory: .*leave it out"):
        plan(package, memory="1GB")
    assert main(["plan", str(package)]) == 0
    assert "chunks" not in capsys.readouterr().out  # none is planned
    assert main(["plan", str(package), "--device", "all"]) == 2
    assert "--device all: what llama.cpp takes" in capsys.readouterr().err
    assert main(["plan", "1.2B", "--variants", "--target", "gguf"]) == 2


@pytest.mark.parametrize("of", [["--target", "gguf", "1.2B/Q-MQA"], ["--target", "coreml", "1.2B/Q-MQA"], []])
def test_what_fits_on_a_device_is_not_known(package, capsys, of):
    assert main(["plan", *(of or [str(package)]), "--device", "all"]) == 2
    assert re.fullmatch(r"edge-qkv: --device all: what .* takes beyond .*; leave it out\n", capsys.readouterr().err)


def test_without_llama_cpp_a_package_says_what_to_install(random_package, tmp_path, monkeypatch):
    package = shutil.copytree(random_package("gguf", PLAIN, "fp32", weights="f32")[1], tmp_path / "package")
    monkeypatch.setitem(TARGETS, "gguf", replace(TARGETS["gguf"], hosted="llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as where it is not installed
    with pytest.raises(InputError, match=r"pip install 'edge-qkv\[llama-cpp\]', which builds it from source and takes"):
        Model(package)
