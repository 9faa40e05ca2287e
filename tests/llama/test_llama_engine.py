"""What a session does is the same in llama.cpp: the behaviours of test_engines.py and test_session.py that it has."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from conftest import TINY, changed, hears_ctrl_c, write_checkpoint
from eager import expect, walk_session
from edge_qkv import Cancelled, ContextFull, EdgeQKVError, InputError, Model, Sampling, Session, plan
from edge_qkv.engines import llama_cpp as engine

PLAIN = changed(TINY, positions="rotary-on-read")  # llama.cpp has no rotation that is undone on the output
CAPACITY, CHUNK = PLAIN.max_positions, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)
CASES = {
    "fp32": (PLAIN, "fp32"),
    "fp16": (PLAIN, "fp16"),
    "one row, fp32": (changed(TINY, positions="none"), "fp32"),
    "one row, fp16": (changed(TINY, positions="none"), "fp16"),
    "separate V, fp32": (changed(PLAIN, sharing="qkv", kv_heads=2), "fp32"),
    "separate V, fp16": (changed(PLAIN, sharing="qkv", kv_heads=2), "fp16"),
}
LONG = changed(PLAIN, layers=8, width=128, head_dim=32, mlp_width=512, max_positions=4096)


@pytest.fixture(scope="module", params=CASES)
def case(request, random_package):
    config, cache = CASES[request.param]
    return *random_package("gguf", config, cache, weights="f32"), cache


@pytest.fixture(scope="module")
def tiny(random_package) -> Path:
    return random_package("gguf", *CASES["fp32"], weights="f32")[1]


@pytest.fixture(scope="module")
def long(random_package) -> Path:
    return random_package("gguf", LONG, "fp16", weights="f32")[1]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (LONG.max_positions,), generator=torch.Generator().manual_seed(1)).tolist()


def _conversation(model: Model, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), V] of a session of its own: a prompt in chunks, then 8 tokens one by one."""
    with Session(model, len(ids), CHUNK) as session:
        return np.concatenate([session.score(ids[:-8]), *(session.score([token]) for token in ids[-8:])])


# ---- what is computed ----


@pytest.mark.parametrize("chunk", [CHUNK, CAPACITY])
def test_logits_are_the_decoders(case, chunk):
    decoder, package, cache = case
    expected = expect(decoder, CAPACITY, cache)
    if cache == "fp16":
        # Flash attention rounds queries and sums to fp16 as well, 11 bits: some roundings of the largest logit.
        expected = replace(expected, tolerance=4 * 2**-11 * np.abs(expected.logits).max())
    with Model(package, threads=1) as model, Session(model, CAPACITY, chunk) as session:
        walk_session(session, expected, CHUNK)


@pytest.mark.parametrize("cut", [0, 100, 0.5, 0.99])
def test_a_model_file_that_was_cut_off_is_one_sentence(tiny, tmp_path, cut, capfd):
    package = shutil.copytree(tiny, tmp_path / "package")
    model = package / "model.gguf"
    size = cut if isinstance(cut, int) else int(cut * model.stat().st_size)
    os.truncate(model, size)
    with pytest.raises(InputError, match=r"model\.gguf: has"):
        Model(package)
    manifest = json.loads((package / "edge_qkv.json").read_text())
    manifest["files"]["model.gguf"]["bytes"] = size
    (package / "edge_qkv.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"model\.gguf: llama\.cpp cannot open it \(.+\); export") as refused:
        Model(package, verify=False)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_is_not_the_manifests_is_refused(tiny, tmp_path):
    package = shutil.copytree(tiny, tmp_path / "package")
    manifest = json.loads((package / "edge_qkv.json").read_text())
    for fact, value in (("cache", "int8"), ("cache", ["fp32"]), ("cache_bytes_per_token", 1)):
        (package / "edge_qkv.json").write_text(json.dumps(manifest | {fact: value}))
        with pytest.raises(InputError, match="has a cache that llama"):
            Model(package)
    manifest["config"]["vocab_size"] += 1
    (package / "edge_qkv.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"disagree on vocab_size \(261 and 260\)"):
        Model(package)


def test_one_thread_computes_what_two_do(tiny, ids):
    logits = []
    for threads in (1, 2):
        with Model(tiny, threads=threads) as model:
            logits.append(_conversation(model, ids[:CAPACITY]))
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_the_same_seed_writes_the_same(tiny):
    def written(seed: int) -> list[int]:
        with Session(tiny, context=60, threads=1) as session:
            return list(session.generate_tokens([1, 2], 40, Sampling(temperature=1.5, top_k=0, top_p=1, seed=seed)))

    assert written(3) == written(3) != written(4)


# ---- the conversation ----


def test_reuse_evaluates_only_what_differs(tiny, ids):
    with Model(tiny, threads=1) as model, Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:40])
        assert session.reuse(ids[:30] + [255] * 5) == 30
        session.evaluate([255] * 5)
        logits = session.logits()
        session.rewind(0)
        session.evaluate(ids[:30])
        session.evaluate([255] * 5)
        np.testing.assert_allclose(session.logits(), logits, atol=1e-5)


def test_a_full_context_is_refused_before_anything_is_evaluated(tiny, ids):
    """Also where llama.cpp, which rounds it up, had room for more."""
    with Session(tiny, context=50, threads=1) as session:
        session.evaluate(ids[:40])
        with pytest.raises(ContextFull):
            session.evaluate(ids[:11])
        session.evaluate(ids[:10])
        with pytest.raises(ContextFull):
            session.evaluate(ids[:1])
        assert session.tokens == ids[:40] + ids[:10]


def test_fill_gives_a_deep_context_at_once(case, ids):
    _, package, _ = case
    with Session(package, CAPACITY, CHUNK, 1) as session:
        session.evaluate(ids[:10])
        session.fill(CAPACITY - 1)
        assert session.tokens[:10] == ids[:10]
        with pytest.raises(InputError, match="no logits"):
            session.sample()
        session.evaluate(ids[:1])
        assert np.isfinite(session.logits()).all()
        session.rewind(10)
        kept = session.score(ids[10:20])
        session.rewind(0)
        session.evaluate(ids[:10])
        np.testing.assert_array_equal(session.score(ids[10:20]), kept)


# ---- snapshots and forks ----


def test_a_restored_conversation_goes_on_bit_for_bit(case, ids, tmp_path):
    _, package, _ = case
    with Model(package, threads=1) as model:
        for length in LENGTHS:
            context = min(length + 10, CAPACITY)
            with Session(model, context, CHUNK) as session:
                session.evaluate(ids[:length])
                session.save(tmp_path / "saved")
                now, rest = session.logits(), session.score(ids[length:context])
            with Session(model, CAPACITY, CHUNK) as other:
                other.evaluate(ids[50:100])
                other.restore(tmp_path / "saved")
                assert other.tokens == ids[:length]
                np.testing.assert_array_equal(other.logits(), now)
                np.testing.assert_array_equal(other.score(ids[length:context]), rest)
        with Session(model, CAPACITY - 1) as small, pytest.raises(ContextFull, match=f"{CAPACITY}"):
            small.restore(tmp_path / "saved")


def test_a_fork_goes_its_own_way(case, ids):
    _, package, _ = case
    with Model(package, threads=1) as model, Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:40])
        with session.fork() as fork:
            both = [fork.score(ids[60:90]), session.score(ids[40:70])]
        for rest, logits in zip((ids[60:90], ids[40:70]), both, strict=True):
            session.rewind(0)
            session.evaluate(ids[:40])
            np.testing.assert_array_equal(session.score(rest), logits)
        session.rewind(0)
        with session.fork() as empty:
            assert empty.tokens == []


def test_a_snapshot_of_another_engine_is_refused(random_package, tiny, ids, tmp_path):
    packages = [tiny, random_package("onnx", *CASES["fp32"])[1]]
    for package, other in (packages, reversed(packages)):
        with Session(package, CAPACITY, threads=1) as session:
            session.evaluate(ids[:40])
            session.save(tmp_path / "saved")
        with Session(other, CAPACITY, threads=1) as session:
            session.evaluate(ids[:5])
            before = session.logits()
            with pytest.raises(InputError, match="saved: "):
                session.restore(tmp_path / "saved")
            assert session.tokens == ids[:5]
            np.testing.assert_array_equal(session.logits(), before)


def test_a_cache_of_another_shape_is_damage_and_changes_nothing(case, ids, tmp_path):
    """Numbers alone come out of a snapshot: there is no byte of it by which llama.cpp reads the rest."""
    _, package, cache = case
    with Model(package, threads=1) as model, Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:20])
        session.save(tmp_path / "saved")
        parts = dict(np.load(tmp_path / "saved"))
        rows = {name for name in parts if name.startswith("cache.")}
        assert rows and all(parts[name].dtype == {"fp32": "f4", "fp16": "f2"}[cache] for name in rows)
        session.evaluate(ids[20:30])
        before = session.logits()
        for name in rows:
            whole = parts[name]
            for other in (whole[1:], whole[:, 1:], whole[..., 1:], whole.astype("f8"), whole[0], None):
                changed = {n: p for n, p in parts.items() if n != name} | ({} if other is None else {name: other})
                with open(tmp_path / "damaged", "wb") as file:
                    np.savez(file, **changed)
                with pytest.raises(InputError, match="damaged"):
                    session.restore(tmp_path / "damaged")
                assert session.tokens == ids[:30]
                np.testing.assert_array_equal(session.logits(), before)
        worst = parts | {name: np.full_like(parts[name], np.nan) for name in rows}
        with open(tmp_path / "damaged", "wb") as file:
            np.savez(file, **worst)
        session.restore(tmp_path / "damaged")  # rows of nonsense give nonsense
        session.evaluate(ids[20:22])
        session.restore(tmp_path / "saved")
        session.evaluate(ids[20:30])  # and leave no trace
        np.testing.assert_array_equal(session.logits(), before)


def test_a_state_that_is_laid_out_in_another_way_is_recognised(case, ids):
    """Such as a later llama.cpp might write: each byte of it that is no row is checked."""
    _, package, _ = case
    with Model(package, threads=1) as model, Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:20])
        cache = session._engine._cache
        layout, rows = cache._layout, cache.read(20)
        size = llama_cpp.llama_state_seq_get_size(cache._context, 0)
        state = np.empty(size, np.uint8)
        assert llama_cpp.llama_state_seq_get_data(cache._context, engine._pointer(state), size, 0) == size
        np.testing.assert_array_equal(layout.join(rows), state)
        found = 0
        for i in range(size):
            other = state.copy()
            other[i] ^= 1
            try:
                layout.split(other, 20)
            except Exception as error:
                assert "lays its cache out in another way" in str(error)
                found += 1
        assert found == size - 20 * layout.bytes_per_token
        for wrong in (state[:-1], np.append(state, np.uint8(0)), state[:10], state[:0]):
            with pytest.raises(EdgeQKVError, match="lays its cache out in another way"):
                layout.split(wrong, 20)


# ---- memory ----


def test_memory_is_what_llama_cpp_allocates(case, monkeypatch):
    """For its whole context, rounded up, when the session is opened."""
    _, package, cache = case
    lines = []
    with Model(package, threads=1) as model:
        monkeypatch.setattr(engine._log, "hears", llama_cpp.llama_log_callback(lambda _, text, __: lines.append(text)))
        with Session(model, CAPACITY) as session:
            memory = session.memory()
        a_token = model.info.cache_bytes_per_token
    said = re.findall(r"KV buffer size = +([0-9.]+) MiB", b"".join(lines).decode())
    assert memory["cache_reserved"] == memory["cache_committed"] == 256 * a_token
    assert sum(map(float, said)) == pytest.approx(256 * a_token / 2**20, abs=0.006)
    assert plan(package, context=CAPACITY).cache == 256 * a_token
    assert plan(package, context=CAPACITY).cache_type == cache


def test_what_is_closed_is_given_back(random_package, ids):
    wide = changed(LONG, max_positions=65536)
    package = random_package("gguf", wide, "fp16", weights="f32")[1]

    def anonymous() -> int:
        with Model(package, threads=1, verify=False) as model, Session(model, "max", CHUNK) as session:
            session.evaluate(ids[:CHUNK])
            with session.fork() as fork:
                fork.evaluate(ids[:8])
            return session.memory()["anonymous"]

    first = anonymous()
    cache = plan(package).cache
    assert cache > 60e6
    assert max(anonymous() for _ in range(6)) < first + cache  # of 12 that were closed


# ---- closing, cancelling, several sessions, several models ----


def test_sessions_outlive_their_model(tiny, ids):
    model = Model(tiny, threads=1)
    session = Session(model, CAPACITY, CHUNK)
    expected = session.score(ids[:40])
    model.close()
    with pytest.raises(InputError, match="the model is closed"):
        Session(model, CAPACITY)
    session.rewind(0)
    np.testing.assert_array_equal(session.score(ids[:40]), expected)
    with session.fork() as fork:
        session.close()
        np.testing.assert_array_equal(fork.logits(), expected[-1])
    for use in (session.logits, session.sample, lambda: session.rewind(0), lambda: session.reuse([1])):
        with pytest.raises(InputError, match="the session is closed"):
            use()
    session.cancel()
    session.close()


def test_a_cancelled_call_stops_in_the_middle_and_the_session_goes_on(long, ids):
    prompt = ids[:768]
    with Model(long, threads=1) as model, Session(model, prefill_chunk=512) as session:
        session.evaluate(prompt[:256])
        began = time.perf_counter()
        session.evaluate(prompt[256:])
        whole = time.perf_counter() - began
        expected = session.logits()
        stopped = 0
        for _ in range(10):
            session.rewind(256)
            canceller = threading.Timer(whole / 3, session.cancel)
            began = time.perf_counter()
            canceller.start()
            try:
                session.evaluate(prompt[256:])
            except Cancelled:
                stopped += time.perf_counter() - began < 0.75 * whole
            else:
                with pytest.raises(Cancelled):
                    session.evaluate(ids[-1:])
            canceller.join()
            assert session.tokens in (prompt[:256], prompt)
            session.evaluate(prompt[len(session.tokens) :])
            np.testing.assert_array_equal(session.logits(), expected)
        assert stopped >= 7


def test_sessions_and_models_do_not_disturb_each_other(long, tiny, random_package, ids):
    onnx = random_package("onnx", *CASES["fp32"])[1]
    with Model(long, threads=1) as one, Model(tiny, threads=1) as two, Model(onnx, threads=1) as three:
        jobs = [(one, ids[:300]), (one, ids[700:1000]), (two, ids[:CAPACITY]), (three, ids[:CAPACITY])]
        alone = [_conversation(*job) for job in jobs]
        results = [None] * len(jobs)

        def work(number: int) -> None:
            results[number] = _conversation(*jobs[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result, expected in zip(results, alone, strict=True):
        np.testing.assert_array_equal(result, expected)


class Interrupt(BaseException):
    pass


@pytest.fixture
def alarm():
    """alarm(handler, seconds): calls the handler once after that long, at whatever the main thread then does."""
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(*_) -> None:
        raise Interrupt

    def arm(seconds: float, handler=interrupt) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_a_sound_session(tiny, ids, tmp_path, alarm, capfd):
    """Whatever an exception out of a signal handler ends, the session knows afterwards what its cache holds."""
    generator = np.random.default_rng(7)
    model = Model(tiny, threads=1)
    with model, Session(model, CAPACITY, CHUNK) as session, Session(model, CAPACITY, CHUNK) as fresh:
        session.evaluate(ids[:40])
        session.save(tmp_path / "saved")
        for _ in range(40):
            with contextlib.suppress(Interrupt):
                alarm(generator.uniform(1e-4, 0.02))
                while True:
                    session.rewind(len(session.tokens) // 2)
                    session.evaluate(ids[: int(generator.integers(1, 45))])
                    session.restore(tmp_path / "saved")
                    with session.fork() as fork:
                        fork.evaluate(ids[:3])
                    session.reuse(ids[: int(generator.integers(1, 60))])
                    list(session.generate_tokens([1], 3))
            tokens = session.tokens
            assert tokens[: len(tokens) - len(session._pending)] == session._engine.tokens().tolist()
            session.rewind(min(5, len(tokens)))
            session.evaluate(ids[5:30])
            assert session.tokens == tokens[:5] + ids[5:30]
            fresh.rewind(0)
            fresh.evaluate(session.tokens)
            np.testing.assert_allclose(session.logits(), fresh.logits(), atol=1e-4)
    assert capfd.readouterr() == ("", "")


def test_an_interruption_while_a_model_opens_is_heard(long, alarm, capfd):
    """llama.cpp reports its progress to Python, whose callbacks swallow exceptions in the main thread."""
    Model(long).close()
    for delay in np.linspace(1e-3, 0.06, 40):
        with pytest.raises(Interrupt):
            alarm(delay)
            with Model(long, verify=False) as model, Session(model, 256):
                pass
            time.sleep(5)  # as long as nothing is heard
    assert capfd.readouterr() == ("", "")


def test_a_signal_handler_may_close_a_session_that_is_in_a_call(tiny, ids, alarm):
    session = Session(tiny, CAPACITY, CAPACITY, 1)
    alarm(0.05, lambda *_: session.close())
    with pytest.raises(InputError, match="the session is closed"):
        while True:
            session.rewind(0)
            session.evaluate(ids[:CAPACITY])


# ---- the command line ----


@pytest.fixture(scope="module")
def talking(tmp_path_factory, bundled_checkpoint) -> Path:
    from edge_qkv.export import export_package

    folder = tmp_path_factory.mktemp("talking")
    tokenizer = Tokenizer.from_file(str(bundled_checkpoint / "tokenizer.json"))
    config = changed(PLAIN, vocab_size=tokenizer.get_vocab_size())
    checkpoint = write_checkpoint(folder / "checkpoint", config, tokenizer)
    export_package("gguf", str(checkpoint), folder / "package", weights="f32", cache="fp32", parity=False)
    return folder / "package"


def _run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "edge_qkv", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=hears_ctrl_c,
    )


def test_run_writes_what_the_session_does(talking, tmp_path):
    with Session(talking, context=90, threads=1) as session:
        text = "".join(session.generate("Hello", 12, Sampling(seed=5)))
    options = ["--context", 90, "--seed", 5, "--threads", 1, "--prefill-chunk", 3, "--max-tokens", 12]
    done = _run(talking, "--prompt", "Hello", "--save", tmp_path / "saved", *options)
    assert (done.returncode, done.stdout) == (0, f"Hello{text}\n"), done.stderr
    assert re.fullmatch(r"\[seed 5; prefill 3 tokens, .*\]\n", done.stderr), done.stderr
    again = _run(talking, "--prompt", "!", "--restore", tmp_path / "saved", "--json", *options)
    assert again.returncode == 0, again.stderr
    figures = json.loads(again.stdout)["figures"]
    assert figures["tokens"] == 3 + 12 + 1 + 12


@pytest.mark.parametrize(
    "option, value",
    [("--memory", "1GB"), ("--packed", "."), ("--spill", "."), ("--overflow", "shift"), ("--overflow", "window")],
)
def test_run_refuses_what_llama_cpp_has_not(talking, option, value):
    done = _run(talking, "--prompt", "Hello", option, value)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"edge-qkv: (error: )?(--)?{option.strip('-')}: .+\n", done.stderr), done.stderr
