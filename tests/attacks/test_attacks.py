"""Every attack is refused in one sentence: by the library as it is installed, and by one built with sanitizers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from attacks import MODELS, PROGRAMS, SNAPSHOTS, TEXTS
from edge_qkv import EdgeQKVError, Model, Session, files

CONTEXT = 96


@pytest.fixture(scope="module")
def conversation(tiny_package, tmp_path_factory) -> tuple[list[int], bytes]:
    """Tokens of a session, and the snapshot that it saved."""
    tokens = list(range(40))
    path = tmp_path_factory.mktemp("good") / "snapshot"
    with Session(tiny_package, context=CONTEXT) as session:
        session.evaluate(tokens)
        session.save(path)
    return tokens, path.read_bytes()


@pytest.fixture(scope="module")
def snapshots(conversation, tmp_path_factory) -> dict[str, Path]:
    return _written(SNAPSHOTS, conversation[1], tmp_path_factory.mktemp("snapshots"))


@pytest.fixture(scope="module")
def models(tiny_package, tmp_path_factory) -> dict[str, Path]:
    return _written(MODELS, (tiny_package / "model.onnx").read_bytes(), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def program() -> bytes:
    """A small program by ExecuTorch's own exporter, with a description of a model in it."""
    exir = pytest.importorskip("executorch.exir", reason="executorch is not installed")
    import torch

    exported = torch.export.export(torch.nn.Linear(8, 8), (torch.zeros(1, 8),), strict=False)
    described = {f"edge_qkv.{key}": value for key, value in TEXTS.items()}
    return exir.to_edge_transform_and_lower(exported, constant_methods=described).to_executorch().buffer


def _written(attacks, good: bytes, folder: Path) -> dict[str, Path]:
    """The attacks as files, each different from the good one."""
    paths = {}
    for number, (name, attack) in enumerate(attacks.items()):
        paths[name] = folder / f"{number}.onnx"
        data = attack(good)
        assert data != good, name
        paths[name].write_bytes(data)
    return paths


def _is_a_sentence(message: str) -> bool:
    return message.isprintable() and 20 < len(message) < 500 and "Traceback" not in message


def test_snapshots_are_refused_and_change_nothing(tiny_package, conversation, snapshots):
    tokens, _ = conversation
    with Session(tiny_package, context=CONTEXT) as session:
        session.evaluate(tokens[:7])
        before = session.logits()
        for name, path in snapshots.items():
            with pytest.raises(EdgeQKVError) as refused:
                session.restore(path)
            assert _is_a_sentence(str(refused.value)), name
            assert session.tokens == tokens[:7], name
        np.testing.assert_array_equal(session.logits(), before)


def test_models_are_refused(tiny_package, models, tmp_path):
    """In packages whose manifest names the hostile file with its size and hash, as a forger would."""
    for number, (name, path) in enumerate(models.items()):
        package = tmp_path / str(number)
        shutil.copytree(tiny_package, package)
        shutil.copyfile(path, package / "model.onnx")
        manifest = json.loads((package / "edge_qkv.json").read_text())
        manifest["files"]["model.onnx"] = {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
        (package / "edge_qkv.json").write_text(json.dumps(manifest))
        with pytest.raises(EdgeQKVError) as refused:
            Model(package)
        assert _is_a_sentence(str(refused.value)), name


@pytest.mark.parametrize("build", ["tests", pytest.param("sanitized_tests", marks=pytest.mark.slow)])
def test_the_native_core_refuses_them(build, request, tiny_package, snapshots, models):
    """Under AddressSanitizer and UBSan as well: no read outside a file, no overflow, no leak."""
    program = request.getfixturevalue(build) / "attack_program"
    lines = _lines(program, "snapshot", tiny_package / "model.onnx", *snapshots.values())
    for name, line in zip(snapshots, lines, strict=True):
        assert line.startswith("refused: ") and _is_a_sentence(line), name
    # Metadata that is sound by itself and contradicts the graph is found when the graph is loaded.
    contradicts = {name for name in models if name.endswith("of another model")}
    for name, line in zip(models, _lines(program, "model", *models.values()), strict=True):
        assert line.startswith("refused: ") or name in contradicts, name
        assert _is_a_sentence(line) or name in contradicts, name


@pytest.mark.parametrize("build", ["tests", pytest.param("sanitized_tests", marks=pytest.mark.slow)])
def test_the_native_core_refuses_programs(build, request, program, tmp_path):
    """And accepts the one that they were made from, which ExecuTorch wrote."""
    attacks = _written(PROGRAMS, program, tmp_path)
    good = tmp_path / "good.pte"
    good.write_bytes(program)
    executable = request.getfixturevalue(build) / "attack_program"
    first, *lines = _lines(executable, "pte", good, *attacks.values())
    assert first == "accepted"
    for name, line in zip(attacks, lines, strict=True):
        assert line.startswith("refused: ") and _is_a_sentence(line), (name, line)


def _lines(*command: object) -> list[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
