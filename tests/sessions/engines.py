"""The engines that sessions are tested on, each with one small model, and what it can do beside the common list."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY, changed
from eager import Expected
from edge_qkv import Model, Session
from edge_qkv.config import ModelConfig
from edge_qkv.model import Decoder
from mixed_models import MIXED

CAPACITY, CHUNK = TINY.max_positions, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)
LONG = changed(TINY, max_positions=4096)  # evaluated whole it takes a good part of a second
DEEP = changed(TINY, layers=8, head_dim=64, max_positions=8192)  # a cache of 16 MB
WIDE = changed(TINY, layers=1, width=512, heads=8, head_dim=64, mlp_width=4096, max_positions=1024)  # 7M weights
INT4 = {"onnx": "int4", "executorch": "8da4w"}

CAN = {
    "threads": "their number can be chosen",
    "memory": "budgets, trims to files, packed weights, a watch on pressure; the cache is committed row by row",
    "overflow": "rows can be dropped and moved",
    "windows": "the model has layers with a window, whose rows are given back",
    "stop": "a call of the engine can be stopped inside",
    "archive": "snapshots are NumPy archives",
}


@dataclass(frozen=True)
class Engine:
    """What runs a package, and the package. options: of its `Model`. of_largest: the tolerance of its logits as a
    share of the largest, where it rounds more than the rows; 0: that of `eager.expect`."""

    target: str
    can: frozenset[str]
    config: ModelConfig = TINY
    cache: str = "fp32"
    weights: str = "fp32"
    export: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    of_largest: float = 0

    def __post_init__(self) -> None:
        assert self.can <= set(CAN)


_PLAIN = changed(TINY, positions="rotary-on-read")  # llama.cpp has no rotation that is undone on the output
_SEPARATE = changed(_PLAIN, sharing="qkv", kv_heads=2)
_LEARNED = changed(TINY, sharing="qkv", kv_heads=4, positions="learned")
_ONE_ROW = changed(TINY, positions="none")
_MIXED = MIXED["local and global"]

_NATIVE = frozenset(("threads", "memory", "overflow", "stop"))
_ONNX = Engine("onnx", _NATIVE, options={"threads": 2})
# A call takes CHUNK tokens at most.
_EXECUTORCH = Engine("executorch", _NATIVE, export={"prefill_chunk": CHUNK}, options={"threads": 2})
# All of the program is fp16: weights, activations and the sums that an operation gives. A row of another token, or one
# that should be hidden, makes errors of the order of 1 in logits of the order of 10.
_COREML = Engine(
    "coreml",
    frozenset(("archive",)),
    cache="fp16",
    weights="fp16",
    export={"prefill_chunk": CHUNK},
    of_largest=10 * 2**-11,
)
_LLAMA = Engine("gguf", frozenset(("threads", "stop", "archive")), _PLAIN, weights="f32", options={"threads": 1})
_LLAMA_FP16 = replace(_LLAMA, cache="fp16", of_largest=4 * 2**-11)  # flash attention rounds queries and sums as well

ENGINES = {
    "onnx": _ONNX,
    "onnx, windows": replace(_ONNX, can=_NATIVE | {"windows"}, config=_MIXED),
    "executorch": _EXECUTORCH,
    "executorch, windows": replace(_EXECUTORCH, can=_NATIVE | {"windows"}, config=_MIXED, cache="fp16"),
    "coreml": _COREML,
    "llama.cpp": _LLAMA,
    # What Python hosts, on the smallest engine of that kind: the eager decoder and its caches.
    "eager": replace(_LLAMA, can=frozenset(("archive",)), options={}),
}
# Caches of other types and layouts.
VARIANTS = {
    "onnx, fp16": replace(_ONNX, cache="fp16"),
    "onnx, int8": replace(_ONNX, cache="int8"),
    "onnx, separate V, fp16": replace(_ONNX, config=_SEPARATE, cache="fp16"),
    "onnx, separate V, int8": replace(_ONNX, config=_LEARNED, cache="int8"),
    "executorch, fp16": replace(_EXECUTORCH, cache="fp16"),
    "executorch, separate V, int8": replace(_EXECUTORCH, config=_SEPARATE, cache="int8"),
    "llama.cpp, fp16": _LLAMA_FP16,
    "llama.cpp, one row": replace(_LLAMA, config=_ONE_ROW),
    "llama.cpp, one row, fp16": replace(_LLAMA_FP16, config=_ONE_ROW),
    "llama.cpp, separate V": replace(_LLAMA, config=_SEPARATE),
    "llama.cpp, separate V, fp16": replace(_LLAMA_FP16, config=_SEPARATE),
}
KNOWN = ENGINES | VARIANTS


def on(*names):
    """A test for these engines only."""
    return pytest.mark.parametrize("engine", names, indirect=True)


def having(*abilities: str, lacking: tuple[str, ...] = ()):
    """A test for the engines that have these abilities, and lack others."""
    assert {*abilities, *lacking} <= set(CAN)
    return on(*(n for n, e in ENGINES.items() if set(abilities) <= e.can and not e.can & set(lacking)))


# An export to ExecuTorch takes ten seconds; that cache is in "executorch, windows" as well.
with_variants = on(*(pytest.param(n, marks=pytest.mark.slow) if n == "executorch, fp16" else n for n in KNOWN))


@dataclass(frozen=True)
class Subject:
    """An engine under test. expected: CAPACITY tokens and the eager decoder's logits after each."""

    name: str
    engine: Engine
    decoder: Decoder
    package: Path
    expected: Expected
    closed: list[str]  # the models of the hosted decoder that were closed

    @property
    def can(self) -> frozenset[str]:
        return self.engine.can

    @property
    def ids(self) -> list[int]:
        return self.expected.ids

    def model(self, **options) -> Model:
        return Model(self.package, **self.engine.options | options)

    def check(self, logits: np.ndarray, expected: np.ndarray) -> None:
        """Two computations of the same logits, in other chunks or by the decoder."""
        np.testing.assert_allclose(logits, expected, atol=self.expected.tolerance)

    def check_rows(self, logits: np.ndarray, part: slice) -> None:
        """The logits after a part of the tokens are the decoder's."""
        self.check(logits, self.expected.logits[part])


def conversation(model: Model, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), V] of a session of its own: a prompt in chunks, then 8 tokens one by one."""
    with Session(model, len(ids), CHUNK) as session:
        return np.concatenate([session.score(ids[:-8]), *(session.score([token]) for token in ids[-8:])])
