"""Tokens that are forgotten: by rewinds, by what is reused of another prompt, and taken back."""

from __future__ import annotations

import numpy as np
import pytest

from edge_qkv import InputError, Sampling, Session
from mixed_models import WINDOW

from .engines import CAPACITY, CHUNK, LENGTHS, having, on


def test_rewind_then_go_on(engine, session, ids):
    for length in LENGTHS:
        session.rewind(0)
        session.evaluate([(t + 1) % 256 for t in ids])  # other tokens: their rows must leave no trace
        session.rewind(0)
        session.evaluate(ids[:length])
        session.rewind(length // 2)
        assert session.tokens == ids[: length // 2]
        engine.check_rows(session.score(ids[length // 2 : length]), slice(length // 2, length))


def test_rewind_to_the_same_length_keeps_the_conversation(engine, session, ids):
    session.evaluate(ids[:9])
    assert session.rewind(9) == 0
    session.evaluate(ids[9:10])
    engine.check_rows(session.logits(), 9)


@having(lacking=("windows",))
def test_no_token_is_evaluated_again(session, ids):
    session.evaluate(ids[:60])
    for length in (59, 40, 1, 0):
        assert session.rewind(length) == 0


@having("windows")
@pytest.mark.parametrize("margin", [0, 1, 20, 1000])
def test_what_windows_have_given_back_is_evaluated_again(engine, model, ids, margin):
    """Nothing as far back as window and margin reach, and all of it further back; what follows is right either way."""
    held = 60
    kept_from = held - WINDOW - (margin or WINDOW)  # the first row that is there
    for length in (0, 1, WINDOW, 30, 40, held - WINDOW - 3, held - WINDOW - 1, held - WINDOW, held - 2, held - 1):
        sees_from = length - WINDOW + 1  # the next token
        whole = length == 0 or kept_from <= 0 or sees_from >= kept_from
        reported = []
        with Session(model, CAPACITY, CHUNK, margin=margin) as session:
            session.evaluate(ids[:held])
            again = session.rewind(length, lambda *count: reported.append(count))  # noqa: B023
            assert again == (0 if whole else length), (margin, length)
            assert reported == [(min(n + CHUNK, length), length) for n in range(0, again, CHUNK)]
            assert session.tokens == ids[:length]
            engine.check_rows(session.score(ids[length : length + 20]), slice(length, length + 20))


@having("windows")
@pytest.mark.parametrize("after", [CHUNK, 2 * CHUNK, 40])
def test_what_progress_raises_ends_the_rewind_and_leaves_what_was_evaluated(engine, model, ids, after):
    """As a Ctrl-C does that arrives there."""

    def progress(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with Session(model, CAPACITY, CHUNK, margin=1) as session:
        session.evaluate(ids[:60])
        with pytest.raises(KeyboardInterrupt):
            session.rewind(40, progress)
        done = len(session.tokens)
        assert session.tokens == ids[:done] and done == min(after, 40)
        engine.check_rows(session.score(ids[done : done + 9]), slice(done, done + 9))


# ---- what is reused ----


@having(lacking=("windows",))
def test_reuse_leaves_what_is_needed_for_the_logits(engine, session, fresh, ids):
    session.evaluate(ids[:64])
    logits = session.logits()
    assert session.reuse(ids[:64]) == 64  # nothing left to do: its logits are there
    np.testing.assert_array_equal(session.logits(), logits)
    other = ids[:48] + ids[70:90]
    assert session.reuse(other) == 48
    session.evaluate(other[48:])
    fresh.evaluate(other)
    engine.check(session.logits(), fresh.logits())
    assert session.reuse(ids[:30]) == 29  # the logits after it are gone
    session.evaluate(ids[29:64])
    engine.check(session.logits(), logits)
    assert session.reuse([(ids[0] + 1) % 256]) == 0 and session.tokens == []
    assert session.reuse([]) == 0


@having("windows")
def test_reuse_reaches_as_far_back_as_the_windows(engine, session, fresh, ids):
    """Further back it says that nothing is kept, as there all would be evaluated again."""
    for common, kept in ((59, 59), (55, 55), (30, 0)):
        session.rewind(0)
        session.evaluate(ids[:60])
        other = ids[:common] + ids[70:90]
        assert session.reuse(other) == kept
        session.evaluate(other[kept:])
        fresh.rewind(0)
        fresh.evaluate(other)
        engine.check(session.logits(), fresh.logits())


@on("onnx", "eager")
def test_a_prompt_that_is_the_whole_conversation_is_read_from_where_it_differs(session):
    greedy = Sampling(temperature=0)
    first = "".join(session.generate("What ho", 20, greedy, reuse=True))
    assert session.timing.reused_tokens == 0
    evaluated = session.timing.prefill_tokens
    assert "".join(session.generate("What ho", 20, greedy, reuse=True)) == first
    assert session.timing.reused_tokens == evaluated - 1 and session.timing.prefill_tokens == 1


# ---- tokens that are taken back ----


def _take_back(engine, session, fresh, ids: list[int], more: int, compared: bool) -> None:
    for count in (0, 1, 2, 7, 39, 1000):
        session.rewind(0)
        given = list(session.generate_tokens(ids[:30], more, Sampling(seed=2)))
        before = session.tokens
        session.take_back(count)
        assert session.tokens == before[: max(0, len(before) - count)]
        assert session.generated == given[: max(0, len(given) - count)]
        if session.tokens and compared:
            fresh.rewind(0)
            fresh.evaluate(session.tokens)
            engine.check(session.logits(), fresh.logits())
    with pytest.raises(InputError, match="tokens to take back"):
        session.take_back(-1)


def test_tokens_are_taken_back_to_any_length(engine, model, fresh, ids):
    with Session(model, 40, CHUNK) as session:
        _take_back(engine, session, fresh, ids, 10, compared=True)


@having("overflow")
def test_tokens_are_taken_back_where_others_were_dropped(engine, model, fresh, ids):
    with Session(model, 40, CHUNK, overflow="shift", block=20) as session:
        # A row that has moved is not what its token gives again.
        _take_back(engine, session, fresh, ids, 30, compared=False)


# ---- noise ----


def test_fill_keeps_the_rows_that_are_there(engine, session, ids):
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
    session.evaluate(ids[:1])
    assert np.isfinite(session.logits()).all()
    session.rewind(10)
    # With windows the rows are evaluated again, in other chunks.
    compare = engine.check if "windows" in engine.can else np.testing.assert_array_equal
    compare(session.score(ids[10:20]), rest)
