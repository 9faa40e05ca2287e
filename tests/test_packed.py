"""Packed weights: written whole or not at all, loaded to the same numbers, ignored where they are damaged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edge_qkv import InputError, Model, Session, pack

TOKENS = [5, 900, 17, 256, 3, 77, 1024, 4000]


def logits(package: Path, folder: Path | None) -> tuple[bool, np.ndarray]:
    """Whether the package's weights came from `folder`, and the logits of TOKENS: read as a chunk, then one by one."""
    with Model(package, packed=folder or False) as model, Session(model, context=64, prefill_chunk=8) as session:
        read = [session.score(TOKENS), *(session.score([token]) for token in TOKENS)]
        return bool(model.info.packed), np.concatenate(read)


@pytest.fixture(scope="module")
def package(bundled_package) -> Path:
    return bundled_package("int4")[0]


@pytest.fixture(scope="module")
def plain(package) -> np.ndarray:
    packed, values = logits(package, None)
    assert not packed
    return values


@pytest.fixture(scope="module")
def packed_once(package, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "weights"
    pack(package, folder)
    return folder


@pytest.fixture
def packed(packed_once, tmp_path) -> Path:
    return shutil.copytree(packed_once, tmp_path / "weights")


def _inside(folder: Path) -> Path:
    (only,) = folder.glob("packed-*")
    return only


def test_packed_weights_give_the_same_logits_bit_for_bit(package, plain, packed):
    is_packed, values = logits(package, packed)
    assert is_packed
    np.testing.assert_array_equal(values, plain)


@pytest.mark.parametrize("weights", ["int8", "fp32"])
def test_every_weight_type_packs(bundled_package, tmp_path, weights):
    package, _ = bundled_package(weights)
    pack(package, tmp_path)
    is_packed, values = logits(package, tmp_path)
    assert is_packed
    np.testing.assert_array_equal(values, logits(package, None)[1])


def test_packing_again_does_nothing(package, packed):
    before = {p: p.stat().st_mtime_ns for p in packed.rglob("*")}
    pack(package, packed)
    assert {p: p.stat().st_mtime_ns for p in packed.rglob("*")} == before


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = os.urandom(len(data) // 2)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["packed.onnx", "packed.onnx.data", "packed.txt"])
@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_what_is_not_whole_is_ignored_and_packed_anew(package, plain, packed, name, damage):
    damage(_inside(packed) / name)
    is_packed, values = logits(package, packed)
    assert not is_packed
    np.testing.assert_array_equal(values, plain)
    pack(package, packed)
    assert logits(package, packed)[0]
    assert [p.name for p in packed.iterdir() if p.name.startswith(".packing-")] == []


def test_a_graph_that_onnxruntime_refuses_is_ignored(package, plain, packed):
    _flip(_inside(packed) / "packed.onnx")
    is_packed, values = logits(package, packed)
    assert not is_packed
    np.testing.assert_array_equal(values, plain)


def test_another_processor_or_runtime_does_not_take_them(package, plain, packed):
    marker = _inside(packed) / "packed.txt"
    marker.write_text(marker.read_text().replace("processor ", "processor of another kind "))
    assert not logits(package, packed)[0]


def test_another_model_packs_beside(package, bundled_package, packed):
    other, _ = bundled_package("int8")
    assert not logits(other, packed)[0]
    pack(other, packed)
    assert len(list(packed.glob("packed-*"))) == 2
    assert logits(other, packed)[0] and logits(package, packed)[0]


def _start(package: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "edge_qkv", "pack", str(package), "--output", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_an_interrupted_pack_leaves_nothing_that_is_used(package, plain, tmp_path):
    folder = tmp_path / "weights"
    process = _start(package, folder)
    while process.poll() is None and not list(folder.glob(".packing-*/packed.onnx.data")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(folder.glob(".packing-*")) and not list(folder.glob("packed-*"))
    assert not logits(package, folder)[0]
    pack(package, folder)  # and what was left is cleared away
    assert not list(folder.glob(".packing-*")) and logits(package, folder)[0]


def test_a_pack_follows_no_link_when_it_clears_away(package, tmp_path):
    other, folder = tmp_path / "other", tmp_path / "weights"
    for directory in (other, folder, folder / ".packing-left"):
        directory.mkdir()
    for file in (other / "kept", folder / ".packing-left/packed.onnx"):
        file.write_text("content")
    (folder / ".packing-x").symlink_to(other)
    pack(package, folder)
    assert (other / "kept").read_text() == "content"
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".packing-")]


def test_two_packs_at_once_both_succeed(package, tmp_path):
    folder = tmp_path / "weights"
    both = [_start(package, folder) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert logits(package, folder)[0] and sorted(p.name for p in folder.iterdir())[0] == ".lock"


def test_a_place_that_cannot_be_written_is_one_sentence(package, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/below: the packed weights cannot be written there \(Not a directory\)"):
        pack(package, tmp_path / "file/below")
    with pytest.raises(InputError, match="/proc/nothing: the packed weights cannot be written there"):
        pack(package, Path("/proc/nothing"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_is_one_sentence(package, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match=r"cannot be written there \(Permission denied\)"):
        pack(package, tmp_path)


def test_a_full_disk_is_one_sentence(package, tmp_path):
    """On a file system of 4 MiB, in a mount namespace of its own."""
    pack_there = f"{sys.executable} -m edge_qkv pack {package} --output {tmp_path}/weights"
    script = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {pack_there}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this needs the right to mount")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "bytes are free and about" in last and "choose another directory" in last
