"""The README's C program, compiled as it stands there and run on a package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_qkv import Sampling, Session
from edge_qkv._native import library_path, onnxruntime_path

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c")
    (folder / "main.c").write_text(re.search(r"```c\n(.*?)```", README.read_text(), re.DOTALL)[1])
    at = library_path().parent.parent
    options = [f"-I{at}/include", f"-L{at}/lib", "-ledge_qkv", f"-Wl,-rpath,{at}/lib", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, "-std=c99", str(folder / "main.c"), *options, "-o", str(folder / "main")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "main"


def test_it_writes_what_python_writes(program, tiny_package):
    done = subprocess.run([program, tiny_package, onnxruntime_path()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Session(tiny_package, context=64) as session:
        expected = list(session.generate_tokens([1], 10, Sampling(temperature=0)))
    assert [int(word) for word in done.stdout.split()][: len(expected)] == expected


def test_it_says_what_is_wrong(program, tiny_package):
    done = subprocess.run([program, "absent", onnxruntime_path()], capture_output=True, text=True)
    assert done.returncode != 0 and "absent" in done.stderr
    done = subprocess.run([program, tiny_package, "/absent/libonnxruntime.so"], capture_output=True, text=True)
    assert done.returncode != 0 and "/absent/libonnxruntime.so" in done.stderr
