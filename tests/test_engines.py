"""What a session does is the same with every engine: one list of behaviours, run on each."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, changed, needs
from eager import expect, walk_session
from edge_qkv import Cancelled, ContextFull, InputError, Model, OverBudget, Package, Session, pack, plan
from edge_qkv.targets import TARGETS
from memory_probe import measure

CAPACITY, CHUNK = TINY.max_positions, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)
CASES = {
    "fp32": (TINY, "fp32"),
    "fp16": (TINY, "fp16"),
    "separate V, int8": (changed(TINY, sharing="qkv", kv_heads=2, positions="rotary-on-read"), "int8"),
}
LONG = changed(TINY, max_positions=4096)  # evaluated whole it takes a good part of a second
INT4 = {"onnx": "int4", "executorch": "8da4w"}


@pytest.fixture(scope="module", params=CASES)
def case(request, target, random_package):
    """(decoder, package, cache type); a call of the engine takes `CHUNK` tokens at most, if it has a limit."""
    config, cache = CASES[request.param]
    return *random_package(target, config, cache, chunk=CHUNK), cache


@pytest.fixture(scope="module")
def tiny(target, random_package) -> Path:
    return random_package(target, *CASES["fp32"], chunk=CHUNK)[1]


@pytest.fixture(scope="module")
def long(target, random_package) -> Path:
    return random_package(target, LONG, "fp16", chunk=LONG.max_positions // 2)[1]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (LONG.max_positions,), generator=torch.Generator().manual_seed(1)).tolist()


def _conversation(model: Model, ids: list[int], **options) -> np.ndarray:
    """Logits [len(ids), V] of a session of its own: a prompt in chunks, then 8 tokens one by one."""
    with Session(model, len(ids), CHUNK, **options) as session:
        return np.concatenate([session.score(ids[:-8]), *(session.score([token]) for token in ids[-8:])])


# ---- what is computed ----


@pytest.mark.parametrize("chunk", [CHUNK, CAPACITY])
def test_logits_are_the_decoders(case, chunk):
    """Also where a session evaluates more at once than a call of the engine takes."""
    decoder, package, cache = case
    expected = expect(decoder, CAPACITY, cache)
    with Model(package, threads=2) as model, Session(model, CAPACITY, chunk) as session:
        walk_session(session, expected, CHUNK)


@pytest.mark.parametrize("policy", [dict(overflow="window", sinks=0, window=16), dict(overflow="shift", block=12)])
def test_a_full_context_drops_what_no_query_sees(target, random_package, ids, policy):
    """A model that looks back 16 tokens writes in a context of 40 what it writes in one that holds everything; more in
    test_overflow.py."""
    decoder, package = random_package(target, changed(TINY, window=16), chunk=CHUNK)
    with torch.no_grad():
        expected = decoder(torch.tensor([ids[:CAPACITY]]))[0][0].numpy()
    with Session(package, context=40, prefill_chunk=8, **policy) as session:
        # Moved rows are rotated once more; logits are of order 10.
        np.testing.assert_allclose(session.score(ids[:CAPACITY]), expected, atol=3e-4)
        assert session.dropped > 0


@pytest.mark.parametrize("cut", [0, 100, 0.5, 0.99])
def test_a_model_file_that_was_cut_off_is_one_sentence(tiny, tmp_path, cut):
    """More in test_bad_models.py."""
    package = shutil.copytree(tiny, tmp_path / "package")
    model = package / TARGETS[Package.open(package).target].model_file
    whole = model.stat().st_size
    os.truncate(model, cut if isinstance(cut, int) else int(cut * whole))
    for verify in (True, False):
        with pytest.raises(InputError, match=re.escape(model.name)) as refused:
            Model(package, verify=verify)
        assert "\n" not in str(refused.value)


def test_one_thread_computes_what_two_do(tiny, ids):
    logits = []
    for threads in (1, 2):
        with Model(tiny, threads=threads) as model:
            logits.append(_conversation(model, ids[:CAPACITY]))
    np.testing.assert_allclose(*logits, atol=1e-5)


# ---- snapshots and forks ----


def test_a_restored_conversation_goes_on_bit_for_bit(case, ids, tmp_path):
    _, package, _ = case
    with Model(package) as model:
        for length in LENGTHS:
            context = min(length + 10, CAPACITY)
            with Session(model, context, CHUNK) as session:
                session.evaluate(ids[:length])
                session.save(tmp_path / "saved")
                now, rest = session.logits(), session.score(ids[length:context])
            with Session(model, CAPACITY, CHUNK) as other:  # of another context
                other.evaluate(ids[50:100])
                other.restore(tmp_path / "saved")
                assert other.tokens == ids[:length]
                np.testing.assert_array_equal(other.logits(), now)
                np.testing.assert_array_equal(other.score(ids[length:context]), rest)
        with Session(model, CAPACITY - 1) as small, pytest.raises(ContextFull, match=f"{CAPACITY}"):
            small.restore(tmp_path / "saved")


def test_a_fork_goes_its_own_way(case, ids):
    _, package, _ = case
    with Model(package) as model, Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:40])
        with session.fork() as fork:
            both = [fork.score(ids[60:90]), session.score(ids[40:70])]
        for rest, logits in zip((ids[60:90], ids[40:70]), both, strict=True):
            session.rewind(0)
            session.evaluate(ids[:40])
            np.testing.assert_array_equal(session.score(rest), logits)


def test_a_snapshot_of_the_other_engine_is_refused(random_package, ids, tmp_path):
    packages = [random_package(target, *CASES["fp32"], chunk=CHUNK)[1] for target in ("onnx", "executorch")]
    for package, other in (packages, reversed(packages)):
        with Session(package, CAPACITY) as session:
            session.evaluate(ids[:40])
            session.save(tmp_path / "saved")
        with Session(other, CAPACITY) as session:
            session.evaluate(ids[:5])
            before = session.logits()
            with pytest.raises(InputError, match=r"saved: .* another model"):
                session.restore(tmp_path / "saved")
            assert session.tokens == ids[:5]
            np.testing.assert_array_equal(session.logits(), before)


# ---- memory ----


@pytest.mark.parametrize("level", ["workspace", "idle", "all"])
def test_trimmed_sessions_go_on_bit_for_bit(long, ids, level, tmp_path):
    files = {"workspace": 0, "idle": 1, "all": 2}[level]  # of the two sessions' caches
    with Model(long, spill=tmp_path) as model:
        expected = _conversation(model, ids[:600])
        with Session(model, 600, CHUNK) as one, Session(model, 600, CHUNK) as two:
            for session in (one, two):
                np.testing.assert_array_equal(session.score(ids[:592]), expected[:592])
            model.trim(level)
            links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            assert sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink()) == files
            for i, token in enumerate(ids[592:600], 592):
                for session in (one, two):
                    np.testing.assert_array_equal(session.score([token])[0], expected[i])
                    model.trim(level)


def test_a_trim_of_the_workspace_gives_executorchs_buffers_back(random_package, ids):
    """Also while another thread evaluates it returns at once."""
    needs("executorch")
    package = random_package("executorch", LONG, "fp16", chunk=LONG.max_positions // 2)[1]
    with Model(package, threads=1, packed=False) as model, Session(model, prefill_chunk=2048) as session:
        session.evaluate(ids[:2048])
        before = session.memory()["anonymous"]
        model.trim("workspace")
        assert before - session.memory()["anonymous"] > 1e6
        writer = threading.Thread(target=session.evaluate, args=(ids[2048:-1],))
        writer.start()
        waited = 0.0
        while writer.is_alive():
            began = time.perf_counter()
            model.trim("all")
            waited = max(waited, time.perf_counter() - began)
            time.sleep(0.001)
        began = time.perf_counter()
        session.rewind(2048)
        session.evaluate(ids[2048:-1])
        assert waited < (time.perf_counter() - began) / 2


def test_a_budget_holds_or_is_refused(long, ids):
    facts = dict(context=LONG.max_positions, prefill_chunk=CHUNK, threads=1)
    budget = plan(long, **facts).total
    with pytest.raises(OverBudget, match=r"needs .* are allowed: .* short"):
        Model(long, memory=budget - 1, **facts)
    with Model(long, threads=1) as model:
        expected = [_conversation(model, ids[start:]) for start in (0, 1000)]
    with Model(long, memory=budget, **facts) as model:
        cache = LONG.max_positions * model.info.cache_bytes_per_token
        with Session(model, "max", CHUNK) as one, Session(model, prefill_chunk=CHUNK) as two:
            assert one.context == two.context == LONG.max_positions
            for part in (slice(0, 1600), slice(1600, 3000)):  # in turns, in a budget for one
                for session, start, logits in ((one, 0, expected[0]), (two, 1000, expected[1])):
                    np.testing.assert_array_equal(session.score(ids[start:][part]), logits[part])
                    assert sum(s.memory()["cache_committed"] for s in (one, two)) <= 1.1 * cache


# ---- cancelling, several sessions, several models ----


def test_a_cancelled_evaluation_stops_in_the_middle_and_the_session_goes_on(long, ids):
    prompt = ids[:-1]
    with Model(long, threads=2) as model, Session(model, prefill_chunk=LONG.max_positions) as session:
        session.evaluate(prompt)
        expected = session.logits()
        session.rewind(0)
        began = time.perf_counter()
        session.evaluate(prompt)
        whole = time.perf_counter() - began
        for _ in range(50):
            session.rewind(0)
            canceller = threading.Timer(whole / 2, session.cancel)
            canceller.start()
            try:
                session.evaluate(prompt)
            except Cancelled:
                break
            canceller.join()  # too late for this one, and so for the next
            with pytest.raises(Cancelled):
                session.evaluate(ids[-1:])
        else:
            pytest.fail("no cancellation came in the middle")
        canceller.join()
        kept = len(session.tokens)
        assert kept in (0, LONG.max_positions // 2)  # whole calls of the engine
        session.evaluate(prompt[kept:])
        assert session.tokens == prompt
        np.testing.assert_array_equal(session.logits(), expected)


def test_sessions_of_a_model_do_not_disturb_each_other(long, ids):
    """Two in turns in one thread, then two in threads of their own."""
    starts = (0, 700)
    with Model(long, threads=2) as model:
        alone = [_conversation(model, ids[start:][:600]) for start in starts]
        with Session(model, 600, CHUNK) as one, Session(model, 600, CHUNK) as two:
            for part in (slice(i, i + 2 * CHUNK) for i in range(0, 592 - CHUNK, 2 * CHUNK)):
                for session, start, logits in ((one, 0, alone[0]), (two, 700, alone[1])):
                    np.testing.assert_array_equal(session.score(ids[start:][part]), logits[part])
        together = _in_threads([lambda start=start: _conversation(model, ids[start:][:600]) for start in starts])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("others", ["its own", "the other"])
def test_models_do_not_disturb_each_other(target, long, ids, others, random_package):
    """Of one engine, and of both in one process."""
    other = {"onnx": "executorch", "executorch": "onnx"}[target] if others == "the other" else target
    packages = [long, random_package(other, *CASES["separate V, int8"], chunk=CHUNK)[1]]
    parts = [ids[:600], ids[:CAPACITY]]
    alone = []
    for package, part in zip(packages, parts, strict=True):
        with Model(package, threads=2) as model:
            alone.append(_conversation(model, part))
    with Model(packages[0], threads=2) as one, Model(packages[1], threads=2) as two:
        jobs = [lambda: _conversation(one, parts[0]), lambda: _conversation(two, parts[1])]
        for results in ([job() for job in jobs], _in_threads(jobs)):
            for logits, expected in zip(results, alone, strict=True):
                np.testing.assert_array_equal(logits, expected)


def test_models_of_executorch_share_its_threads(random_package, ids):
    """It has one pool for a process; who asks for a single thread does without it."""
    needs("executorch")
    package = random_package("executorch", *CASES["fp32"], chunk=CHUNK)[1]
    with Model(package, threads=2) as model:
        expected = _conversation(model, ids[:40])
        with pytest.raises(InputError, match=r"one pool of threads .* uses 2, this one asks for 3; .* close that"):
            Model(package, threads=3)
        with Model(package, threads=1) as alone:
            np.testing.assert_allclose(_conversation(alone, ids[:40]), expected, atol=1e-5)
    with Model(package, threads=3) as model:
        np.testing.assert_allclose(_conversation(model, ids[:40]), expected, atol=1e-5)


def _in_threads(jobs) -> list[np.ndarray]:
    results = [None] * len(jobs)

    def work(number: int) -> None:
        results[number] = jobs[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- packed weights ----


@pytest.fixture(scope="module")
def int4(target, bundled_package) -> Path:
    return bundled_package(INT4[target], target)[0]


@pytest.fixture(scope="module")
def packed(int4, tmp_path_factory) -> Path:
    return pack(int4, tmp_path_factory.mktemp("packed"))


def _logits(package: Path, packed: Path | bool, ids: list[int]) -> tuple[bool, np.ndarray]:
    with Model(package, threads=2, packed=packed) as model:
        return bool(model.info.packed), _conversation(model, ids[:60])


def test_packed_weights_change_no_logit_and_what_is_cut_off_is_ignored(int4, packed, ids):
    (file,) = (path for path in packed.glob("packed-*/*") if path.stat().st_size > 1e6)
    expected = _logits(int4, False, ids)[1]
    for damaged in (False, True):
        if damaged:
            os.truncate(file, file.stat().st_size // 2)
        is_packed, logits = _logits(int4, packed, ids)
        assert is_packed is not damaged
        np.testing.assert_array_equal(logits, expected)
    pack(int4, packed)  # anew
    is_packed, logits = _logits(int4, packed, ids)
    assert is_packed
    np.testing.assert_array_equal(logits, expected)


def test_a_trim_gives_the_packed_weights_back(int4, packed, ids):
    """They are what a packed model has in memory, and not beside its file."""

    def in_ram() -> int:
        """Bytes of the files of packed weights that this process has in RAM."""
        of_mapping = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        return sum(int(re.search(r"^Rss: +(\d+)", m, re.M)[1]) * 1024 for m in of_mapping if str(packed) in m)

    with Model(int4, threads=2, packed=packed) as model:
        expected = _conversation(model, ids[:60])
        before = in_ram()
        assert before > 1e6
        model.trim("all")
        assert in_ram() < before / 10
        np.testing.assert_array_equal(_conversation(model, ids[:60]), expected)


def test_processes_map_the_same_packed_weights(int4, packed):
    """The weights are no memory of another process's own either, while this one has them."""
    plain = measure(int4, 1024, None)
    with Model(int4, packed=packed) as model:
        assert model.info.packed
        mapped = measure(int4, 1024, packed)
        with Model(int4, packed=packed) as again:
            assert again.info.packed
    assert mapped["packed"] and not plain["packed"]
    saved = plain["steady_anonymous"] - mapped["steady_anonymous"]
    assert saved > plain["plan"]["weights_anonymous"] / 2
