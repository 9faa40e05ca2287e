"""Saved conversations: they go on bit for bit, and only where they belong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_qkv import ContextFull, InputError, Sampling, Session

from .engines import CAPACITY, CHUNK, KNOWN, LENGTHS, having, on, with_variants


@with_variants
def test_a_restored_conversation_goes_on_bit_for_bit(model, ids, tmp_path):
    """At every length, for the logits of the last token and for those that follow, with the same chunks."""
    for length in LENGTHS:
        context = min(length + 10, CAPACITY)
        with Session(model, context, CHUNK) as session:
            session.evaluate(ids[:length])
            session.save(tmp_path / "saved")
            now, rest = session.logits(), session.score(ids[length:context])
        with Session(model, CAPACITY, CHUNK) as other:  # of another context
            other.evaluate(ids[::-1][: CAPACITY // 2])  # what was there leaves no trace
            other.restore(tmp_path / "saved")
            assert other.tokens == ids[:length]
            np.testing.assert_array_equal(other.logits(), now)
            np.testing.assert_array_equal(other.score(ids[length:context]), rest)
    with Session(model, CAPACITY - 1) as small, pytest.raises(ContextFull, match=rf"saved: .*{CAPACITY}"):
        small.restore(tmp_path / "saved")


def test_a_snapshot_without_tokens_or_logits_is_one(session, ids, tmp_path):
    session.save(tmp_path / "empty")
    session.fill(20)
    session.save(tmp_path / "filled")
    session.restore(tmp_path / "empty")
    assert session.tokens == []
    session.restore(tmp_path / "filled")
    assert session.tokens == [0] * 20
    with pytest.raises(InputError, match="no logits"):
        session.logits()


@having("windows")
def test_a_restored_conversation_may_have_another_margin(engine, model, ids, tmp_path):
    """What was not saved is evaluated again where it is needed, and what is no longer kept is given back."""
    for saved, restored in ((0, 40), (40, 0)):
        with Session(model, CAPACITY, CHUNK, margin=saved) as session:
            session.evaluate(ids[:60])
            session.save(tmp_path / "saved")
        with Session(model, CAPACITY, CHUNK, margin=restored) as other:
            other.restore(tmp_path / "saved")
            engine.check_rows(other.score(ids[60:70]), slice(60, 70))
            assert other.rewind(30) == 30
            engine.check_rows(other.score(ids[30:50]), slice(30, 50))


@on("onnx")
def test_generation_goes_on_in_another_process(engine, ids, tmp_path):
    file = tmp_path / "conversation"
    with Session(engine.package, context=CAPACITY) as session:
        first = list(session.generate_tokens(ids[:20], 10, Sampling(seed=3)))
        session.save(file)
        expected = list(session.generate_tokens([], 20, Sampling(seed=3)))
    command = ["run", engine.package, "--restore", file, "--tokens", "", "--seed", 3, "--max-tokens", 20]
    done = subprocess.run(
        [sys.executable, "-m", "edge_qkv", *map(str, command), "--context", str(CAPACITY), "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == expected
    assert len(first) == 10


def test_a_snapshot_survives_what_happens_to_sessions_that_use_it(model, session, ids, tmp_path):
    """Rows may be mapped from the file: writing on, rewinding and saving over it must not reach the file's readers."""
    file = tmp_path / "conversation"
    session.evaluate(ids[:50])
    session.save(file)
    saved = file.read_bytes()
    expected = session.score(ids[50:60])
    with Session(model, CAPACITY, CHUNK) as other, Session(model, CAPACITY, CHUNK) as third:
        other.restore(file)
        other.rewind(20)
        other.evaluate(ids[::-1][:70])  # over the mapped rows
        assert file.read_bytes() == saved
        third.restore(file)
        other.save(file)  # a new file under the old name
        np.testing.assert_array_equal(third.score(ids[50:60]), expected)


# ---- what does not belong ----


@pytest.fixture
def saved(model, ids, tmp_path) -> Path:
    with Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:40])
        session.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_is_damaged_is_refused_and_changes_nothing(saved, refused, tmp_path):
    good = saved.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    for name, data, words in (
        ("missing", None, "cannot be opened|cannot be read"),
        ("empty", b"", "snapshot|damaged"),
        ("text", b"once upon a time " * 100, "not a snapshot|no snapshot|damaged"),
        ("truncated", good[:-1], "truncated|shorter|bytes|damaged"),
        ("altered", bytes(flipped), "altered|damaged|checksum"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        refused(path, words)


@on("onnx", "llama.cpp", "eager", *(pytest.param(n, marks=pytest.mark.slow) for n in ("executorch", "coreml")))
def test_a_snapshot_of_other_weights_is_refused(engine, made, refused, ids, tmp_path):
    _save_of(made(engine.name, seed=5)[1], engine.engine.options, ids, tmp_path / "saved")
    refused(tmp_path / "saved", "another model")


FOREIGN = {"onnx": ("executorch", "onnx, fp16"), "executorch": ("onnx", "executorch, separate V, int8")}


@on("onnx", "executorch", "coreml", "llama.cpp", "eager")
def test_a_snapshot_of_another_engine_or_cache_is_refused(engine, made, refused, ids, tmp_path):
    for number, other in enumerate(FOREIGN.get(engine.name, ("onnx",))):
        _save_of(made(other)[1], KNOWN[other].options, ids, tmp_path / f"saved{number}")
        refused(tmp_path / f"saved{number}", "another model|no snapshot of such a session")


def _save_of(package: Path, options: dict, ids: list[int], path: Path) -> None:
    with Session(package, CAPACITY, **options) as other:
        other.evaluate(ids[:40])
        other.save(path)


def test_a_snapshot_that_is_too_long_is_refused(model, saved, ids):
    with Session(model, 30) as small:
        small.evaluate(ids[:5])
        with pytest.raises(ContextFull, match=r"saved: .*40"):
            small.restore(saved)
        assert small.tokens == ids[:5]


def test_a_place_that_cannot_be_written_is_one_sentence(session, ids, tmp_path):
    session.evaluate(ids[:5])
    for path in (tmp_path / "no" / "such" / "folder", tmp_path):
        with pytest.raises(InputError, match=re.escape(str(path))) as refused:
            session.save(path)
        assert "\n" not in str(refused.value)
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]
