"""Sessions, models and engines beside each other, and one session in the hands of several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from edge_qkv import InputError, Model, Session
from other_threads import check_every_method, check_soundness

from .engines import CAPACITY, CHUNK, conversation, on


def _in_threads(jobs: list[Callable]) -> list:
    results = [None] * len(jobs)

    def work(number: int) -> None:
        results[number] = jobs[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- one session ----


def test_a_second_thread_is_refused_by_every_method(session, ids, tmp_path):
    check_every_method(session, tmp_path / "saved", ids[:40])


def test_threads_that_share_a_session_leave_it_sound(engine, session, ids, tmp_path):
    check_soundness(session, tmp_path / "saved", ids, rounds=30 if engine.name == "onnx" else 3)


def test_closing_waits_for_the_call_of_another_thread(model, ids):
    session = Session(model, context=CAPACITY, prefill_chunk=1)
    failures = []

    def work():
        try:
            while True:
                session.rewind(0)
                session.evaluate(ids[:90])
        except InputError as error:
            failures.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.1)
    session.close()
    worker.join(timeout=30)
    assert failures == ["the session is closed; open a new one"]


# ---- several ----


def test_sessions_of_a_model_do_not_disturb_each_other(engine, model, ids):
    """In turns in one thread, then in threads of their own."""
    parts = [ids, ids[:-1], ids[20:], ids[::-1]]
    alone = [conversation(model, part) for part in parts]
    sessions = [Session(model, CAPACITY, CHUNK) for _ in parts]
    for start in range(0, 64, CHUNK):
        for session, part, logits in zip(sessions, parts, alone, strict=True):
            rows = slice(start, start + CHUNK)
            np.testing.assert_array_equal(session.score(part[rows]), logits[rows])
    for session in sessions:
        session.close()
    for _ in range(3 if "threads" in engine.can else 1):
        together = _in_threads([lambda part=part: conversation(model, part) for part in parts])
        for logits, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(logits, expected)


@on("onnx", "executorch", "llama.cpp")
@pytest.mark.parametrize("other", ["onnx, separate V, int8", "executorch, separate V, int8"])
def test_models_do_not_disturb_each_other(engine, model, made, ids, other):
    """Of one engine, and of two in one process."""
    parts = [ids, ids[::-1]]
    with Model(made(other)[1], threads=2) as second:
        jobs = [lambda: conversation(model, parts[0]), lambda: conversation(second, parts[1])]
        alone = [job() for job in jobs]
        for results in (_in_threads(jobs), [job() for job in jobs], _in_threads(jobs)):
            for logits, expected in zip(results, alone, strict=True):
                np.testing.assert_array_equal(logits, expected)
