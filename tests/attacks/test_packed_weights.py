"""XNNPACK's file of packed weights, damaged: what our marker tells is ignored, and nothing ends the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attacks import xxh64
from edge_qkv import Model, pack

HERE = Path(__file__).parent
SCRIPT = f"""import sys; sys.path.insert(0, {str(HERE)!r})
from load_programs import *
with Model(sys.argv[1], threads=1, packed=sys.argv[2]) as model, Session(model, context=96) as session:
    session.evaluate(TOKENS)
    np.save(sys.argv[3], session.logits())
    print(int(model.info.packed))
"""
# At its end: where the index begins, its entries, a magic number and a version.
FOOTER = struct.Struct("<QIII")
Attack = Callable[[bytes], bytes]


def _at(offset: Callable[[bytes], int], kind: str, value: int) -> Attack:
    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into(kind, out, offset(data), value)
        return bytes(out)

    return attack


def _index(data: bytes) -> int:
    return FOOTER.unpack(data[-FOOTER.size :])[0]


def _entry(field: int) -> Callable[[bytes], int]:
    """The offset (0), size (8) or kernel (16) of the first matrix, after its name."""
    return lambda data: _index(data) + 4 + struct.unpack_from("<I", data, _index(data))[0] + field


ATTACKS: dict[str, Attack] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "no entries": _at(lambda data: len(data) - 12, "<I", 0),
    "entries without end": _at(lambda data: len(data) - 12, "<I", 0xFFFFFFFF),
    "an index beyond the end": _at(lambda data: len(data) - 20, "<Q", 1 << 62),
    "an index at the start": _at(lambda data: len(data) - 20, "<Q", 0),
    "another format": _at(lambda data: len(data) - 8, "<I", 0),
    "a long name": _at(_index, "<I", 0xFFFFFFFF),
    "a matrix beyond the end": _at(_entry(0), "<Q", 1 << 62),
    "a matrix of 2^62 bytes": _at(_entry(8), "<Q", 1 << 62),
    "a matrix for another kernel": _at(_entry(16), "<I", 0xFFFFFFFF),
}
# XNNPACK maps these: it believes that there is nothing in it, or stops where the entries end.
MAPPED = {"no entries", "entries without end"}
# What no checksum of ours would stop, were it forged: the addresses of matrices inside the file.
UNFORGEABLE = {
    "a matrix at the index": lambda data: _at(_entry(0), "<Q", _index(data) - 1)(data),
}


@pytest.fixture(scope="module")
def packed_once(tiny_program, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(tiny_program, folder)
    return folder


@pytest.fixture
def packed(packed_once, tmp_path) -> Path:
    """The file itself, in a copy of its directory."""
    shutil.copytree(packed_once, tmp_path / "packed")
    return next((tmp_path / "packed").glob("packed-*/packed.xnnpack"))


def _load(package: Path, file: Path) -> tuple[bool, np.ndarray]:
    """Whether a process of its own took the packed weights, and its logits."""
    result = file.parents[1] / "logits.npy"
    command = [sys.executable, "-c", SCRIPT, str(package), str(file.parents[1]), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout == "1\n", np.load(result)


@pytest.fixture(scope="module")
def plain(tiny_program, packed_once) -> np.ndarray:
    is_packed, logits = _load(tiny_program, next(packed_once.glob("packed-*/packed.xnnpack")))
    assert is_packed
    return logits


@pytest.mark.parametrize("name", [*ATTACKS, *UNFORGEABLE])
def test_damage_is_ignored_and_packed_anew(tiny_program, plain, packed, name):
    packed.write_bytes((ATTACKS | UNFORGEABLE)[name](packed.read_bytes()))
    is_packed, logits = _load(tiny_program, packed)
    assert not is_packed
    np.testing.assert_array_equal(logits, plain)
    pack(tiny_program, packed.parents[1])
    assert _load(tiny_program, packed)[0]


@pytest.mark.parametrize("name", ATTACKS)
def test_under_a_forged_marker_xnnpack_refuses_it(tiny_program, plain, packed, name):
    """It packs the weights again, in memory, and leaves the file as it is."""
    data = ATTACKS[name](packed.read_bytes())
    packed.write_bytes(data)
    marker = packed.with_name("packed.txt")
    *lines, _ = marker.read_text().splitlines()
    forged = f"packed.xnnpack {len(data)} {xxh64(data[-(1 << 20) :]):016x}"
    marker.write_text("\n".join([*lines, forged]) + "\n")
    is_packed, logits = _load(tiny_program, packed)
    assert is_packed is (name in MAPPED)
    np.testing.assert_array_equal(logits, plain)
    assert packed.read_bytes() == data


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


@pytest.mark.parametrize("name", ["packed.xnnpack", "packed.txt"])
@pytest.mark.parametrize("replace", [_pipe, _directory, _link_to_nothing])
def test_what_is_no_file_is_ignored_and_packed_anew(tiny_program, plain, packed, name, replace):
    replace(packed.with_name(name))
    is_packed, logits = _load(tiny_program, packed)
    assert not is_packed
    np.testing.assert_array_equal(logits, plain)
    pack(tiny_program, packed.parents[1])
    assert _load(tiny_program, packed)[0]
    assert not list(packed.parents[1].glob(".packing-*"))


def test_what_another_process_is_writing_is_not_used(tiny_program, plain, packed):
    """Nor anything that is gone since we looked: XNNPACK would write a new file there."""
    with packed.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        is_packed, logits = _load(tiny_program, packed)
    assert not is_packed
    np.testing.assert_array_equal(logits, plain)


def test_a_file_that_cannot_be_written_to_its_end_is_no_packed_file(tiny_program, tmp_path):
    """XNNPACK keeps in memory what it cannot write, and would say that all is well."""
    script = """import resource, sys
from pathlib import Path
from edge_qkv import InputError, pack
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
except InputError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, str(tiny_program), str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "packed weights cannot be written there (ExecuTorch failed: " in done.stdout
    assert "choose another directory" in done.stdout
    assert [path.name for path in (tmp_path / "packed").iterdir()] == [".lock"]


def test_packing_does_without_the_pool(tiny_program, packed, tmp_path):
    """It is not refused where a model that is open has another number of threads; the file is the same."""
    with Model(tiny_program, threads=3, packed=False):
        pack(tiny_program, tmp_path / "anew", threads=2)
    (anew,) = (tmp_path / "anew").glob("packed-*/packed.xnnpack")
    assert anew.stat().st_size == packed.stat().st_size


def test_models_load_while_others_pack(tiny_program, plain, tmp_path):
    folder = tmp_path / "packed"
    folder.mkdir()
    command = [sys.executable, "-m", "edge_qkv", "pack", str(tiny_program), "--output", str(folder)]
    packing = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    for _ in range(4):
        np.testing.assert_array_equal(_load(tiny_program, folder / "any" / "file")[1], plain)
    for process in packing:
        assert process.wait() == 0, process.stderr.read()
    is_packed, logits = _load(tiny_program, folder / "any" / "file")
    assert is_packed
    np.testing.assert_array_equal(logits, plain)
