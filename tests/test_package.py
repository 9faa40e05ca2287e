"""A damaged, foreign or incomplete package is refused with one sentence that names the file."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from conftest import TINY, changed
from edge_qkv import InputError, Package
from edge_qkv.package import FORMAT, MANIFEST, is_package_only
from edge_qkv.tokenizer import encode, load_tokenizer


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
        (b"[" * 200_000, "JSON"),
        (b"[]", "not a package manifest"),
        (b"{}", "not a package manifest"),
        (b'{"format": 99}', "format 99"),
        (b'{"format": 1}', "format 1"),
        (f'{{"format": {FORMAT}}}'.encode(), "expected an object"),
    ],
)
def test_a_bad_manifest_is_refused(content, words, package):
    (package / MANIFEST).write_bytes(content)
    with pytest.raises(InputError, match=words):
        Package.open(package)


@pytest.mark.parametrize(
    "name", ["../model.onnx", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "..", ".", "", "..\\a", "C:a"]
)
def test_files_outside_the_package_are_refused(name, package):
    _edit(package, files={name: {"bytes": 1, "sha256": ""}, "model.onnx": {"bytes": 1, "sha256": ""}})
    with pytest.raises(InputError, match="no file of a package"):
        Package.open(package)


def test_files_in_a_directory_of_the_package_are_checked_and_its_own(package):
    """As a model that is a directory has them."""
    inside = package / "model.onnx" / "weights"
    manifest = json.loads((package / MANIFEST).read_text())
    (package / "model.onnx").unlink()
    inside.mkdir(parents=True)
    (inside / "weight.bin").write_bytes(b"12345")
    facts = {"bytes": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}
    others = {name: facts for name, facts in manifest["files"].items() if name != "model.onnx"}
    _edit(package, files={"model.onnx/weights/weight.bin": facts, **others})
    assert Package.open(package).weight_bytes == 5 + manifest["files"]["model.onnx.data"]["bytes"]
    assert is_package_only(package)
    (inside / "weight.bin").write_bytes(b"12346")
    with pytest.raises(InputError, match=r"weights/weight\.bin: is damaged"):
        Package.open(package)
    (inside / "notes.txt").write_text("the user's")
    assert not is_package_only(package)


def test_places_that_are_no_package_are_named(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        Package.open(tmp_path / "absent")
    with pytest.raises(InputError, match="not a model package"):
        Package.open(tmp_path)


@pytest.mark.parametrize("changes", [{"stop_tokens": None}, {"stop_tokens": "5"}, {"parity": "good"}, {"files": {}},
                                     {"target": None}, {"target": []}, {"target": "executorch"}])  # fmt: skip
def test_fields_of_the_wrong_type_are_refused(changes, package):
    _edit(package, **changes)
    with pytest.raises(InputError, match="export the package again"):
        Package.open(package)


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 300}, {"layers": 3}, {"sharing": "qkv"}, {"max_positions": 50}, {"kv_heads": 2}, {"cache": "fp16"}],
)
def test_config_of_another_model_is_refused(change, package):
    from edge_qkv import Model

    if "cache" in change:
        _edit(package, **change)
    else:
        _edit(package, config=changed(TINY, **change).to_dict())
    with pytest.raises(InputError, match="disagree"):
        Model(package)


def test_a_tokenizers_training_habits_do_not_touch_prompts(package):
    """Truncation and padding, which published tokenizer files often carry."""
    file = package / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(file, 260)
    assert len(encode(tokenizer, "a longer prompt", frozenset(), start=True)) == 15
    with pytest.raises(InputError, match="UTF-8"):
        encode(tokenizer, "caf\udce9", frozenset(), start=True)


def test_tokenizer_of_another_model_is_refused(package):
    _edit(package, config=json.loads((package / MANIFEST).read_text())["config"] | {"vocab_size": 100})
    with pytest.raises(InputError, match="belongs to another model: it has token 256"):
        Package.open(package).tokenizer()
