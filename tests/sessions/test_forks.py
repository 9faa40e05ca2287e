"""Forks: the same conversation until one of them goes on, and then each as if it were alone."""

from __future__ import annotations

import numpy as np

from edge_qkv import Model, Session

from .engines import CAPACITY, CHUNK, DEEP, LONG, with_variants


@with_variants
def test_a_fork_goes_its_own_way(model, session, ids):
    session.evaluate(ids[:40])
    forks = [session.fork() for _ in range(2)]
    for fork in forks:
        np.testing.assert_array_equal(fork.logits(), session.logits())
    ways = [(session, ids[40:70]), (forks[0], ids[60:90]), (forks[1], ids[10:15])]
    logits = [which.score(rest) for which, rest in ways]
    for (which, rest), given in zip(ways, logits, strict=True):
        assert which.tokens == ids[:40] + rest
        with Session(model, CAPACITY, CHUNK) as alone:
            alone.evaluate(ids[:40])
            np.testing.assert_array_equal(alone.score(rest), given)
    session.close()  # the first to go: what they share stays with the others
    forks[0].evaluate(ids[:5])
    for fork in forks:
        fork.close()


def test_a_fork_of_nothing_and_a_fork_of_a_fork(session, fresh, ids):
    with session.fork() as empty:
        assert empty.tokens == []
        empty.evaluate(ids[:20])
        with empty.fork() as second:
            empty.rewind(3)
            empty.evaluate(ids[30:40])
            given = second.score(ids[20:30])
    fresh.evaluate(ids[:20])
    np.testing.assert_array_equal(fresh.score(ids[20:30]), given)
    assert session.tokens == []


def test_forks_of_many_pages_go_their_own_ways(target, random_package):
    """They share the pages of the prefix until they write to them, whichever is closed first."""
    package = random_package(target, LONG, "fp16", chunk=LONG.max_positions // 2)[1]
    ids = np.random.default_rng(6).integers(0, 256, 1400).tolist()
    rests = [ids[1000 + 100 * n : 1100 + 100 * n] for n in range(4)]
    with Model(package, threads=2) as model, Session(model, prefill_chunk=64) as session:
        session.evaluate(ids[:1000])
        forks = [session.fork() for _ in rests[1:]]
        given = [which.score(rest) for which, rest in zip([session, *forks], rests, strict=True)]
        session.close()
        again = [fork.score(ids[:50]) for fork in forks]
        for fork in forks:
            fork.close()
        with Session(model, prefill_chunk=64) as alone:
            for number, rest in enumerate(rests):
                alone.rewind(0)
                alone.evaluate(ids[:1000])
                np.testing.assert_array_equal(alone.score(rest), given[number])
                if number:
                    np.testing.assert_array_equal(alone.score(ids[:50]), again[number - 1])


def test_forks_do_not_copy_the_prefix(random_package):
    """Ten forks of 16 MB of cache, each written to, add less than one copy of it."""
    package = random_package("onnx", DEEP)[1]
    with Model(package, threads=1) as model, Session(model, context=8192) as session:
        session.fill(8000)
        whole = session.memory()["cache_used"]
        assert whole > 15e6
        before = session.memory()["anonymous"]
        forks = []
        for number in range(10):
            forks.append(session.fork())
            forks[-1].evaluate([number])
        grown = session.memory()["anonymous"] - before
        for fork in forks:
            fork.close()
    assert grown < whole / 2
