"""Sessions of one model: forks that share pages, prefixes that are not read again, budgets and trims."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from edge_qkv import InputError, Model, Sampling, Session

CONTEXT, CHUNK = 8192, 64
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def package(bundled_package):
    return bundled_package("int4")[0]


@pytest.fixture
def model(package):
    with Model(package, threads=2) as model:
        yield model


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 4096, (2 * CONTEXT,), generator=torch.Generator().manual_seed(6)).tolist()


def _session(model, context: int = CONTEXT, **options) -> Session:
    return Session(model, context=context, prefill_chunk=CHUNK, **options)


def _private(session: Session) -> int:
    """Bytes of anonymous memory of this process."""
    return session.memory()["anonymous"]


# ---- prefixes and forks ----


def test_a_shared_prefix_is_not_evaluated_again(model, ids):
    with _session(model) as session, _session(model) as fresh:
        session.evaluate(ids[:640])
        other = ids[:512] + ids[700:900]
        assert session.reuse(other) == 512
        session.evaluate(other[512:])
        fresh.evaluate(other)
        np.testing.assert_array_equal(session.logits(), fresh.logits())  # both in chunks from 0, 64, 128...
        assert session.reuse(other) == len(other)  # nothing left to do: its logits are there
        np.testing.assert_array_equal(session.logits(), fresh.logits())
        assert session.reuse(other[:600]) == 599  # one is left, for the logits
        assert session.reuse([(other[0] + 1) % 4096]) == 0 and session.tokens == []


def test_a_prompt_that_is_the_whole_conversation_is_read_from_where_it_differs(model):
    with _session(model) as session:
        first = "".join(session.generate("KING HENRY.\nWhat ho", 30, GREEDY, reuse=True))
        assert session.timing.reused_tokens == 0
        evaluated = session.timing.prefill_tokens
        again = "".join(session.generate("KING HENRY.\nWhat ho", 30, GREEDY, reuse=True))
        assert again == first
        assert session.timing.reused_tokens == evaluated - 1 and session.timing.prefill_tokens == 1


def test_forks_go_their_own_ways(model, ids):
    with _session(model) as session:
        session.evaluate(ids[:1000])
        forks = [session.fork() for _ in range(3)]
        for number, fork in enumerate(forks):
            np.testing.assert_array_equal(fork.logits(), session.logits())
            fork.evaluate(ids[2000 + 64 * number : 2064 + 64 * number])
        session.evaluate(ids[1000:1064])
        for number, fork in enumerate([session, *forks]):
            tokens = ids[:1000] + (ids[1000:1064] if number == 0 else ids[1936 + 64 * number : 2000 + 64 * number])
            assert fork.tokens == tokens
            with _session(model) as alone:
                alone.evaluate(tokens[:1000])
                alone.evaluate(tokens[1000:])
                np.testing.assert_array_equal(fork.logits(), alone.logits())
        session.close()  # the first to go: the pages stay with the others
        forks[0].evaluate(ids[:64])
        for fork in forks:
            fork.close()


def test_forks_do_not_copy_the_prefix(package, ids):
    """Ten forks of 16 MB of cache, each written to, add less than one copy of it."""
    with Model(package, threads=1) as model, Session(model, context=32768, prefill_chunk=CHUNK) as session:
        session.fill(32000)
        whole = session.memory()["cache_used"]
        assert whole > 15e6
        before = _private(session)
        forks = []
        for number in range(10):
            forks.append(session.fork())
            forks[-1].evaluate([ids[number]])
        grown = _private(session) - before
        for fork in forks:
            fork.close()
    assert grown < whole / 2


# ---- trims ----


@pytest.mark.parametrize("level", ["workspace", "idle", "all"])
def test_a_trimmed_session_goes_on_with_identical_output(model, ids, level):
    with _session(model) as one, _session(model) as two, _session(model) as undisturbed:
        undisturbed.evaluate(ids[:300])
        expected = [undisturbed.logits()]
        for token in ids[300:320]:
            undisturbed.evaluate([token])
            expected.append(undisturbed.logits())
        undisturbed.close()
        one.evaluate(ids[:300])
        two.evaluate(ids[:300])
        model.trim(level)
        for session in (one, two):
            np.testing.assert_array_equal(session.logits(), expected[0])
            for token, logits in zip(ids[300:320], expected[1:], strict=True):
                session.evaluate([token])
                model.trim(level)
                np.testing.assert_array_equal(session.logits(), logits)


def test_a_trim_gives_the_memory_back(package):
    with Model(package, threads=1) as model:
        sessions = [Session(model, context=32768) for _ in range(3)]
        empty = sessions[0].memory()["anonymous"]
        for session in sessions:
            session.fill(32000)
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


def test_an_unknown_level_is_refused(model):
    with pytest.raises(InputError, match="workspace, idle, all"):
        model.trim("everything")


def test_trims_and_evaluations_do_not_disturb_each_other(model, ids):
    """One thread trims as fast as it can while two write: nobody is refused and nothing changes."""
    with _session(model) as session:
        expected = list(session.generate_tokens(ids[:100], 60, GREEDY))
    results, stop = {}, threading.Event()

    def write(name: str) -> None:
        with _session(model) as session:
            results[name] = list(session.generate_tokens(ids[:100], 60, GREEDY))

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
    assert results == {"a": expected, "b": expected}


# ---- a budget that sessions share ----


def test_sessions_share_a_budget_and_the_oldest_makes_room(package, ids):
    """Four conversations in a budget that holds one: each goes on as if it were alone."""
    from edge_qkv.planning import plan

    budget = plan(package, context=4096, prefill_chunk=CHUNK, threads=1).total
    with Model(package, threads=1, memory=budget, context=4096, prefill_chunk=CHUNK) as model:
        sessions = [_session(model, context=None) for _ in range(4)]
        assert sessions[0].context == 4096
        cache = 4096 * model.info.cache_bytes_per_token
        alone = {}
        for turn in range(3):
            for number, session in enumerate(sessions):
                session.evaluate(ids[1000 * number + 300 * turn : 1000 * number + 300 * (turn + 1)])
                session.fill(1000 * (turn + 1) + 300)
                session.evaluate([number])
                alone[turn, number] = session.logits()
                assert sum(s.memory()["cache_committed"] for s in sessions) <= 1.1 * cache
    with Model(package, threads=1) as model, _session(model, context=4096) as session:
        for number in range(4):
            session.rewind(0)
            for turn in range(3):
                session.evaluate(ids[1000 * number + 300 * turn : 1000 * number + 300 * (turn + 1)])
                session.fill(1000 * (turn + 1) + 300)
                session.evaluate([number])
                np.testing.assert_array_equal(session.logits(), alone[turn, number])


def test_threads_take_turns_in_a_budget(package, ids):
    from edge_qkv.planning import plan

    budget = plan(package, context=2048, prefill_chunk=CHUNK, threads=1).total
    with Model(package, threads=1, memory=budget, context=2048, prefill_chunk=CHUNK) as model:
        with _session(model, context=2048) as session:
            expected = list(session.generate_tokens(ids[:500], 40, GREEDY))
        results = {}

        def write(name: int) -> None:
            with _session(model, context=2048) as session:
                results[name] = []
                for token in session.generate_tokens(ids[:500], 40, GREEDY):
                    results[name].append(token)
                    session.memory()  # short calls, in which others must not find the session unmovable

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == dict.fromkeys(range(4), expected)
        with pytest.raises(InputError, match="2048"):
            _session(model, context=4096)
