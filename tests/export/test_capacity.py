"""A package for a shorter context than the checkpoint's computes what the uncut model computes, as far as it goes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from conftest import TINY, changed, write_checkpoint
from edge_qkv import InputError, Session
from edge_qkv.description import DESCRIPTION
from edge_qkv.export import export_package
from edge_qkv.export.onnx import stock as onnx_stock
from edge_qkv.package import Package

CUT = 40
CONFIGS = {
    "rotary": changed(TINY, trained_context=90),
    "rotary on read": changed(TINY, positions="rotary-on-read"),
    "learned": changed(TINY, positions="learned", norm="layernorm", trained_context=30),
    "window": changed(TINY, window=60, sinks=50),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(case, **options) -> the package of a random checkpoint."""
    folder = tmp_path_factory.mktemp("capacity")

    def export(case: str, **options) -> Path:
        options = {"weights": "fp32", "cache": "fp32", "parity": False} | options
        output = folder / f"{case} {options}"
        if not output.exists():
            export_package("onnx", str(write_checkpoint(folder / case, CONFIGS[case])), output, **options)
        return output

    return export


def _tokens(count: int) -> list[int]:
    return np.random.default_rng(3).integers(0, TINY.vocab_size, count).tolist()


@pytest.mark.parametrize("case, weights", [*((case, "fp32") for case in CONFIGS), ("learned", "int8")])
def test_logits_are_the_uncut_models(case, weights, exported):
    whole, cut = (exported(case, weights=weights, capacity=capacity) for capacity in (None, CUT))
    config = Package.open(cut).config
    assert config.max_positions == CUT and Package.open(whole).config == CONFIGS[case]
    assert config.trained_context == min(CONFIGS[case].trained_context, CUT)
    cut_spec, spec = config.only, CONFIGS[case].only
    assert (cut_spec.window, cut_spec.sinks) == (min(spec.window, CUT), min(spec.sinks, CUT))
    tokens = _tokens(CUT)
    native = [Session(path, context=CUT, prefill_chunk=7).score(tokens) for path in (whole, cut)]
    stock = [onnx_stock.StockSession(path, CUT, threads=1).score(tokens, chunk=7) for path in (whole, cut)]
    for uncut, short in (native, stock):
        assert uncut.std() > 0.1
        np.testing.assert_array_equal(uncut, short)


@pytest.mark.parametrize("case", ["rotary", "learned"])
def test_the_package_holds_no_more_positions_than_it_was_cut_to(case, exported):
    whole, cut = (exported(case, capacity=capacity) for capacity in (None, CUT))
    tables = []
    for path in (whole, cut):
        model = onnx.load(path / "model.onnx", load_external_data=False)
        (described,) = (p.value for p in model.metadata_props if p.key == DESCRIPTION)
        tables.append(int(re.search(r"^table_bytes (\d+)$", described, re.M)[1]))
    values = TINY.only.head_dim if case == "rotary" else TINY.width  # of a position: cosines and sines, or its row
    assert tables[0] - tables[1] == (TINY.max_positions - CUT) * values * 4
    with pytest.raises(InputError, match=f"context = {CUT + 1}: .* {CUT}, the most this model allows"):
        Session(cut, context=CUT + 1)


def test_parity_is_measured_within_the_cut(exported):
    manifest = json.loads((exported("learned", capacity=20, parity=True) / "edge_qkv.json").read_text())
    assert manifest["parity"]["top1_agreement"] == 1 and manifest["parity"]["max_logit_error"] < 1e-3


@pytest.mark.parametrize("options, words", [
    ({"capacity": 97}, r"--capacity = 97: must be a whole number between 1 and 96, the most this model allows"),
    ({"capacity": 0}, "--capacity = 0"),
    ({"capacity": 50, "window": 60}, r"--window 60: .* from 0 to max_positions \(50\)"),
    ({"capacity": 50, "window": 20, "sinks": 60}, r"--sinks 60: .* from 0 to max_positions \(50\)"),
    ({"prefill_chunk": 128}, "--prefill-chunk 128: a package for onnx takes any number"),
    ({"weights": "8da4w"}, "--weights 8da4w: must be one of fp32, int8, int4 for the target onnx"),
])  # fmt: skip
def test_what_the_target_or_the_model_does_not_have_is_refused(options, words, exported):
    with pytest.raises(InputError, match=words):
        exported("rotary", **options)
