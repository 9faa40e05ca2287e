"""What a session computes is what the eager decoder computes, whatever the chunks, the threads and the folder."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest

from eager import walk_session
from edge_qkv import InputError, Model, Package, Sampling, Session
from edge_qkv.targets import TARGETS

from .engines import CAPACITY, CHUNK, LENGTHS, having, on, with_variants


@with_variants
def test_logits_are_the_decoders(engine, model):
    """Also where a session evaluates more at once than a call of the engine takes."""
    with Session(model, CAPACITY, CAPACITY) as session:
        walk_session(session, engine.expected, CHUNK)


def test_a_prompt_gives_the_logits_of_its_last_token(engine, session, ids):
    for length in LENGTHS:
        session.rewind(0)
        session.evaluate(ids[:length])
        engine.check_rows(session.logits(), length - 1)


def test_tokens_one_by_one_give_theirs(engine, session, ids):
    for i, token in enumerate(ids):
        session.evaluate([token])
        engine.check_rows(session.logits(), i)


@pytest.mark.parametrize("chunk", [1, 3, CHUNK, 500])
def test_chunk_size_does_not_change_the_result(engine, model, ids, chunk):
    with Session(model, CAPACITY, chunk) as session:
        engine.check_rows(session.score(ids), slice(None))


@having("threads")
def test_one_thread_computes_what_two_do(engine, ids):
    logits = []
    for threads in (1, 2):
        with engine.model(threads=threads) as model, Session(model, CAPACITY, CHUNK) as session:
            logits.append(np.concatenate([session.score(ids[:-8]), *(session.score([token]) for token in ids[-8:])]))
    np.testing.assert_allclose(*logits, atol=max(1e-5, engine.expected.tolerance / 10))


# ---- packages ----


@on("onnx", "executorch", "llama.cpp")
@pytest.mark.parametrize("cut", [0, 100, 0.5, 0.99])
def test_a_model_file_that_was_cut_off_is_one_sentence(engine, tmp_path, cut):
    """More in test_bad_models.py."""
    package = shutil.copytree(engine.package, tmp_path / "package")
    model = package / TARGETS[Package.open(package).target].model_file
    os.truncate(model, cut if isinstance(cut, int) else int(cut * model.stat().st_size))
    for verify in (True, False):
        with pytest.raises(InputError, match=re.escape(model.name)) as refused:
            Model(package, verify=verify)
        assert "\n" not in str(refused.value)


@on("onnx", "executorch", "eager")
def test_a_package_may_be_opened_by_a_relative_path(engine, tmp_path, monkeypatch):
    """And the current directory change afterwards: the tokenizer is read, and caches are moved to files, later."""
    shutil.copytree(engine.package, tmp_path / "here/package")
    (tmp_path / "here/spill").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = dict(memory="64MB", spill="spill", context=CAPACITY) if "memory" in engine.can else {}
    with Model("package", **engine.engine.options | options) as model, Session(model, CAPACITY) as session:
        monkeypatch.chdir(tmp_path)
        session.evaluate([1, 2, 3])
        logits = session.logits()
        model.trim("all")
        assert len("".join(session.generate("abc", 8, Sampling(temperature=0)))) > 0
        session.rewind(2)
        session.evaluate([3])
        engine.check(session.logits(), logits)


# ---- values ----


@on("onnx", "eager")
def test_bad_values_are_refused_by_name(engine, model, session):
    huge = 2**64 + 1  # what ctypes would make 1 of
    for option, values in {
        "context": (97, 0, huge, "7", 1.5, True),
        "prefill_chunk": (-1, huge, 1.5),
        "sinks": (-1, huge),
        "window": (huge, "4"),
        "block": (2**31, 1.0),
    }.items():
        for value in values:
            with pytest.raises(InputError, match=re.escape(f"{option} = {value!r}: must be a whole number")):
                Session(model, **{option: value})
    for token in (260, -1, huge, 1.5, "7", False):
        for use in (session.evaluate, session.score, session.reuse):
            with pytest.raises(InputError, match=re.escape(f"token = {token!r}: ")):
                use([1, token])
    for length in (5, -1, huge, 0.0):
        with pytest.raises(InputError, match=re.escape(f"length to rewind to = {length!r}: ")):
            session.rewind(length)
    for length, seed in ((huge, 0), (1.5, 0), (3, huge), (3, -1)):
        with pytest.raises(InputError, match=r"(length|seed) = .*: must be a whole number"):
            session.fill(length, seed)
    for option in ("threads", "context", "prefill_chunk"):
        with pytest.raises(InputError, match=f"{option} = {huge}"):
            Model(engine.package, **{option: huge})
    session.evaluate(np.array([1, 2]))  # numpy's whole numbers are as good
    session.rewind(np.int64(0))
    with Session(model, prefill_chunk=0) as default:
        assert default.prefill_chunk == 128
    with pytest.raises(InputError, match="max_tokens"):
        next(session.generate_tokens([1], 0))
    with pytest.raises(InputError, match="no tokens"):
        next(session.generate("", 5))
    with pytest.raises(InputError):
        session.logits()  # nothing evaluated yet
    assert session.tokens == []
