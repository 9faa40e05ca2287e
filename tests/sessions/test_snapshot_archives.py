"""Snapshots of engines that Python hosts are NumPy archives: each part of one is checked."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_qkv import ContextFull, Session

from .engines import CAPACITY, CHUNK, on

eager = on("eager")


@pytest.fixture
def parts(model, ids, tmp_path) -> dict[str, np.ndarray]:
    """Those of a snapshot of 20 tokens, which is `saved`."""
    with Session(model, CAPACITY, CHUNK) as session:
        session.evaluate(ids[:20])
        session.save(tmp_path / "saved")
    with np.load(tmp_path / "saved") as archive:
        return dict(archive)


def _written(path: Path, parts: dict[str, np.ndarray]) -> Path:
    with path.open("wb") as file:
        np.savez(file, **parts)
    return path


@eager
def test_a_snapshot_that_no_memory_holds_is_refused_unread(session, tmp_path):
    (tmp_path / "saved").touch()
    os.truncate(tmp_path / "saved", 1 << 40)
    with pytest.raises(ContextFull, match="saved: is larger than any snapshot"):
        session.restore(tmp_path / "saved")


@eager
@pytest.mark.parametrize(
    "name, change, pattern",
    [
        ("version", lambda part: part + 1, r"version \d"),
        ("version", lambda _: np.array([1, 1]), "damaged"),
        ("version", lambda _: np.array("one"), "damaged"),
        ("fingerprint", lambda part: part[()][:-1], "another model"),
        ("fingerprint", lambda _: np.zeros(3), "another model"),
        ("tokens", lambda part: part + 250, "tokens are none"),
        ("tokens", lambda part: -part, "tokens are none"),
        ("tokens", lambda part: part.astype(np.int64), "tokens are none"),
        ("tokens", lambda part: part[None], "tokens are none"),
        ("tokens", lambda part: part[:-1], "another shape"),
        ("tokens", lambda _: np.array([[1, 2], "pickled"], object), "damaged"),
        ("logits", lambda part: part[1:], "logits"),
        ("logits", lambda part: part.astype(np.float64), "logits"),
        ("cache.kv_0", lambda part: part[:, 1:], "another shape"),
        ("cache.kv_0", lambda part: part.astype(np.float16), "another shape"),
        ("cache.kv_7", lambda _: np.zeros(3), "another shape"),
        *((name, None, "damaged") for name in ("version", "fingerprint", "tokens", "cache.kv_1")),
    ],
)
def test_a_part_of_another_kind_is_refused(parts, refused, tmp_path, name, change, pattern):
    changed = {n: part for n, part in parts.items() if n != name}
    if change:
        changed[name] = change(parts.get(name))
    refused(_written(tmp_path / "changed", changed), pattern)


@eager
def test_a_damaged_file_is_refused(parts, refused, tmp_path):
    whole = (tmp_path / "saved").read_bytes()
    damaged = tmp_path / "damaged"
    generator = np.random.default_rng(0)
    for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:cut])
        refused(damaged, "damaged|cannot be read")
    with zipfile.ZipFile(tmp_path / "saved") as archive:
        members = archive.infolist()
    for member in members:
        names = struct.unpack_from("<HH", whole, member.header_offset + 26)  # sizes of the name and what follows it
        begin = member.header_offset + 30 + sum(names)
        for position in begin + generator.integers(member.file_size, size=4):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << int(generator.integers(8))
            damaged.write_bytes(flipped)
            refused(damaged, "damaged|another model|version")
    np.savez_compressed(damaged.with_suffix(".npz"), **parts)
    refused(damaged.with_suffix(".npz"), "parts are compressed")
    np.save(damaged.with_suffix(".npy"), np.zeros(3))
    refused(damaged.with_suffix(".npy"), "damaged")
    damaged.write_bytes(pickle.dumps({"tokens": [1]}))
    refused(damaged, r"damaged one \(it is no archive\)$")  # without NumPy's advice
    huge = bytearray(whole)  # an array that says it has more numbers than there is memory
    at = huge.index(b"'shape': (20,)")
    huge[at : at + 14 + 9] = b"'shape': (99999999999,)"
    damaged.write_bytes(huge)
    refused(damaged, "damaged")
    refused(tmp_path / "missing", "cannot be read")
    with damaged.open("wb") as file:
        np.savez_compressed(file, **parts | {"cache.kv_0": np.zeros(1 << 20)})  # 8 MiB in 8 KiB
    refused(damaged, "larger than the file")
