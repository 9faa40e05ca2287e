"""Nothing is evaluated of what does not fit, and the token after a full context is still known."""

from __future__ import annotations

import numpy as np
import pytest

from edge_qkv import ContextFull, Sampling, Session

from .engines import CAPACITY, CHUNK

GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("context", [50, CAPACITY])
def test_a_prompt_that_does_not_fit_is_refused_as_a_whole(model, ids, context):
    """Also where an engine, which rounds a context up, had room for more."""
    with Session(model, context, CHUNK) as session:
        session.evaluate(ids[:10])
        lacking = f"{context - 9} more tokens do not fit: 10 of the context of {context}"
        with pytest.raises(ContextFull, match=lacking):
            session.evaluate(ids[: context - 9])
        assert session.tokens == ids[:10]
        session.evaluate(ids[10:context])
        for use in (lambda: session.evaluate([1]), lambda: session.score([1]), lambda: session.fill(context + 1)):
            with pytest.raises(ContextFull):
                use()
        assert session.tokens == ids[:context]


def test_generation_at_capacity_says_so(session, ids):
    session.evaluate(ids[:90])
    seen = []
    with pytest.raises(ContextFull):
        for token in session.generate_tokens([], 50, Sampling(temperature=0)):
            seen.append(token)
    assert len(seen) == 7  # the last one needs no row until something follows it
    assert session.tokens == ids[:90] + seen


@pytest.mark.parametrize("length", [CAPACITY - 1, CAPACITY])
def test_the_token_after_a_full_context_is_yielded(engine, model, ids, tmp_path, length):
    """It is known without a further row; what must evaluate it says that the context is full, and rewinding helps."""
    more = CAPACITY - length + 1
    with Session(model, context=CAPACITY) as session:
        seen = list(session.generate_tokens(ids[:length], more, GREEDY))
        logits = engine.expected.logits[length - 1]
        assert len(seen) == more and logits[seen[0]] > logits.max() - 2 * engine.expected.tolerance
        assert session.tokens == ids[:length] + seen
        for use in (
            session.logits,
            session.sample,
            session.fork,
            lambda: session.save(tmp_path / "saved"),
            lambda: session.evaluate([1]),
            lambda: session.score([1]),
            lambda: next(session.generate_tokens([], 1, GREEDY)),
        ):
            with pytest.raises(ContextFull, match=rf"more tokens? do(es)? not fit: {CAPACITY} of the context"):
                use()
            assert session.tokens == ids[:length] + seen
        session.rewind(CAPACITY)
        session.save(tmp_path / "saved")
        assert list(session.generate_tokens([], 1, GREEDY)) == seen[-1:]
    with Session(model, context=CAPACITY) as other:
        other.restore(tmp_path / "saved")
        assert list(other.generate_tokens([], 1, GREEDY)) == seen[-1:]


def test_tokens_are_taken_back_from_a_full_context(engine, session, fresh, ids):
    given = list(session.generate_tokens(ids, 1, GREEDY))
    session.take_back(10)
    fresh.evaluate(session.tokens)
    assert len(given) == 1 and session.tokens == ids[:-9] and session.generated == []
    engine.check(session.logits(), fresh.logits())


def test_fill_gives_a_deep_context_at_once(session, ids):
    session.evaluate(ids[:10])
    session.fill(CAPACITY - 1)
    assert session.tokens[:10] == ids[:10]
    session.evaluate(ids[:1])
    assert np.isfinite(session.logits()).all()
    with pytest.raises(ContextFull):
        session.evaluate(ids[:1])
