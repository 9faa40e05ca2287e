"""From a file as it was published to logits: every variant, with both engines and in plain onnxruntime.

Each file is exported with fp32 weights and must give the logits of the eager decoder, with a cache of the same type,
through prefill, chunked prefill, single-token decode and after rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from conftest import TINY, needs, write_checkpoint
from eager import Expected, expect, walk, walk_session
from edge_qkv import Model, Session
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.config import POSITIONS
from edge_qkv.export import export_package
from edge_qkv.export.onnx.stock import StockSession
from samples import QUERY_MODES_2510, VARIANTS_2606, write_2510, write_2606

CAPACITY, CHUNK = 40, 16

# Each writes a checkpoint: FILES[name](path, layers=2).
FILES: dict[str, Callable] = {
    **{f"2606 {v}": partial(write_2606, variant=v, positions=CAPACITY) for v in VARIANTS_2606},
    "2606 Q-MQA, biases, untied": partial(write_2606, variant="Q-MQA", positions=CAPACITY, bias=True, tied=False),
    **{f"2510 {m}": partial(write_2510, query_mode=m, positions=CAPACITY, bias=True) for m in QUERY_MODES_2510},
    "2510 identity, head_size 62": partial(
        write_2510, query_mode="identity", positions=CAPACITY, heads=12, head_size=62
    ),
}
# Our own format, with one layer, for what the published files do not have: the config's fields, the cache, and the
# options of the export that override the config.
OURS = {
    f"{positions} {sharing} x{kv_heads}, {name}": (dict(positions=positions, sharing=sharing, kv_heads=kv_heads), *how)
    for positions in POSITIONS
    for sharing, kv_heads in (("q-k=v", 1), ("qkv", 2))
    for name, how in {
        "fp32": ("fp32", {}),
        "window": ("fp32", {"window": 7}),
        "sinks": ("fp32", {"window": 5, "sinks": 3}),
        "int8": ("int8", {}),
        "int8, sinks": ("int8", {"window": 11, "sinks": 2}),
    }.items()
    if name != "window" or positions == "learned"
}


# Lowering to ExecuTorch takes seconds a layer: all with one, two are in test_engines.py. Of ours, those that differ in
# what the program holds; int8 caches and windows are more of the operator's arguments, whatever the positions.
LOWERED = [
    *FILES,
    *(name for name in OURS if name.endswith("fp32")),
    *("rotary-conjugate q-k=v x1, int8, sinks", "rotary-on-read qkv x2, int8, sinks"),
]


@dataclass(frozen=True)
class Variant:
    source: Path  # the checkpoint
    cache: str
    window: dict[str, int]
    expected: Expected

    def export(self, target: str) -> Path:
        output = self.source.with_name(target)
        export_package(target, str(self.source), output, weights="fp32", cache=self.cache, parity=False, **self.window)
        return output


def _made(name: str, folder: Path, layers: int) -> Variant:
    source = folder / "checkpoint"
    if name in FILES:
        cache, window = "fp32", {}
        FILES[name](source, layers=layers)
    else:
        fields, cache, window = OURS[name]
        write_checkpoint(source, replace(TINY, max_positions=CAPACITY, layers=layers, **fields))
    checkpoint = read_checkpoint(str(source))
    decoder = replace(checkpoint, config=replace(checkpoint.config, **window)).load()
    return Variant(source, cache, window, expect(decoder, CAPACITY, cache))


@pytest.fixture(scope="module", params=[*FILES, *OURS])
def exported(request, tmp_path_factory) -> tuple[Path, Expected]:
    """An ONNX package, and what it must compute."""
    variant = _made(request.param, tmp_path_factory.mktemp("variant"), layers=2 if request.param in FILES else 1)
    return variant.export("onnx"), variant.expected


def _check(package: Path, expected: Expected) -> None:
    with Model(package, threads=2) as model, Session(model, CAPACITY, prefill_chunk=CAPACITY) as session:
        walk_session(session, expected, CHUNK)


def test_native_session_matches_the_decoder(exported):
    _check(*exported)


def test_plain_onnxruntime_matches_the_decoder(exported):
    package, expected = exported
    session = StockSession(str(package), CAPACITY, threads=2)
    walk(lambda tokens, chunk: session.score(tokens, chunk, decode=0), session.rewind, expected, CHUNK)


@pytest.mark.parametrize("name", LOWERED)
def test_executorch_matches_the_decoder(name, tmp_path):
    needs("executorch")
    variant = _made(name, tmp_path, layers=1)
    _check(variant.export("executorch"), variant.expected)
