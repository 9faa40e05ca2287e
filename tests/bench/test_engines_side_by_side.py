"""Packages side by side: what is found in the processes, how it is printed, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import hears_ctrl_c
from edge_qkv import EdgeQKVError, Session
from edge_qkv.bench.package import engines, page_cache
from edge_qkv.bench.package.measurements import PREFILL, difference
from edge_qkv.bench.package.speed import TOLERANCE
from edge_qkv.export import export_package
from edge_qkv.package import Package

FIGURES = {
    "load_cold_ms",
    "load_warm_ms",
    "first_token_cold_ms",
    "first_token_warm_ms",
    "loaded_resident",
    "loaded_anonymous",
    "prefill_tokens_per_second",
    "decode_ms_at_0",
    "decode_ms_at_95",
    "full_resident",
    "full_anonymous",
    "full_peak",
    "cache_bytes",
}


@pytest.fixture(scope="module")
def executorch_package(tmp_path_factory, tiny_checkpoint) -> Path:
    pytest.importorskip("executorch")
    output = tmp_path_factory.mktemp("executorch") / "other"
    export_package("executorch", str(tiny_checkpoint), output, weights="fp32", cache="fp16", parity=False)
    return output


def test_packed_files_of_executorch_are_dropped_and_counted_too(executorch_package, tmp_path, capsys):
    options = ("--packed", str(tmp_path), "--repeats", "1", "--depths", "5", "--json")
    assert engines.main([str(executorch_package), *options]) == 0
    _, packed = json.loads(capsys.readouterr().out)["columns"]
    (folder,) = tmp_path.glob("packed-*")
    assert packed["packed_bytes"] == sum(file.stat().st_size for file in folder.iterdir()) > 0


def test_two_engines_side_by_side_as_json(tiny_package, executorch_package, capsys):
    capsys.readouterr()
    options = ("--repeats", "2", "--threads", "1", "--json")
    assert engines.main([str(tiny_package), str(executorch_package), *options]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["threads"], found["repeats"], found["depths"]) == (1, 2, [0, 95])
    first, second = found["columns"]
    assert [c["engine"] for c in found["columns"]] == ["onnxruntime", "executorch"]
    assert [c["cache"] for c in found["columns"]] == ["fp32", "fp16"]
    assert first["package"] == str(tiny_package) and first["same_next_tokens"] == PREFILL
    assert second["same_next_tokens"] >= PREFILL - 2  # their caches differ
    for column, path in zip(found["columns"], (tiny_package, executorch_package), strict=True):
        assert column["file_bytes"] == Package.open(path).weight_bytes
        assert not column["packed"] and "greedy" not in column
        assert 0 <= column["chunk_difference"] <= column["chunk_tolerance"] == TOLERANCE
        assert 0 <= column["cached_after_drop"] <= 1
        assert set(column["figures"]) == FIGURES
        for figure in column["figures"].values():
            assert 0 < figure["least"] <= figure["median"] <= figure["most"]
        full = column["figures"]["cache_bytes"]["median"]
        assert full == 96 * Package.open(path).config.cache_bytes_per_token(column["cache"])
        assert column["figures"]["full_peak"]["median"] >= column["figures"]["full_resident"]["median"]
    assert all(figure["ratio"] == 1 for figure in first["figures"].values())
    assert second["figures"]["cache_bytes"]["ratio"] == 0.5
    # Packages take turns, in the opposite order in the second round.
    lines = captured.err.splitlines()
    assert len(lines) == 14 and lines[0].startswith("[1/14] ") and lines[13].startswith("[14/14] round 2 of 2, ")
    ran = [line.rpartition(", ")[2] for line in lines if "speed" in line]
    assert ran == ["tiny: speed", "other: speed", "other: speed", "tiny: speed"]


def test_a_table_with_packed_weights(tiny_package, tmp_path, capsys):
    capsys.readouterr()
    arguments = [str(tiny_package), "--packed", str(tmp_path / "packed"), "--depths", "40", "5", "--repeats", "1"]
    assert engines.main(arguments) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["tiny", "tiny,", "packed"]
    rows = {line[:38].strip(): line[38:].split() for line in lines}
    assert rows["decode at 5, ms/token"][-1].endswith("x") and "decode at 40, ms/token" in rows
    assert rows["packing"][-1] == "s" and rows["packed files"][-1] in ("B", "KiB")
    assert rows["cache, 48 cached, bytes"] == [f"{48 * 2 * 8 * 4:,}"] * 2 + ["1.00x"]
    assert rows["next tokens as the first column's"] == ["64", "of", "64"] * 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").rglob("*")}
    assert engines.main([*arguments, "--json"]) == 0
    plain, packed = json.loads(capsys.readouterr().out)["columns"]
    assert (plain["packed"], packed["packed"]) == (False, True) and packed["pack_seconds"] is None
    (folder,) = (tmp_path / "packed").glob("packed-*")
    assert packed["packed_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").rglob("*")}


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> the one sentence it ends with; asserts exit code 2 and nothing measured."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert engines.main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err and "round" not in captured.err and captured.out == ""
        last = captured.err.splitlines()[-1]
        assert last.startswith("edge-qkv bench engines: ")
        return last

    return run


def test_bad_input_is_one_sentence(tiny_package, tmp_path, refused):
    assert f"{tmp_path}/none: is not a directory" in refused(tiny_package, tmp_path / "none")
    deep = refused(tiny_package, "--depths", 96)
    assert "--depths = 96: must be a whole number between 0 and 95" in deep and str(tiny_package) in deep
    assert "--repeats = 0" in refused(tiny_package, "--repeats", 0)
    assert "threads = -1" in refused(tiny_package, "--threads", -1)
    (tmp_path / "file").write_text("")
    assert "file: the packed weights cannot be written there" in refused(
        tiny_package, "--packed", tmp_path / "file", "--repeats", 1
    )


def test_a_package_of_a_short_context_is_refused(tiny_checkpoint, tmp_path, refused):
    options = {"weights": "fp32", "cache": "fp32", "parity": False, "capacity": 40}
    export_package("onnx", str(tiny_checkpoint), tmp_path / "short", **options)
    assert "short: holds 40 tokens, fewer than the 64" in refused(tmp_path / "short")


def test_a_model_that_does_not_load_is_told_from_its_process(tiny_package, tmp_path, refused):
    """Damaged with a fitting manifest, so that only the engine notices."""
    package = shutil.copytree(tiny_package, tmp_path / "package")
    content = b"\xff" * (package / "model.onnx").stat().st_size
    (package / "model.onnx").write_bytes(content)
    assert "model.onnx: is damaged" in refused(package)
    manifest = json.loads((package / "edge_qkv.json").read_text())
    manifest["files"]["model.onnx"]["sha256"] = hashlib.sha256(content).hexdigest()
    (package / "edge_qkv.json").write_text(json.dumps(manifest))
    assert "model.onnx: " in refused(package)


def test_logits_that_depend_on_the_chunk_are_an_error(tiny_package):
    """As an engine would give them that put a chunk's rows at other places than single tokens'."""
    tokens = list(range(PREFILL))
    with Session(tiny_package, context=96) as session:
        right = session.score(tokens)
        session.rewind(0)
        session.evaluate([7])
        moved = session.score(tokens)
    assert difference(right, right, TOLERANCE, "package") == 0
    with pytest.raises(EdgeQKVError, match=r"^package: gives other logits for 64 tokens read as a chunk"):
        difference(right, moved, TOLERANCE, "package")
    wrong = right.copy()
    wrong[-1, -1] = np.nan
    with pytest.raises(EdgeQKVError, match="differ by nan"):
        difference(right, wrong, TOLERANCE, "package")


def test_pages_of_files_are_dropped_and_read(tmp_path):
    files = [tmp_path / "some", tmp_path / "none"]
    files[0].write_bytes(os.urandom(3 << 20))
    files[1].write_bytes(b"")
    page_cache.read(files)
    assert page_cache.cached_share(files) == 1
    page_cache.drop(files)
    if page_cache.cached_share(files) > 0.5:
        pytest.skip("this file system keeps its pages")
    page_cache.read(files)
    assert page_cache.cached_share(files) == 1


@pytest.mark.parametrize("send", [os.kill, os.killpg])  # to it alone, and as a terminal does to all its processes
def test_ctrl_c_ends_it_without_a_trace(tiny_package, send):
    command = [sys.executable, "-m", "edge_qkv.bench.package.engines", str(tiny_package), "--repeats", "1000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=hears_ctrl_c, **pipes)
    for line in process.stderr:
        if "round 1 of" in line:
            break
    send(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and out == ""
    assert err.endswith("edge-qkv bench engines: stopped\n") and "Traceback" not in err
