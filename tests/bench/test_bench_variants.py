"""`edge-qkv bench CONFIG` and `edge-qkv bench variants`: packages of random weights, their caches and speeds."""

from __future__ import annotations

import json
from pathlib import Path

import bench_results
import pytest

from conftest import TINY, changed
from edge_qkv import EdgeQKVError, plan
from edge_qkv.bench.__main__ import main
from edge_qkv.bench.package import variants
from edge_qkv.bench.package.random_weights import random_package
from edge_qkv.presets import PRESETS, apply_variant

CONFIG = changed(TINY, heads=8, head_dim=4, max_positions=64)
EXPORT = ("--weights", "fp32", "--cache", "fp16", "--repeats", "1")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    return path


def test_a_config_is_exported_once_and_measured(config, tmp_path, capsys):
    options = ("--only", "decode", "--depths", "0", "63", "--directory", str(tmp_path), *EXPORT, "--json")
    assert main([str(config), *options]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "exporting random weights" in captured.err and found["package"]["config"] == CONFIG.to_dict()
    assert found["decode"]["depths"][-1]["memory"]["cache_used"] == CONFIG.cache_bytes(64, "fp16")
    (package,) = tmp_path.iterdir()
    written = {path: path.stat().st_mtime_ns for path in package.rglob("*")}
    for again, same in ((CONFIG, True), (changed(CONFIG, mlp="gelu"), False)):  # the second of the same name
        assert random_package("small", again, tmp_path, "onnx", "fp32", "fp16").config == again
        assert ("exporting" in capsys.readouterr().err) != same
        assert (written == {path: path.stat().st_mtime_ns for path in package.rglob("*")}) == same


def test_variants_have_the_cache_that_is_planned(config, tmp_path, capsys):
    options = ("--variants", "QKV", "Q-MQA", "--depths", "0", "63", "--directory", str(tmp_path / "random"))
    assert main(["variants", str(config), *options, *EXPORT, "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    found = bench_results.read(tmp_path / "out", "variants")
    assert found["complete"] and found["model"] == "small" and found["context"] == 64
    for row in found["variants"]:
        varied = apply_variant(CONFIG, row["variant"])
        assert row["cache_reserved"] == row["cache_planned"] == plan(varied, context=64).cache
        assert row["depths"][-1]["memory"]["cache_used"] == varied.cache_bytes(64) and row["cache_paper"] is None
        assert row["verified"]["tokens"] == 9
    sizes = [row["depths"][-1]["memory"]["cache_used"] for row in found["variants"]]
    assert sizes == [sizes[1] * 16, sizes[1]]
    assert "QKV" in out and "decode, ms/token" in out and "verified: 18 of 18" in out
    text = (tmp_path / "out" / "bench.md").read_text()
    if "cache.svg" in text:
        assert (tmp_path / "out" / "cache.png").exists() and (tmp_path / "out" / "decode.svg").exists()


def test_fewer_layers_are_said_and_not_compared_with_the_paper(config, tmp_path, capsys):
    options = ("--variants", "Q-MQA", "--layers", "1", "--depths", "0", "--directory", str(tmp_path), *EXPORT, "--json")
    assert main(["variants", str(config), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "small, first 1 layers" and found["layers"] == 1
    (row,) = found["variants"]
    assert row["cache_reserved"] == plan(changed(CONFIG, layers=1), context=64).cache
    assert row["depths"][0]["memory"]["cache_used"] == CONFIG.cache_bytes(8) // 2
    assert variants._Model("1.2B", PRESETS["1.2B"], False).paper("Q-MQA", "fp16") is None


def test_a_cache_that_is_not_as_planned_is_an_error():
    config = apply_variant(PRESETS["300M"], "MQA")
    full, some = config.cache_bytes(32768), config.cache_bytes(4104)

    def row(used: int = full, planned: int = full, paper: int | None = full, cached: int = 32768) -> dict:
        decoded = {"depth": cached - 8, "tokens": [0] * 8, "memory": {"cache_used": used}}
        sizes = {"cache_planned": planned, "cache_reserved": full, "cache_paper": paper}
        return {"variant": "MQA", "cache": "fp16", "depths": [decoded]} | sizes

    variants._check(row(), config)
    variants._check(row(used=some, cached=4104, paper=None), config)
    for wrong, message in (
        (row(used=full + 1), f"MQA: 32,768 tokens take {full + 1:,} bytes of cache, and should {full:,}"),
        (row(used=full, cached=4104), f"MQA: 4,104 tokens take {full:,} bytes of cache, and should {some:,}"),
        (row(planned=full + 1, paper=None), f"MQA: reserves {full:,} bytes of cache, {full + 1:,} are planned"),
        (row(paper=full + 1), f"MQA: is published with {full + 1:,} bytes of cache, {full:,} are planned"),
    ):
        with pytest.raises(EdgeQKVError) as error:
            variants._check(wrong, config)
        assert str(error.value) == message


@pytest.mark.parametrize("name", PRESETS)
def test_published_caches_are_those_of_the_plan(name):
    model = variants._Model(name, PRESETS[name], True)
    names = variants._names(model.config)
    assert set(variants.PAPER[name]) <= set(names) and len(names) == 6
    for variant, published in variants.PAPER[name].items():
        assert plan(apply_variant(model.config, variant), context=32768).cache == published
        assert model.paper(variant, "fp16") == published and model.paper(variant, "int8") is None


def test_bad_input_is_one_sentence(config, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["variants", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        return captured.err

    assert "2B: must be one of 300M, 1.2B, or the path of a config.json" in refused("2B")
    assert "must be one of 300M" in refused("1.2B/Q-MQA")
    assert "none.json: cannot be read" in refused(tmp_path / "none.json")
    assert "--depths = 64: must be a whole number between 0 and 63, the most small goes" in refused(
        config, "--depths", 64
    )
    assert "variant 'GQA' is not known" in refused(config, "--variants", "GQA")
    assert "--layers = 3: must be a whole number between 1 and 2" in refused(config, "--layers", 3)
    assert "--weights 8da4w: must be one of" in refused(config, "--weights", "8da4w")
