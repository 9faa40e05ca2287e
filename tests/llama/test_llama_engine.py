"""What is special to sessions in llama.cpp; what they have in common with others is in tests/sessions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from conftest import TINY, changed, hears_ctrl_c, write_checkpoint
from edge_qkv import Cancelled, EdgeQKVError, InputError, Model, Sampling, Session, plan
from edge_qkv.engines import llama_cpp as engine

PLAIN = changed(TINY, positions="rotary-on-read")  # llama.cpp has no rotation that is undone on the output
CAPACITY, CHUNK = PLAIN.max_positions, 16
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


# ---- packages ----


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


# ---- snapshots ----


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


# ---- cancelling, interrupting ----


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
