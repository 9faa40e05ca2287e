"""What is ExecuTorch's own: buffers that it keeps between calls, and one pool of threads for a process."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from conftest import needs
from edge_qkv import InputError, Model, Session

from .engines import LONG, conversation


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(6).integers(0, 256, LONG.max_positions - 1).tolist()


def test_a_trim_of_the_workspace_gives_executorchs_buffers_back(random_package, tokens):
    """Also while another thread evaluates it returns at once."""
    needs("executorch")
    package = random_package("executorch", LONG, "fp16", chunk=LONG.max_positions // 2)[1]
    with Model(package, threads=1, packed=False) as model, Session(model, prefill_chunk=2048) as session:
        session.evaluate(tokens[:2048])
        before = session.memory()["anonymous"]
        model.trim("workspace")
        assert before - session.memory()["anonymous"] > 1e6
        writer = threading.Thread(target=session.evaluate, args=(tokens[2048:-1],))
        writer.start()
        waited = 0.0
        while writer.is_alive():
            began = time.perf_counter()
            model.trim("all")
            waited = max(waited, time.perf_counter() - began)
            time.sleep(0.001)
        began = time.perf_counter()
        session.rewind(2048)
        session.evaluate(tokens[2048:-1])
        assert waited < (time.perf_counter() - began) / 2


def test_models_of_executorch_share_its_threads(made, tokens):
    """It has one pool for a process; who asks for a single thread does without it."""
    needs("executorch")
    package = made("executorch")[1]
    with Model(package, threads=2) as model:
        expected = conversation(model, tokens[:40])
        with pytest.raises(InputError, match=r"one pool of threads .* uses 2, this one asks for 3; .* close that"):
            Model(package, threads=3)
        with Model(package, threads=1) as alone:
            np.testing.assert_allclose(conversation(alone, tokens[:40]), expected, atol=1e-5)
    with Model(package, threads=3) as model:
        np.testing.assert_allclose(conversation(model, tokens[:40]), expected, atol=1e-5)
