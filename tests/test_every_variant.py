"""From a file as it was published to logits: every variant, with both engines and in plain onnxruntime.

Each file is exported with fp32 weights and must give the logits of the eager decoder, with a cache of the same type,
through prefill, chunked prefill, single-token decode and after rewind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from conftest import TINY, changed, needs, write_checkpoint
from eager import Expected, expect, walk, walk_session
from edge_qkv import Model, Session
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.config import CACHE_BYTES, POSITIONS, ModelConfig
from edge_qkv.export import export_package
from edge_qkv.export.onnx.stock import StockSession
from mixed_models import MIXED
from samples import QUERY_MODES_2510, VARIANTS_2606, write_2510, write_2606

CAPACITY, CHUNK = 40, 16


@dataclass(frozen=True)
class Variant:
    write: Callable  # write(path, layers=...) writes a checkpoint
    cache: str = "fp32"
    window: dict[str, int] = field(default_factory=dict)  # options of the export that override the config
    lowered: bool = False  # to ExecuTorch in each run of the tests: that takes seconds a layer
    slow: bool = False


def _ours(config: ModelConfig) -> Callable:
    return lambda path, layers: write_checkpoint(path, changed(config, layers=layers))


def _published() -> dict[str, Variant]:
    of = dict(positions=CAPACITY)
    found = {f"2606 {v}": Variant(partial(write_2606, variant=v, **of)) for v in VARIANTS_2606}
    found["2606 Q-MQA, biases, untied"] = Variant(
        partial(write_2606, variant="Q-MQA", bias=True, tied=False, **of), lowered=True
    )
    found |= {
        f"2510 {mode}": Variant(partial(write_2510, query_mode=mode, bias=True, **of), lowered=mode == "residual_gelu")
        for mode in QUERY_MODES_2510
    }
    shape = dict(heads=12, head_size=62)
    return found | {"2510 identity, head_size 62": Variant(partial(write_2510, query_mode="identity", **shape, **of))}


def _fields() -> dict[str, Variant]:
    """Our own format, for what the published files do not have: each two of positions, rows, caches and windows."""
    rows = {"one row": ("q-k=v", 1), "two rows": ("q-k=v", 2), "keys and values": ("qkv", 2)}
    windows = {"all": {}, "window": {"window": 7}, "sinks": {"window": 5, "sinks": 3}}
    found = {}
    for i, positions in enumerate(POSITIONS):
        for j, (name, (sharing, kv_heads)) in enumerate(rows.items()):
            # Two Latin squares, one orthogonal to the other: so each pair of cache and window comes, too.
            cache, seen = [*CACHE_BYTES][(i + j) % 3], [*windows][(i + 2 * j) % 3]
            config = changed(TINY, max_positions=CAPACITY, positions=positions, sharing=sharing, kv_heads=kv_heads)
            lowered = (positions, name) in (("rotary-conjugate", "one row"), ("rotary-on-read", "keys and values"))
            found[f"{positions}, {name}, {cache}, {seen}"] = Variant(_ours(config), cache, windows[seen], lowered)
    return found


def _mixed() -> dict[str, Variant]:
    """Layers that differ: each model with each type of cache, one of the rounded ones a run."""
    lowered = (("rows of an earlier layer", "fp16"), ("gemma 4", "int8"))
    return {
        f"{name}, {cache}": Variant(
            lambda path, layers, config=config: write_checkpoint(path, config),
            cache,
            lowered=(name, cache) in lowered,
            slow=cache == ("fp16", "int8")[i % 2],
        )
        for i, (name, config) in enumerate(MIXED.items())
        for cache in CACHE_BYTES
    }


VARIANTS = _published() | _fields() | _mixed()


@dataclass(frozen=True)
class Made:
    variant: Variant
    source: Path  # the checkpoint
    expected: Expected

    def export(self, target: str) -> Path:
        output, options = self.source.with_name(target), self.variant.window
        cache = self.variant.cache
        export_package(target, str(self.source), output, weights="fp32", cache=cache, parity=False, **options)
        return output


def _made(name: str, folder: Path, layers: int) -> Made:
    source, variant = folder / "checkpoint", VARIANTS[name]
    variant.write(source, layers=layers)
    checkpoint = read_checkpoint(str(source))
    config = checkpoint.config.with_layers(**variant.window)
    return Made(variant, source, expect(dataclasses.replace(checkpoint, config=config).load(), CAPACITY, variant.cache))


def _marked(slow: Callable[[Variant], bool]) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] * slow(variant)) for name, variant in VARIANTS.items()]


@pytest.fixture(scope="module", params=_marked(lambda variant: variant.slow))
def exported(request, tmp_path_factory) -> tuple[Path, Expected]:
    """An ONNX package, and what it must compute."""
    made = _made(request.param, tmp_path_factory.mktemp("variant"), layers=2)
    return made.export("onnx"), made.expected


def _check(package: Path, expected: Expected) -> None:
    with Model(package, threads=2) as model, Session(model, CAPACITY, prefill_chunk=CAPACITY) as session:
        walk_session(session, expected, CHUNK)


def test_native_session_matches_the_decoder(exported):
    _check(*exported)


def test_plain_onnxruntime_matches_the_decoder(exported):
    package, expected = exported
    session = StockSession(str(package), CAPACITY, threads=2)
    walk(lambda tokens, chunk: session.score(tokens, chunk, decode=0), session.rewind, expected, CHUNK)


@pytest.mark.parametrize("name", _marked(lambda variant: not variant.lowered))
def test_executorch_matches_the_decoder(name, tmp_path):
    needs("executorch")
    made = _made(name, tmp_path, layers=1)
    _check(made.export("executorch"), made.expected)
