"""What is closed says so and is given back; a session may be used after its model."""

from __future__ import annotations

import numpy as np
import pytest

from edge_qkv import InputError, Sampling, Session

from .engines import CAPACITY, CHUNK, on


def test_what_is_closed_says_so(engine, ids):
    model = engine.model()
    session = Session(model, CAPACITY, CHUNK)
    expected = session.score(ids[:40])
    model.close()
    model.close()
    with pytest.raises(InputError, match="the model is closed"):
        Session(model)
    session.rewind(0)
    np.testing.assert_array_equal(session.score(ids[:40]), expected)  # a session may be used after its model
    with session.fork() as fork:
        session.close()
        np.testing.assert_array_equal(fork.logits(), expected[-1])
        fork.evaluate(ids[40:43])
    session.close()
    session.cancel()
    for use in (
        session.logits,
        session.sample,
        session.memory,
        session.fork,
        lambda: session.evaluate([1]),
        lambda: session.rewind(0),
        lambda: session.reuse([1]),
        lambda: session.save("unwritten"),
        lambda: session.restore("unread"),
        lambda: session.set_sampling(Sampling()),
    ):
        with pytest.raises(InputError, match="the session is closed"):
            use()


@on("eager")
def test_an_engine_is_closed_once(engine):
    engine.closed.clear()
    model = engine.model()
    model.close()
    model.close()
    assert engine.closed == ["eager"]
