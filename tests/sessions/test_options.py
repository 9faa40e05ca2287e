"""Options that an engine has not are refused by name; what is not known of its memory is said."""

from __future__ import annotations

import re

import pytest

from edge_qkv import InputError, Model, Session, pack, plan
from edge_qkv.cli import main
from edge_qkv.package import Package
from edge_qkv.packing import is_packed

from .engines import CAPACITY, having, on

hosted = having("archive")


@hosted
@pytest.mark.parametrize(
    "options",
    [{"memory": "1GB"}, {"packed": "."}, {"packed": True}, {"spill": "."}, {"threads": 2}],
    ids=lambda options: "-".join(map(str, next(iter(options.items())))),
)
def test_options_of_the_native_runtime_are_refused_by_name(engine, options):
    name = next(iter(options))
    if name in engine.can:
        pytest.skip("it has that")
    with pytest.raises(InputError, match=f"^(--)?{name}: .*leave it out"):
        Model(engine.package, **options)
    Model(engine.package, packed=False).close()


@hosted
@pytest.mark.parametrize(
    "options",
    [{"overflow": "shift"}, {"overflow": "window"}, {"sinks": 3}, {"window": 8}, {"block": 8}],
    ids=lambda options: "-".join(map(str, next(iter(options.items())))),
)
def test_overflow_options_are_refused_by_name(model, options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: "):
        Session(model, CAPACITY, **options)


@hosted
def test_pressure_cannot_be_watched(model):
    with pytest.raises(InputError, match=r"^watch_pressure: .*leave it out"):
        model.watch_pressure()


@hosted
def test_weights_are_not_packed(engine, tmp_path, capsys):
    assert not is_packed(engine.package)
    with pytest.raises(InputError, match="prepares its weights by itself"):
        pack(engine.package, tmp_path)
    assert main(["pack", str(engine.package)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@having("overflow")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(overflow="wrap"), "overflow = 'wrap'"),
        (dict(overflow="window", sinks=20, window=20), "fewer than the context"),
        (dict(overflow="window", sinks=-1), "sinks = -1"),
        (dict(sinks=4), "belong to the overflow policy"),
        (dict(window=8), "belong to the overflow policy"),
        (dict(overflow="window", block=8), "belong to the overflow policy"),
        (dict(overflow="shift", block=41), "block"),
    ],
    ids=lambda given: "-".join(map(str, given)) if isinstance(given, dict) else "",
)
def test_overflow_options_that_cannot_work_are_refused(model, options, words):
    with pytest.raises(InputError, match=words):
        Session(model, context=40, **options)


@on("onnx, separate V, int8")
def test_rows_of_learned_positions_cannot_move(model):
    with pytest.raises(InputError, match="learned positions"):
        Session(model, context=40, overflow="shift")


@on("eager")
def test_a_plan_says_what_it_does_not_know(engine, capsys):
    package = engine.package
    a_token = Package.open(package).cache_bytes_per_token
    planned = plan(package, context=50)
    assert (planned.cache, planned.cache_type) == (256 * a_token, "fp32")  # llama.cpp rounds a context up
    assert planned.weights_file == planned.weight_bytes == (package / "model.gguf").stat().st_size
    assert planned.total == planned.cache + planned.weights_file
    assert "llama.cpp" in planned.unknown and planned.memory is None
    assert plan(package, context=50, cache="fp16").cache == 128 * a_token
    with pytest.raises(InputError, match=r"^--cache int8: "):
        plan(package, cache="int8")
    with pytest.raises(InputError, match=r"^--memory: .*leave it out"):
        plan(package, memory="1GB")
    assert main(["plan", str(package)]) == 0
    assert "chunks" not in capsys.readouterr().out  # none is planned
    assert main(["plan", str(package), "--device", "all"]) == 2
    assert "--device all: what llama.cpp takes" in capsys.readouterr().err
    assert main(["plan", "1.2B", "--variants", "--target", "gguf"]) == 2


@on("coreml")
def test_a_plan_of_core_ml_says_what_it_does_not_know(engine):
    assert "Core ML" in plan(engine.package).unknown
    with pytest.raises(InputError, match="--memory: what Core ML takes"):
        plan(engine.package, memory="1GB")


@on("eager")
@pytest.mark.parametrize("of", [["--target", "gguf", "1.2B/Q-MQA"], ["--target", "coreml", "1.2B/Q-MQA"], []])
def test_what_fits_on_a_device_is_not_known(engine, capsys, of):
    assert main(["plan", *(of or [str(engine.package)]), "--device", "all"]) == 2
    assert re.fullmatch(r"edge-qkv: --device all: what .* takes beyond .*; leave it out\n", capsys.readouterr().err)
