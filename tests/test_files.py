"""Files that are read whole: none too large to be, and text as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY, write_checkpoint
from edge_qkv import InputError, Package
from edge_qkv.bench import results
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.cli import main
from edge_qkv.export import export_package
from edge_qkv.files import LIMITS, read_text
from edge_qkv.package import MANIFEST, is_package_only
from edge_qkv.recipe import HELD_TEXT, Recipe
from edge_qkv.tokenizer import load_tokenizer
from edge_qkv.training import train, trained

SIZE = 1 << 40  # of holes
TRAINING = Recipe(), {"variant": "MQA", "query": "projected", "positions": "none"}, 300, "fp16"


def _sparse(path: Path, size: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return path


def _beside_weights(folder: Path, name: str) -> Path:
    write_checkpoint(folder, TINY)
    _sparse(folder / name)
    return folder


def _report(folder: Path) -> None:
    (folder / "data.txt").write_text("some text")
    (folder / "model.safetensors").touch()
    _sparse(folder / "training.json")
    trained(folder / "data.txt", folder, *TRAINING)


# What is read whole -> functions that meet one in a directory that is too large.
READERS = {
    "edge_qkv.json": (lambda folder: Package.open(_sparse(folder / MANIFEST).parent),),
    "config.json": (
        lambda folder: read_checkpoint(str(_beside_weights(folder, "config.json"))),
        lambda folder: read_checkpoint(f"random:{_sparse(folder / 'other.json')}"),
    ),
    "tokenizer.json": (
        lambda folder: load_tokenizer(_sparse(folder / "tokenizer.json"), 260),
        lambda folder: export_package("onnx", str(_beside_weights(folder, "tokenizer.json")), folder / "package"),
    ),
    "--parity-text": (
        lambda folder: export_package("onnx", str(_beside_weights(folder, HELD_TEXT)), folder / "package"),
    ),
    "--data": (lambda folder: train(_sparse(folder / "data"), folder, *TRAINING),),
    "report": (_report,),
    "result": (lambda folder: results.read(_sparse(folder / "bench.json")),),
}


@pytest.mark.parametrize("what", READERS)
def test_a_file_that_is_too_large_is_refused_unread(what, tmp_path):
    for i, read in enumerate(READERS[what]):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises(InputError, match=r"is larger than .*iB, the most that is read"):
            read(folder)


def test_a_prompt_that_is_too_large_is_refused(tiny_package, tmp_path, capsys):
    prompt = _sparse(tmp_path / "prompt")
    assert main(["run", str(tiny_package), "--prompt-file", str(prompt)]) == 2
    assert f"--prompt-file {prompt}: is larger than 64.0 MiB" in capsys.readouterr().err
    with prompt.open("rb") as file:
        command = [sys.executable, "-m", "edge_qkv", "run", str(tiny_package)]
        done = subprocess.run(command, stdin=file, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("edge-qkv: the prompt: is larger than 64.0 MiB")


def test_every_kind_of_file_is_tried_here():
    assert set(LIMITS) == set(READERS) | {"--prompt-file", "standard input"}


def test_a_pipe_is_read_to_its_limit(tmp_path):
    with pytest.raises(InputError, match="/dev/zero: is larger than"):
        read_text(Path("/dev/zero"), "config.json")


def test_a_directory_with_an_endless_manifest_is_no_earlier_output(tmp_path):
    assert not is_package_only(_sparse(tmp_path / MANIFEST).parent)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_text_is_taken_as_it_is_without_a_mark(mark, end, tiny_package, tmp_path, capsys):
    text = b"one" + end + b"\xc3\xa9" + end
    file = tmp_path / "text"
    file.write_bytes(mark + text)
    for what in LIMITS:
        assert read_text(file, what).encode() == text
    command = ["run", str(tiny_package), "--max-tokens", "1", "--temperature", "0", "--quiet"]
    assert main([*command, "--prompt", text.decode()]) == 0
    by_option = capsys.readouterr().out
    assert by_option.startswith(text.decode())
    assert main([*command, "--prompt-file", str(file)]) == 0
    assert capsys.readouterr().out == by_option
    with file.open("rb") as pipe:
        piped = subprocess.run(
            [sys.executable, "-m", "edge_qkv", *command], stdin=pipe, capture_output=True, check=True
        )
    assert piped.stdout.decode() == by_option
