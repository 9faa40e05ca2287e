"""What sessions have in memory, what a trim gives back, and budgets that sessions share."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from edge_qkv import InputError, Model, OverBudget, Sampling, Session, pack, plan
from memory_probe import measure

from .engines import CAPACITY, CHUNK, DEEP, INT4, LONG, WIDE, conversation, having, on

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def long(target, random_package) -> Path:
    return random_package(target, LONG, "fp16", chunk=LONG.max_positions // 2)[1]


@pytest.fixture(scope="module")
def deep(random_package) -> Path:
    return random_package("onnx", DEEP)[1]


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(6).integers(0, 256, 3 * LONG.max_positions).tolist()


# ---- figures ----


@having("memory", lacking=("windows",))
def test_memory_counts_the_cache_row_by_row(engine, model, session, ids):
    per_token = model.info.cache_bytes_per_token
    assert per_token == model.config.cache_bytes_per_token(engine.engine.cache)
    session.evaluate(ids[:10])
    memory = session.memory()
    assert memory["cache_used"] == 10 * per_token
    assert 0 <= memory["cache_reserved"] - CAPACITY * per_token < 2 * 65536  # each layer ends with its page
    assert memory["cache_committed"] > 0
    assert memory["resident"] >= memory["anonymous"] > 0
    assert memory["peak_resident"] >= memory["resident"] * 0.99


@having("windows")
def test_windows_use_no_more_of_the_cache_than_they_see(engine, model, session, ids):
    session.evaluate(ids)
    rows = model.config.cache_bytes(CAPACITY, engine.engine.cache, 0)
    assert session.memory()["cache_used"] <= rows < CAPACITY * model.info.cache_bytes_per_token


@on("coreml", "eager", "llama.cpp")
def test_memory_is_the_whole_cache_at_once(engine, model, session, ids):
    session.evaluate(ids[:10])
    memory = session.memory()
    assert memory["cache_used"] == 10 * model.info.cache_bytes_per_token
    assert memory["cache_committed"] == memory["cache_reserved"] == session._engine._cache.bytes
    model.trim("all")
    assert session.tokens == ids[:10]


# ---- trims ----


@having("memory")
@pytest.mark.parametrize("level", ["workspace", "idle", "all"])
def test_a_trimmed_session_goes_on_bit_for_bit(engine, ids, level, tmp_path):
    files = {"workspace": 0, "idle": 1, "all": 2}[level]  # of the two sessions' caches
    with engine.model(spill=tmp_path) as model:
        expected = conversation(model, ids)
        with Session(model, CAPACITY, CHUNK) as one, Session(model, CAPACITY, CHUNK) as two:
            for session in (one, two):
                np.testing.assert_array_equal(session.score(ids[:-8]), expected[:-8])
            model.trim(level)
            assert _open_files(tmp_path) == files
            for i in range(CAPACITY - 8, CAPACITY):
                for session in (one, two):
                    np.testing.assert_array_equal(session.score(ids[i : i + 1])[0], expected[i])
                    model.trim(level)


def _open_files(folder: Path) -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(str(folder) in os.readlink(link) for link in links if link.is_symlink())


def test_a_cache_of_many_pages_comes_back_from_its_file(long, tokens):
    with Model(long) as model:
        expected = conversation(model, tokens[:600])
        with Session(model, 600, CHUNK) as session:
            np.testing.assert_array_equal(session.score(tokens[:592]), expected[:592])
            for i, token in enumerate(tokens[592:600], 592):
                model.trim("all")
                np.testing.assert_array_equal(session.score([token])[0], expected[i])


def test_a_trim_gives_the_memory_back(deep):
    with Model(deep, threads=1) as model:
        sessions = [Session(model, context=8192) for _ in range(3)]
        empty = sessions[0].memory()["anonymous"]
        for session in sessions:
            session.fill(8000)
        whole = sessions[0].memory()["cache_used"]
        full = sessions[0].memory()["anonymous"]
        assert full - empty > 2.9 * whole
        model.trim("idle")  # all but the last used
        assert abs(sessions[0].memory()["anonymous"] - empty - whole) < 0.3 * whole
        model.trim("all")
        assert sessions[0].memory()["anonymous"] - empty < 0.3 * whole
        assert sum(session.memory()["cache_committed"] for session in sessions) < 0.3 * whole
        for session in sessions:
            session.close()


@on("onnx", "eager")
def test_an_unknown_level_is_refused(model):
    with pytest.raises(InputError, match="workspace, idle, all"):
        model.trim("everything")


@having("memory")
def test_trims_and_evaluations_do_not_disturb_each_other(model, ids):
    """One thread trims as fast as it can while two write: nobody is refused and nothing changes."""
    expected = conversation(model, ids)
    results, stop = {}, threading.Event()

    def write(name: str) -> None:
        results[name] = conversation(model, ids)

    def trim() -> None:
        while not stop.is_set():
            model.trim("all")

    trimmer = threading.Thread(target=trim)
    trimmer.start()
    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    trimmer.join()
    assert len(results) == 2
    for logits in results.values():
        np.testing.assert_array_equal(logits, expected)


# ---- a budget that sessions share ----


def test_a_budget_holds_or_is_refused(long, tokens):
    facts = dict(context=LONG.max_positions, prefill_chunk=CHUNK, threads=1)
    budget = plan(long, **facts).total
    with pytest.raises(OverBudget, match=r"needs .* are allowed: .* short"):
        Model(long, memory=budget - 1, **facts)
    with Model(long, memory=budget, **facts) as model:
        cache = LONG.max_positions * model.info.cache_bytes_per_token
        with Session(model, "max", CHUNK) as one, Session(model, prefill_chunk=CHUNK) as two:
            assert one.context == two.context == LONG.max_positions
            found = {0: [], 1000: []}
            for part in (slice(0, 1600), slice(1600, 3000)):  # in turns, in a budget for one
                for session, start in ((one, 0), (two, 1000)):
                    found[start].append(session.score(tokens[start:][part]))
                    assert sum(s.memory()["cache_committed"] for s in (one, two)) <= 1.1 * cache
    with Model(long, threads=1) as model, Session(model, prefill_chunk=CHUNK) as session:
        for start, logits in found.items():
            session.rewind(0)
            np.testing.assert_array_equal(session.score(tokens[start:][:3000]), np.concatenate(logits))


def test_sessions_share_a_budget_and_the_oldest_makes_room(deep, tokens):
    """Four conversations in a budget that holds one: each goes on as if it were alone."""
    budget = plan(deep, context=4096, prefill_chunk=64, threads=1).total
    with Model(deep, threads=1, memory=budget, context=4096, prefill_chunk=64) as model:
        sessions = [Session(model, prefill_chunk=64) for _ in range(4)]
        assert sessions[0].context == 4096
        cache = 4096 * model.info.cache_bytes_per_token
        alone = {}
        for turn in range(3):
            for number, session in enumerate(sessions):
                session.evaluate(tokens[1000 * number + 300 * turn : 1000 * number + 300 * (turn + 1)])
                session.fill(1000 * (turn + 1) + 300)
                session.evaluate([number])
                alone[turn, number] = session.logits()
                assert sum(s.memory()["cache_committed"] for s in sessions) <= 1.1 * cache
    with Model(deep, threads=1) as model, Session(model, 4096, 64) as session:
        for number in range(4):
            session.rewind(0)
            for turn in range(3):
                session.evaluate(tokens[1000 * number + 300 * turn : 1000 * number + 300 * (turn + 1)])
                session.fill(1000 * (turn + 1) + 300)
                session.evaluate([number])
                np.testing.assert_array_equal(session.logits(), alone[turn, number])


def test_threads_take_turns_in_a_budget(long, tokens):
    facts = dict(context=2048, prefill_chunk=64, threads=1)
    with Model(long, memory=plan(long, **facts).total, **facts) as model:
        with Session(model, 2048, 64) as session:
            expected = list(session.generate_tokens(tokens[:300], 20, GREEDY))
        results = {}

        def write(name: int) -> None:
            with Session(model, 2048, 64) as session:
                results[name] = []
                for token in session.generate_tokens(tokens[:300], 20, GREEDY):
                    results[name].append(token)
                    session.memory()  # short calls, in which others must not find the session unmovable

        threads = [threading.Thread(target=write, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == dict.fromkeys(range(3), expected)
        with pytest.raises(InputError, match="2048"):
            Session(model, 4096, 64)


# ---- packed weights ----


@pytest.fixture(scope="module")
def int4(target, random_package) -> Path:
    return random_package(target, WIDE, "fp16", weights=INT4[target], chunk=128)[1]


@pytest.fixture(scope="module")
def packed(int4, tmp_path_factory) -> Path:
    return pack(int4, tmp_path_factory.mktemp("packed"))


def _logits(package: Path, packed: Path | bool, ids: list[int]) -> tuple[bool, np.ndarray]:
    with Model(package, threads=2, packed=packed) as model:
        return bool(model.info.packed), conversation(model, ids[:60])


def test_packed_weights_change_no_logit_and_what_is_cut_off_is_ignored(int4, packed, tokens):
    (file,) = (path for path in packed.glob("packed-*/*") if path.stat().st_size > 1e6)
    expected = _logits(int4, False, tokens)[1]
    for damaged in (False, True):
        if damaged:
            os.truncate(file, file.stat().st_size // 2)
        is_packed, logits = _logits(int4, packed, tokens)
        assert is_packed is not damaged
        np.testing.assert_array_equal(logits, expected)
    pack(int4, packed)  # anew
    is_packed, logits = _logits(int4, packed, tokens)
    assert is_packed
    np.testing.assert_array_equal(logits, expected)


def test_a_trim_gives_the_packed_weights_back(int4, packed, tokens):
    """They are what a packed model has in memory, and not beside its file."""

    def in_ram() -> int:
        """Bytes of the files of packed weights that this process has in RAM."""
        of_mapping = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        return sum(int(re.search(r"^Rss: +(\d+)", m, re.M)[1]) * 1024 for m in of_mapping if str(packed) in m)

    with Model(int4, threads=2, packed=packed) as model:
        expected = conversation(model, tokens[:60])
        before = in_ram()
        assert before > 1e6
        model.trim("all")
        assert in_ram() < before / 10
        np.testing.assert_array_equal(conversation(model, tokens[:60]), expected)


@pytest.mark.slow
def test_processes_map_the_same_packed_weights(target, bundled_package, tmp_path):
    """The weights are no memory of another process's own either, while this one has them."""
    package = bundled_package(INT4[target], target)[0]
    packed = pack(package, tmp_path)
    plain = measure(package, 1024, None)
    with Model(package, packed=packed) as model:
        assert model.info.packed
        mapped = measure(package, 1024, packed)
        with Model(package, packed=packed) as again:
            assert again.info.packed
    assert mapped["packed"] and not plain["packed"]
    saved = plain["steady_anonymous"] - mapped["steady_anonymous"]
    assert saved > plain["plan"]["weights_anonymous"] / 2
