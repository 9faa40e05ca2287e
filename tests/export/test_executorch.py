"""ExecuTorch packages against the eager decoder, and what their exporter refuses."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, needs, write_checkpoint
from eager import TOLERANCE, expect
from edge_qkv import InputError, Model, Session, _native, attention
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.export import export_package
from edge_qkv.export.progress import silent
from edge_qkv.model import Decoder
from edge_qkv.package import Package
from edge_qkv.stored import plan_model, stored_as

SMALL = replace(TINY, layers=1)
# Nothing in it is whole groups of 32: neither the width, nor that of the heads, nor that of the MLP.
ODD = replace(
    SMALL,
    width=40,
    head_dim=12,
    mlp_width=56,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    tied_head=False,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
)
WIDE = replace(SMALL, width=64)  # its embedding has 4 bits, and groups of 64 are longer than some rows


@pytest.fixture(autouse=True)
def _executorch():
    needs("executorch")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", SMALL)


def _export(checkpoint: Path, output: Path, **options) -> dict:
    return export_package("executorch", str(checkpoint), output, **{"weights": "fp32", "parity": False} | options)


def _altered(checkpoint: Path, name: str) -> Checkpoint:
    """The checkpoint with one value of a tensor that is not finite."""
    read = read_checkpoint(str(checkpoint))
    tensor = read.tensors[name]().clone()
    tensor.view(-1)[3] = torch.nan
    return replace(read, tensors={**read.tensors, name: lambda: tensor})


# ---- what is computed ----


@pytest.mark.parametrize(
    ("config", "weights", "block", "allowed"),
    [(ODD, "8da4w", None, 0.3), (ODD, "8da8w", None, 0.03), (WIDE, "8da4w", 64, 0.3)],
    ids=["padded, 8da4w", "padded, 8da8w", "embedding of 4 bits, 8da4w"],
)
def test_quantised_weights_are_those_of_torchao(random_package, tmp_path, config, weights, block, allowed):
    """Logits are those of the quantised decoder, run eagerly: its error, `allowed` of their deviation, is no other."""
    from edge_qkv.export.executorch import weights as executorch_weights

    decoder, package = random_package("executorch", config, weights=weights, block_size=block)
    exact = expect(decoder, config.max_positions)
    how = stored_as("executorch", weights, block)[1]
    read = read_checkpoint(str(write_checkpoint(tmp_path / "checkpoint", config)))
    quantised = expect(executorch_weights.load(read, attention.attend, how, silent), config.max_positions)
    error = quantised.logits - exact.logits
    assert 0 < error.std() < allowed * exact.logits.std()
    with Session(package, config.max_positions, prefill_chunk=16) as session:
        logits = session.score(exact.ids)
    # An activation in the middle of two codes may be rounded to either.
    assert (logits - quantised.logits).std() < 0.1 * error.std()
    np.testing.assert_allclose(logits, quantised.logits, atol=0.5 * np.abs(error).max())


def test_a_package_for_fewer_tokens_computes_the_same(random_package):
    decoder, package = random_package("executorch", ODD, chunk=2, capacity=20)
    expected = expect(decoder, 20)
    opened = Package.open(package)
    assert opened.config.max_positions == 20 and opened.manifest["prefill_chunk"] == 2
    with Session(package, 20) as session:
        np.testing.assert_allclose(session.score(expected.ids), expected.logits, atol=TOLERANCE)
    with pytest.raises(InputError, match=r"context = 21: .* 20, the most this model allows"):
        Session(package, 21)


class Reads(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        logits, caches = super().forward(input_ids, past, caches, logit_rows)
        return logits + caches[0][0].sum(), caches


class Writes(Decoder):
    def forward(self, input_ids, past, caches, logit_rows):
        caches[0][0].mul_(0.5)
        return super().forward(input_ids, past, caches, logit_rows)


@pytest.mark.parametrize("kind", [Decoder, Reads, Writes])
def test_a_program_that_copies_a_cache_is_noticed(kind):
    from edge_qkv.export.executorch import program as executorch_program

    decoder = kind(SMALL, executorch_program.attend)
    if kind is Decoder:
        executorch_program.lower(decoder, "fp32", 16, {})
        return
    with pytest.raises(RuntimeError, match=r"caches are touched by other operators: .*kv_0"):
        executorch_program.lower(decoder, "fp32", 16, {})


# ---- what is written ----


@pytest.mark.parametrize("weights", ["8da4w", "8da8w"])
def test_the_plan_knows_the_sizes_before_the_export(bundled_package, bundled_checkpoint, tmp_path, weights):
    """Of the bundled model; with 8 bits, of its first layer, which takes a ninth of the time to lower."""
    if weights == "8da4w":
        package, manifest = bundled_package(weights, "executorch")
    else:
        from edge_qkv.export.executorch.exporter import export_executorch

        whole, package = read_checkpoint(str(bundled_checkpoint)), tmp_path / "package"
        first = replace(whole, config=replace(whole.config, layers=1))
        manifest = export_executorch(first, package, weights=weights, run_parity=False)
    config = Package.open(package, verify=False).config
    planned, found = plan_model(config, weights, target="executorch"), _native.PlanModel()
    outs = ctypes.byref(_native.PlanInfo()), ctypes.byref(found)
    _native.call("eqkv_plan_package", os.fsencode(package), None, *outs)
    assert found.weight_bytes == manifest["files"]["model.pte"]["bytes"]
    assert planned.weight_bytes == pytest.approx(found.weight_bytes, rel=0.005)
    for field in (
        "matrix_bytes",
        "table_bytes",
        "weight_bits",
        "block_size",
        "prefill_chunk",
        "mlp_width",
        "max_positions",
        "caches",
        "vocab_size",
    ):
        assert getattr(planned, field) == getattr(found, field), field


def test_equal_exports_have_the_same_fingerprint_and_others_another(random_package, checkpoint, tmp_path):
    _export(checkpoint, tmp_path / "again", cache="fp32", prefill_chunk=16)
    packages = [
        random_package("executorch", SMALL)[1],
        tmp_path / "again",
        random_package("executorch", SMALL, seed=1)[1],
    ]
    prints = []
    for package in packages:
        with Model(package) as model:
            prints.append(model.info.fingerprint)
    assert prints[0] == prints[1] != prints[2]


# ---- what is refused, and what is left behind ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_chunk": 1}, r"--prefill-chunk 1 .* from 2 to 96 tokens"),
        ({"prefill_chunk": 0}, r"--prefill-chunk 0 "),
        ({"prefill_chunk": 97}, r"--prefill-chunk 97 "),
        ({"capacity": 50, "prefill_chunk": 51}, r"--prefill-chunk 51 .* from 2 to 50 tokens"),
        ({"capacity": 97}, r"--capacity = 97: .* 96, the most this model allows"),
        ({"capacity": 1}, r"--capacity 1: .* at least 2"),
        ({"weights": "int3"}, r"--weights int3: must be one of fp32, 8da8w, 8da4w for the target executorch"),
        ({"weights": "8da4w", "block_size": 48}, r"--block-size 48: must be one of 32, 64, 128"),
        ({"weights": "8da8w", "block_size": 32}, r"--block-size 32: 8da8w weights take none"),
        ({"cache": "int4"}, r"--cache int4 "),
        ({"tokenizer": Path("no-such-tokenizer.json")}, r"no-such-tokenizer\.json"),
    ],
)
def test_wrong_options_are_named_before_any_work(checkpoint, tmp_path, monkeypatch, options, words):
    def work(*_):
        raise AssertionError("weights are read")

    with monkeypatch.context() as patch:
        patch.setattr("edge_qkv.export.executorch.weights.load", work)
        with pytest.raises(InputError, match=words):
            _export(checkpoint, tmp_path / "package", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_call_takes_no_more_tokens_than_buffers_can_be_planned_for(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", replace(SMALL, max_positions=8192))
    with pytest.raises(InputError, match=r"--prefill-chunk 4097 .* from 2 to 4,096 tokens"):
        _export(checkpoint, tmp_path / "package", prefill_chunk=4097)


@pytest.mark.parametrize("weights", ["fp32", "8da8w"])
@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.mlp.down.weight", "layers.0.mlp_norm.weight"])
def test_weights_that_are_not_finite_are_named(checkpoint, tmp_path, weights, name):
    from edge_qkv.export.executorch.exporter import export_executorch

    with pytest.raises(InputError, match=f"^{name} holds values that are not finite"):
        export_executorch(_altered(checkpoint, name), tmp_path / "package", weights=weights, run_parity=False)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("after", [0.0, 0.5, 1.5])
def test_an_interrupted_export_leaves_nothing(checkpoint, tmp_path, after):
    """Seconds after lowering began; what was at its place before stays there."""
    old = tmp_path / "package"
    old.mkdir()
    (old / "edge_qkv.json").write_text('{"files": {}}')

    def progress(what: str, *_: int) -> None:
        if what.startswith("Lowering"):
            signal.setitimer(signal.ITIMER_REAL, after or 1e-6)
        elif what.startswith("Writing"):  # it was fast
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGALRM)

    handlers = {
        signal.SIGALRM: lambda *_: signal.raise_signal(signal.SIGINT),
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(KeyboardInterrupt):
            _export(checkpoint, old, progress=progress)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "package"]
    assert [path.name for path in old.iterdir()] == ["edge_qkv.json"]
    assert (old / "edge_qkv.json").read_text() == '{"files": {}}'
