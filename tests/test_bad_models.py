"""Model files that are damaged, foreign or too new, and engines that are not there: one sentence each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs
from edge_qkv import InputError, Model, _native, files
from edge_qkv.package import MANIFEST
from edge_qkv.targets import TARGETS

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
    (target,) = (OTHER[target] for target, known in TARGETS.items() if known.model_file == model.name)
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
    return package / TARGETS[target].model_file


def _refused(package: Path, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        Model(package)
    sentence = str(refused.value)
    assert sentence.startswith(str(package)) and sentence.isprintable() and len(sentence) < 500, sentence
    assert "; " in sentence, "a remedy"


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_model_file_is_one_sentence(kind, target, model, random_package):
    change, words = BAD[kind]
    change(model, lambda: random_package(OTHER[target])[1] / TARGETS[OTHER[target]].model_file)
    _refused(model.parent, words)


@pytest.mark.parametrize("line", ["format 3", "operator 2"])
def test_a_model_file_of_a_newer_version_says_so(line, target, model):
    name, version = line.split()
    data = model.read_bytes()
    assert data.count(f"{line}\n".encode()) == 1  # of the description, which both engines' files hold as it is
    model.write_bytes(data.replace(f"{line}\n".encode(), f"{name} {int(version) + 1}\n".encode()))
    _forge(model.parent)
    _refused(model.parent, rf"was written by a newer edge-qkv \({name} ")


# ---- the library of ExecuTorch ----

VARIABLE = "EDGE_QKV_EXECUTORCH_LIBRARY"


def _run(package: Path, library: Path, **variables: str) -> subprocess.CompletedProcess:
    """`edge-qkv run` with this libedge_qkv."""
    command = [sys.executable, "-m", "edge_qkv", "run", package, "--tokens", "1,2", "--max-tokens", "2", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"EDGE_QKV_LIBRARY": str(library)} | variables
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)


INSTALL = (
    "; install the Python package executorch and then edge-qkv once more from its sources (pip install ",
    "-DEDGE_QKV_EXECUTORCH=ON",
)


def _sentence(package: Path, library: Path, remedy: tuple[str, ...] = INSTALL, **variables: str) -> str:
    """What it says on its one line, which names the remedy."""
    done = _run(package, library, **variables)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    for words in ("The ExecuTorch engine cannot be opened: ", *remedy):
        assert words in line
    return line


@pytest.fixture
def library(tmp_path) -> Path:
    """libedge_qkv, in a directory of its own."""
    return shutil.copy(_native.library_path(), tmp_path / _native.library_path().name)


def _of_executorch(library: Path) -> Path:
    return library.with_name(library.name.replace("edge_qkv", "edge_qkv_executorch"))


def test_without_its_library_it_says_how_to_get_it(random_package, library):
    package = random_package("executorch")[1]
    for variables in ({}, {VARIABLE: ""}):
        line = _sentence(package, library, **variables)
        assert f"edge-qkv was built where there was no ExecuTorch: {_of_executorch(library)}" in line


def test_a_variable_that_names_no_library_is_named(random_package, library):
    package = random_package("executorch")[1]
    line = _sentence(package, library, ("; correct it, or unset it",), **{VARIABLE: "/nowhere/lib.so"})
    assert f"the environment variable {VARIABLE} names /nowhere/lib.so: /nowhere/lib.so: cannot open" in line
    assert _run(package, library, **{VARIABLE: str(_of_executorch(_native.library_path()))}).returncode == 0


WRONG = {
    "of another interface": (
        "const int* eqkv_executorch_plugin(void) { static const int numbers[64]; return numbers; }",
        "was built by another version of edge-qkv",
    ),
    "another": ("int nothing;", "is another library"),
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
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(wrong)], check=True)
    assert f"{wrong} {words}" in _sentence(package, library)


def test_a_library_that_cannot_be_loaded_is_named(random_package, library):
    wrong = _of_executorch(library)
    wrong.write_bytes(b"no library " * 100)
    assert str(wrong) in _sentence(random_package("executorch")[1], library)


# ---- ExecuTorch itself ----


@pytest.fixture
def installed(tmp_path) -> Path:
    """An installation of ExecuTorch with links to the libraries of the one that there is, and nothing else."""
    needs("executorch")
    real = Path(importlib.util.find_spec("executorch").submodule_search_locations[0])
    folder = tmp_path / "executorch"
    (folder / "lib").mkdir(parents=True)
    for file in (real / "lib").glob("libexecutorch*"):
        (folder / "lib" / file.name).symlink_to(file)
    return folder


def _beside(installed: Path) -> dict[str, str]:
    """Makes the loader take that installation, before the one that the library was built with."""
    return {"DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH": str(installed / "lib")}


@pytest.mark.parametrize(
    ("version", "fits"),
    [(None, True), ("nothing\n", True), ("{}", True), ("{}+other", True), ("{}1", False), ("0.0.1+cpu", False)],
)
def test_another_version_of_executorch_is_refused(random_package, installed, version, fits):
    package, ours = random_package("executorch")[1], importlib.metadata.version("executorch").split("+")[0]
    if version is not None:
        version = version.format(ours)
        (installed / "version.py").write_text(f"import os\n__version__ = '{version}'\ngit_version = 'a'\n")
    if fits:
        done = _run(package, _native.library_path(), **_beside(installed))
        assert done.returncode == 0, done.stderr
    else:
        line = _sentence(package, _native.library_path(), **_beside(installed))
        assert f"was built with ExecuTorch {ours}" in line
        assert f"and the one in {installed}/lib/ is {version}" in line


@pytest.mark.slow
def test_kernels_that_are_missing_are_named(random_package, installed):
    """The library of quantised operators: only programs that have such an operator need it."""
    (kernels,) = (installed / "lib").glob("libexecutorch_kernels_quantized.*")
    kernels.unlink()
    done = _run(random_package("executorch")[1], _native.library_path(), **_beside(installed))
    assert done.returncode == 0, done.stderr
    line = _sentence(random_package("executorch", weights="8da4w")[1], _native.library_path(), **_beside(installed))
    assert str(kernels) in line and "No such file" in line


def test_a_second_copy_of_the_library_is_refused(random_package, library):
    """Both would run ExecuTorch's one pool, and hear what it logs."""
    package = random_package("executorch")[1]
    copy = shutil.copy(_of_executorch(_native.library_path()), library.parent)
    script = f"""from pathlib import Path
from edge_qkv import InputError, Model, Session, _native
def run():
    with Model({str(package)!r}) as model, Session(model, context=32) as session:
        session.evaluate([1, 2, 3])
run()
ours, _native._ENGINE_LIBRARIES["executorch"] = _native.executorch_path(), lambda: Path({str(copy)!r})
for _ in range(2):
    try:
        run()
    except InputError as error:
        print(error)
_native._ENGINE_LIBRARIES["executorch"] = lambda: ours
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == second and "another copy of libedge_qkv_executorch; name the same file wherever" in first
