"""Model files that are damaged, foreign or too new, and engines that are not there: one sentence each."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from attacks import places
from edge_qkv import InputError, Model, _native, files
from edge_qkv.package import MANIFEST, MODEL_FILES

OTHER = {"onnx": "executorch", "executorch": "onnx"}


def _forge(package: Path, **changes) -> None:
    """Makes the manifest true of the files that are there, as a forger would."""
    manifest = json.loads((package / MANIFEST).read_text()) | changes
    for name in manifest["files"]:
        if (file := package / name).exists():
            manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": files.sha256(file)}
    (package / MANIFEST).write_text(json.dumps(manifest))


# Each makes a sound model file bad; other() is one of the other engine.


def _half(model: Path, _) -> None:
    os.truncate(model, model.stat().st_size // 2)


def _half_forged(model: Path, _) -> None:
    _half(model, _)
    _forge(model.parent)


def _text(model: Path, _) -> None:
    model.write_bytes(b"once upon a time " * 1000)
    _forge(model.parent)


def _foreign(model: Path, other) -> None:
    shutil.copyfile(other(), model)
    _forge(model.parent)


def _missing(model: Path, _) -> None:
    model.unlink()


def _missing_everywhere(model: Path, _) -> None:
    model.rename(model.with_name("model.bin"))
    manifest = json.loads((model.parent / MANIFEST).read_text())
    _forge(model.parent, files={name: facts for name, facts in manifest["files"].items() if name != model.name})


def _both(model: Path, other) -> None:
    shutil.copyfile(other(), model.with_name(other().name))


def _other_target(model: Path, _) -> None:
    (target,) = (OTHER[target] for target, name in MODEL_FILES.items() if name == model.name)
    _forge(model.parent, target=target)


def _both_and_other_target(model: Path, other) -> None:
    _both(model, other)
    manifest = json.loads((model.parent / MANIFEST).read_text())
    _forge(model.parent, files=manifest["files"] | {other().name: {}})
    _other_target(model, other)


BAD = {
    "cut off": (_half, r"model\.(onnx|pte): has [0-9,]+ bytes, not [0-9,]+; .*"),
    "cut off, and listed so": (_half_forged, r"model\.(onnx|pte): .*"),
    "a text": (_text, r"model\.(onnx|pte): .*"),
    "of the other engine": (_foreign, r"model\.(onnx|pte): .*"),
    "missing": (_missing, r"model\.(onnx|pte): is missing .*"),
    "missing and not listed": (_missing_everywhere, r"edge_qkv\.json: lists no model file; .*"),
    "beside another": (_both, r"holds both model\.onnx and model\.pte, .* of its own"),
    "of another target": (_other_target, r"edge_qkv\.json: lists no model file; .*"),
    "beside that of its target": (_both_and_other_target, r"holds both model\.onnx and model\.pte, .* of its own"),
}


@pytest.fixture
def model(target, random_package, tmp_path) -> Path:
    """The model file of a package that may be changed."""
    package = shutil.copytree(random_package(target)[1], tmp_path / "package")
    return package / MODEL_FILES[target]


def _refused(package: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        Model(package)
    sentence = str(refused.value)
    assert sentence.startswith(str(package)) and sentence.isprintable() and len(sentence) < 500, sentence


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_model_file_is_one_sentence(kind, target, model, random_package):
    change, words = BAD[kind]
    change(model, lambda: random_package(OTHER[target])[1] / MODEL_FILES[OTHER[target]])
    _refused(model.parent, words)


# The operator's version is text in a program; an ONNX model imports it, and ONNX Runtime knows one.
@pytest.mark.parametrize(
    ("target", "key"),
    [("onnx", "format"), ("executorch", "format"), ("executorch", "operator")],
    indirect=["target"],
)
def test_a_model_file_of_a_newer_version_says_so(key, target, model):
    if target == "executorch":
        data = bytearray(model.read_bytes())
        data[places(data, key)["text length"] + 4] += 1  # the first digit of a text
        model.write_bytes(data)
    else:
        program = onnx.load(model, load_external_data=False)
        (entry,) = (entry for entry in program.metadata_props if entry.key == f"edge_qkv.{key}")
        entry.value = str(int(entry.value) + 1)
        onnx.save(program, model)
    _forge(model.parent)
    _refused(model.parent, rf"was written by a newer edge-qkv \({key} ")


# ---- the library of ExecuTorch ----


def _run(package: Path, library: Path) -> str:
    """What `edge-qkv run` says with this libedge_qkv, on its one line."""
    command = [sys.executable, "-m", "edge_qkv", "run", package, "--tokens", "1,2", "--max-tokens", "2", "--quiet"]
    environment = os.environ | {"EDGE_QKV_LIBRARY": str(library)}
    environment.pop("EDGE_QKV_EXECUTORCH", None)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture
def library(tmp_path) -> Path:
    """libedge_qkv, in a directory of its own."""
    return shutil.copy(_native.library_path(), tmp_path / _native.library_path().name)


def _of_executorch(library: Path) -> Path:
    return library.with_name(library.name.replace("edge_qkv", "edge_qkv_executorch"))


def test_without_its_library_it_says_how_to_get_it(random_package, library):
    line = _run(random_package("executorch")[1], library)
    assert (
        "built where there was no ExecuTorch" in line and "pip install" in line and "-DEDGE_QKV_EXECUTORCH=ON" in line
    )


VERSION = "const char* eqkv_executorch_version(void) {{ return {0}; }}"
WRONG = {
    "of another ExecuTorch": (VERSION.format('"0.0.1"'), "was built with ExecuTorch 0.0.1, and "),
    "without our function": (VERSION.format("INSTALLED"), "is another library; install the Python package executorch"),
    "another": ("int nothing;", "is another library; install the Python package executorch"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_library_that_does_not_fit_is_named(random_package, library, kind):
    package = random_package("executorch")[1]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    code, words = WRONG[kind]
    wrong, source = _of_executorch(library), library.with_name("wrong.c")
    source.write_text(code)
    installed = f'-DINSTALLED="{importlib.metadata.version("executorch")}"'
    subprocess.run([compiler, "-shared", "-fPIC", installed, str(source), "-o", str(wrong)], check=True)
    line = _run(package, library)
    assert str(wrong) in line and words in line and "from its sources (pip install" in line


def test_a_library_that_cannot_be_loaded_is_named(random_package, library):
    wrong = _of_executorch(library)
    wrong.write_bytes(b"no library " * 100)
    line = _run(random_package("executorch")[1], library)
    assert str(wrong) in line and "install the Python package executorch" in line
