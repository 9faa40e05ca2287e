"""Saved conversations: they go on bit for bit, and only where they belong."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import TINY, changed, write_checkpoint
from edge_qkv import ContextFull, InputError, Model, Sampling, Session
from edge_qkv.export import export_package

CONTEXT, CHUNK = 96, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CONTEXT - 1, CONTEXT)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """packages(name) -> a package, made once."""
    configs = {
        "fp32": (TINY, "fp32"),
        "fp16": (TINY, "fp16"),
        "int8": (TINY, "int8"),
        "separate V": (changed(TINY, sharing="qkv", kv_heads=2, positions="rotary-on-read"), "fp16"),
        "separate V int8": (changed(TINY, sharing="qkv", kv_heads=4, positions="learned"), "int8"),
    }
    made: dict = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("snapshot")
            config, cache = configs[name]
            checkpoint = write_checkpoint(folder / "checkpoint", config)
            export_package("onnx", str(checkpoint), folder / "package", weights="int4", cache=cache, parity=False)
            made[name] = folder / "package"
        return made[name]

    make.names = tuple(configs)
    return make


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "separate V", "separate V int8"])
def test_a_restored_conversation_goes_on_bit_for_bit(packages, ids, tmp_path, name):
    """At every length, for the logits of the last token and for those that follow, with the same chunks."""
    file = tmp_path / "conversation"
    with Model(packages(name)) as model:
        for length in LENGTHS:
            with Session(model, context=CONTEXT, prefill_chunk=CHUNK) as session:
                session.evaluate(ids[:length])
                session.save(file)
                now = session.logits()
                rest = session.score(ids[length:])
            with Session(model, context=CONTEXT, prefill_chunk=CHUNK) as other:
                other.evaluate(ids[::-1][: CONTEXT // 2])  # what was there leaves no trace
                other.restore(file)
                assert other.tokens == ids[:length]
                np.testing.assert_array_equal(other.logits(), now)
                np.testing.assert_array_equal(other.score(ids[length:]), rest)


def test_generation_goes_on_in_another_process(packages, ids, tmp_path):
    file, package = tmp_path / "conversation", packages("fp16")
    with Session(package, context=CONTEXT) as session:
        first = list(session.generate_tokens(ids[:20], 10, Sampling(seed=3)))
        session.save(file)
        expected = list(session.generate_tokens([], 20, Sampling(seed=3)))
    command = ["run", package, "--restore", file, "--tokens", "", "--seed", 3, "--max-tokens", 20, "--context", CONTEXT]
    done = subprocess.run(
        [sys.executable, "-m", "edge_qkv", *map(str, command), "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == expected
    assert len(first) == 10


def test_a_snapshot_survives_what_happens_to_sessions_that_use_it(packages, ids, tmp_path):
    """Rows are mapped from the file: writing on, rewinding and saving over it must not reach the file's readers."""
    file = tmp_path / "conversation"
    with Model(packages("fp16")) as model, Session(model, context=CONTEXT) as session:
        session.evaluate(ids[:50])
        session.save(file)
        saved = file.read_bytes()
        expected = session.score(ids[50:60])
        with Session(model, context=CONTEXT) as other, Session(model, context=CONTEXT) as third:
            other.restore(file)
            other.rewind(20)
            other.evaluate(ids[::-1][:70])  # over the mapped rows
            assert file.read_bytes() == saved
            third.restore(file)
            other.save(file)  # a new file under the old name
            np.testing.assert_array_equal(third.score(ids[50:60]), expected)


def test_what_does_not_belong_is_refused_and_changes_nothing(packages, ids, tmp_path):
    file = tmp_path / "conversation"
    with Session(packages("fp16"), context=CONTEXT) as session:
        session.evaluate(ids[:40])
        session.save(file)
    good = file.read_bytes()
    other_weights = write_checkpoint(tmp_path / "checkpoint", TINY, seed=1)
    export_package("onnx", str(other_weights), tmp_path / "other", weights="int4", cache="fp16", parity=False)
    for package, words in ((tmp_path / "other", "another model"), (packages("int8"), "another model")):
        with Session(package, context=CONTEXT) as session, pytest.raises(InputError, match=words):
            session.restore(file)
    with Session(packages("fp16"), context=30) as small, pytest.raises(ContextFull, match="40"):
        small.restore(file)
    with Session(packages("fp16"), context=CONTEXT) as session:
        session.evaluate(ids[:5])
        before = session.logits()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 4
        for name, data, words in (
            ("missing", None, "missing"),
            ("empty", b"", "snapshot"),
            ("text", b"once upon a time " * 100, "not a snapshot|no snapshot"),
            ("truncated", good[:-1], "truncated|shorter|bytes"),
            ("altered", bytes(flipped), "altered|damaged|checksum"),
        ):
            path = tmp_path / name
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(InputError, match=words):
                session.restore(path)
        assert session.tokens == ids[:5]
        np.testing.assert_array_equal(session.logits(), before)


def test_a_place_that_cannot_be_written_is_one_sentence(packages, ids, tmp_path):
    with Session(packages("fp16"), context=CONTEXT) as session:
        session.evaluate(ids[:5])
        for path in (tmp_path / "no" / "such" / "folder", tmp_path):
            with pytest.raises(InputError, match=str(path)):
                session.save(path)
        assert not [name for name in os.listdir(tmp_path) if "partial" in name]
