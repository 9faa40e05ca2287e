"""Calls that end early, by `cancel` or by an exception out of a signal handler: the session knows what it holds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

from edge_qkv import Cancelled, InputError, Model, Sampling, Session

from .engines import CAPACITY, CHUNK, LONG, having, on
from .hosted_decoder import AT_ONCE

ROUNDS = 40  # interruptions at different times
POLICIES = {
    "error": {},
    "shift": {"overflow": "shift", "block": 20},
    "window that splits chunks": {"overflow": "window", "window": 88},
}


# ---- cancel ----


def test_a_cancellation_stops_the_next_evaluation_and_no_other(session, ids):
    session.evaluate(ids[:3])
    session.cancel()
    with pytest.raises(Cancelled):
        session.evaluate(ids[3:40])
    assert session.tokens == ids[:3]
    session.evaluate(ids[3:40])
    assert session.tokens == ids[:40]


def test_cancel_from_another_thread_stops_an_evaluation(engine, session, ids):
    session.evaluate(ids)
    expected = session.logits()
    canceller = threading.Timer(0.02, session.cancel)
    canceller.start()
    with pytest.raises(Cancelled):
        while True:
            session.rewind(0)
            session.evaluate(ids[:90])
    canceller.join()
    kept = len(session.tokens)
    assert kept % CHUNK == 0 or kept == 90 or engine.name == "eager"
    session.rewind(0)
    session.evaluate(ids)  # and the session is usable again
    np.testing.assert_array_equal(session.logits(), expected)


def test_a_cancelled_generation_keeps_what_it_yielded(session, fresh):
    options = Sampling(temperature=1.5, top_k=0, top_p=1, seed=3)
    tokens = session.generate_tokens([1, 2], 20, options)
    given = [next(tokens), next(tokens)]
    session.cancel()
    with pytest.raises(Cancelled):
        next(tokens)
    assert session.tokens == [1, 2, *given]
    more = list(session.generate_tokens([], 3, Sampling(temperature=0)))
    fresh.evaluate([1, 2, *given])
    assert more == list(fresh.generate_tokens([], 3, Sampling(temperature=0)))


@on("eager")
def test_an_engine_that_hears_inside_a_call_drops_its_rows(engine, model, ids):
    """The rows of a call that was stopped are nobody's; between calls, those before stay."""
    with Session(model, CAPACITY, CAPACITY) as session:
        session.evaluate(ids)
        expected, kept = session.logits(), set()
        for delay in np.linspace(0, 0.02, 30):
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
            engine.check(session.logits(), expected)
        assert kept & set(range(0, CAPACITY, AT_ONCE)) and all(n % AT_ONCE == 0 for n in kept)


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_a_cancelled_call_stops_in_the_middle_and_the_session_goes_on(target, random_package):
    package = random_package(target, LONG, "fp16", chunk=LONG.max_positions // 2)[1]
    prompt = np.random.default_rng(1).integers(0, 256, LONG.max_positions - 1).tolist()
    with Model(package, threads=2) as model, Session(model, prefill_chunk=LONG.max_positions) as session:
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
                session.evaluate(prompt[:1])
        else:
            pytest.fail("no cancellation came in the middle")
        canceller.join()
        kept = len(session.tokens)
        assert kept in (0, LONG.max_positions // 2)  # whole calls of the engine
        session.evaluate(prompt[kept:])
        assert session.tokens == prompt
        np.testing.assert_array_equal(session.logits(), expected)


# ---- signals ----


def _interrupt(engine, model, ids, tmp_path, alarm, options: dict, rounds: int) -> None:
    generator = np.random.default_rng(7)
    interrupted = 0
    with Session(model, CAPACITY, CHUNK, **options) as session, Session(model, CAPACITY, CHUNK) as fresh:
        session.evaluate(ids[:40])
        session.save(tmp_path / "saved")
        for _ in range(rounds):
            # Python loses what a signal handler raises within a finalizer or a callback of its garbage collector: that
            # round ends by itself, without an interruption.
            began = time.monotonic()
            with contextlib.suppress(alarm.Interrupt):
                alarm(generator.uniform(1e-4, 0.02))
                while time.monotonic() < began + 2:
                    session.rewind(len(session.tokens) // 2)
                    session.evaluate(ids[: int(generator.integers(1, 45))])
                    session.restore(tmp_path / "saved")
                    with session.fork() as fork:
                        fork.evaluate(ids[:3])
                    session.fill(int(generator.integers(40, 50)))
                    session.reuse(ids[: int(generator.integers(1, 60))])
                    list(session.generate_tokens([1], 3))
            interrupted += time.monotonic() < began + 2
            tokens = session.tokens
            assert tokens[: len(tokens) - len(session._pending)] == session._engine.tokens().tolist()
            # A row that has moved is not what its token gives again.
            kept = 0 if options else min(5, len(tokens))
            session.rewind(kept)
            session.evaluate(ids[5:30])
            assert session.tokens == session._engine.tokens().tolist() == tokens[:kept] + ids[5:30]
            fresh.rewind(0)
            if tokens[:kept] == ids[:kept]:  # nor is one of noise
                fresh.evaluate(session.tokens)
                engine.check(session.logits(), fresh.logits())
    assert interrupted > rounds // 2


def test_an_interrupted_call_leaves_a_sound_session(engine, model, ids, tmp_path, alarm, capfd):
    """Whatever an exception out of a signal handler ends, the session knows afterwards what its cache holds."""
    _interrupt(engine, model, ids, tmp_path, alarm, {}, ROUNDS)
    assert capfd.readouterr() == ("", "")


@on("onnx", "executorch, windows")
@pytest.mark.parametrize("policy", ["shift", "window that splits chunks"])
def test_an_interrupted_call_that_drops_tokens_leaves_a_sound_session(engine, model, ids, tmp_path, alarm, policy):
    _interrupt(engine, model, ids, tmp_path, alarm, POLICIES[policy], ROUNDS)


@on("onnx", "onnx, windows", "executorch")
@pytest.mark.parametrize("policy, count", [("error", 70), ("shift", 150)])
def test_a_token_that_was_yielded_is_in_the_cache_once_after_an_interruption(model, ids, alarm, policy, count):
    generator = np.random.default_rng(3)
    sampling = Sampling(temperature=1.5, seed=_seed_of_a_long_text(model, ids, POLICIES[policy], count))
    options = POLICIES[policy]
    with Session(model, CAPACITY, CHUNK, **options) as session:
        whole = ids[:20] + list(session.generate_tokens(ids[:20], count, sampling))
        seconds = session.timing.prefill_seconds + session.timing.decode_seconds
    stopped = 0
    for _ in range(ROUNDS):
        with Session(model, CAPACITY, CHUNK, **options) as session:
            with contextlib.suppress(alarm.Interrupt):
                alarm(generator.uniform(0.05, 0.9) * seconds)
                list(session.generate_tokens(ids[:20], count, sampling))
                signal.setitimer(signal.ITIMER_REAL, 0)
            tokens, written = session.tokens, session.dropped + len(session.tokens)
            assert tokens == whole[session.dropped : written]
            if written > 20:  # the interruption may come between the two notes that a token is taken down in
                assert written - 20 - len(session.generated) in (0, 1)
                stopped += written < len(whole)
            session._evaluate_rest()
            assert session._engine.tokens().tolist() == session.tokens == whole[session.dropped : written]
    assert stopped > ROUNDS // 4


def _seed_of_a_long_text(model, ids: list[int], options: dict, count: int) -> int:
    """Of a generation that no token ends."""
    for seed in range(20):
        with Session(model, CAPACITY, CHUNK, **options) as session:
            if len(list(session.generate_tokens(ids[:20], count, Sampling(temperature=1.5, seed=seed)))) == count:
                return seed
    raise AssertionError("every text ends early")


@on("onnx", "executorch", "eager", "llama.cpp")
def test_a_signal_handler_may_close_a_session_that_is_in_a_call(model, ids, alarm):
    sentences = []

    def handler(*_) -> None:
        for use in (session.logits, lambda: session.rewind(0), lambda: session.tokens):
            with contextlib.suppress(InputError):
                use()
        try:
            session.save(os.devnull)
        except InputError as error:
            sentences.append(str(error))
        session.close()

    closed = 0
    while not any("in a call of this thread" in sentence for sentence in sentences):
        session = Session(model, context=CAPACITY, prefill_chunk=CAPACITY)
        alarm(0.02, handler)
        with pytest.raises(InputError, match="the session is closed"):
            while True:
                session.rewind(0)
                session.evaluate(ids)
                session.logits()
        closed += 1
        assert closed < 50, sentences


@having("windows")
def test_a_cancelled_rewind_that_evaluates_again_leaves_a_sound_session(engine, session, ids):
    """What was evaluated again so far is there."""
    session.evaluate(ids[:80])
    with pytest.raises(Cancelled):
        session.rewind(50, lambda done, total: session.cancel())
    tokens = session.tokens
    assert tokens == session._engine.tokens().tolist() == ids[:CHUNK]
    session.evaluate(ids[CHUNK:70])
    engine.check_rows(session.logits(), 69)
