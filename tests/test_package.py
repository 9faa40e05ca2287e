"""A damaged, foreign or incomplete package is refused with one sentence that names the file."""

from __future__ import annotations

import json
import shutil

import pytest

from edge_qkv import InputError, Package
from edge_qkv.package import MANIFEST


@pytest.fixture
def package(tiny_package, tmp_path):
    return shutil.copytree(tiny_package, tmp_path / "package")


def _edit(package, **changes):
    manifest = json.loads((package / MANIFEST).read_text())
    (package / MANIFEST).write_text(json.dumps(manifest | changes))


def test_a_sound_package_opens(package):
    opened = Package.open(package)
    assert opened.config.vocab_size == 260
    assert opened.stop_tokens == {256}
    assert opened.weight_bytes == sum(f.stat().st_size for f in package.glob("model.onnx*"))


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_flipped_bit_is_found_in(name, package):
    data = bytearray((package / name).read_bytes())
    data[len(data) // 2] ^= 1
    (package / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name}: is damaged"):
        Package.open(package)
    Package.open(package, verify=False)  # sizes alone do not show it


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_missing_or_shortened_file_is_named(name, package):
    data = (package / name).read_bytes()
    (package / name).write_bytes(data[:-1])
    with pytest.raises(InputError, match=f"{name}: has {len(data) - 1:,} bytes"):
        Package.open(package, verify=False)
    (package / name).unlink()
    with pytest.raises(InputError, match=f"{name}: is missing"):
        Package.open(package, verify=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "not a package manifest"),
        (b"{}", "not a package manifest"),
        (b'{"format": 99}', "format 99"),
        (b'{"format": 1}', "expected an object"),
    ],
)
def test_a_bad_manifest_is_refused(content, words, package):
    (package / MANIFEST).write_bytes(content)
    with pytest.raises(InputError, match=words):
        Package.open(package)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_the_package_are_refused(name, package):
    _edit(package, files={name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(InputError, match="not a plain file name"):
        Package.open(package)


def test_places_that_are_no_package_are_named(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        Package.open(tmp_path / "absent")
    with pytest.raises(InputError, match="not a model package"):
        Package.open(tmp_path)


def test_config_of_another_model_is_refused(package):
    from edge_qkv import Model

    config = json.loads((package / MANIFEST).read_text())["config"]
    _edit(package, config=config | {"vocab_size": 300})
    with pytest.raises(InputError, match="disagree"):
        Model(package)


def test_tokenizer_of_another_model_is_refused(package):
    _edit(package, config=json.loads((package / MANIFEST).read_text())["config"] | {"vocab_size": 100})
    with pytest.raises(InputError, match="belongs to another model: it has token 256"):
        Package.open(package).tokenizer()
