"""From a file as it was published to logits: every variant, in our runtime and in plain onnxruntime.

Each file is exported with fp32 weights and must give the logits of the eager decoder, with a cache of the same type,
through prefill, chunked prefill, single-token decode and after rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from conftest import TINY, write_checkpoint
from edge_qkv import Model, Session
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.config import POSITIONS
from edge_qkv.export import TARGETS
from edge_qkv.export.onnx_stock import StockSession
from samples import QUERY_MODES_2510, VARIANTS_2606, write_2510, write_2606

CAPACITY, CHUNK = 40, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)
# fp32 on both sides, sums of at most ~100 products in another order, logits of order 10.
TOLERANCE = 1e-4

FILES: dict[str, Callable] = {
    **{f"2606 {v}": lambda path, v=v: write_2606(path, v, positions=CAPACITY) for v in VARIANTS_2606},
    "2606 Q-MQA, biases, untied": lambda path: write_2606(path, "Q-MQA", positions=CAPACITY, bias=True, tied=False),
    **{f"2510 {m}": lambda path, m=m: write_2510(path, m, positions=CAPACITY, bias=True) for m in QUERY_MODES_2510},
    "2510 identity, head_size 62": lambda path: write_2510(
        path, "identity", positions=CAPACITY, heads=12, head_size=62, layers=1
    ),
}
# Our own format, for what the published files do not have: the config's fields, the cache, and the options of the
# export that override the config.
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


@dataclass
class Exported:
    expected: np.ndarray  # [CAPACITY, V], the eager decoder's
    ids: list[int]
    package: str
    tolerance: float


@pytest.fixture(scope="module", params=[*FILES, *OURS])
def exported(request, tmp_path_factory) -> Exported:
    folder = tmp_path_factory.mktemp("variant")
    source = folder / "checkpoint"
    if request.param in FILES:
        cache, window = "fp32", {}
        FILES[request.param](source)
    else:
        fields, cache, window = OURS[request.param]
        write_checkpoint(source, replace(TINY, max_positions=CAPACITY, **fields))
    TARGETS["onnx"](str(source), folder / "package", weights="fp32", cache=cache, parity=False, **window)
    checkpoint = read_checkpoint(str(source))
    decoder = replace(checkpoint, config=replace(checkpoint.config, **window)).load()
    ids = torch.randint(0, decoder.config.vocab_size, (CAPACITY,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits, tolerance = decoder(ids[None])[0], TOLERANCE
        if cache == "int8":
            unrounded, logits = logits, decoder(ids[None], 0, decoder.new_caches(CAPACITY, torch.int8))[0]
            # A value in the middle of two codes may be rounded to either: one of many errors of that size.
            tolerance = (logits - unrounded).abs().max().item() / 3
            assert TOLERANCE < tolerance < 0.02 * logits.abs().max()
    assert logits.abs().max() > 1
    return Exported(logits[0].numpy(), ids.tolist(), str(folder / "package"), tolerance)


def _check(score: Callable, rewind: Callable, e: Exported) -> None:
    """score(tokens, chunk) appends and returns logits [n, V]; rewind(n) forgets all but n tokens."""
    same = partial(np.testing.assert_allclose, rtol=1e-7, atol=e.tolerance)
    for length in LENGTHS:
        rewind(0)
        same(score(e.ids[:length], CAPACITY), e.expected[:length])
        rewind(length // 2)
        rest = slice(length // 2, length)
        same(score(e.ids[rest], CHUNK), e.expected[rest])
    rewind(0)
    score([(i + 1) % 90 for i in e.ids], CHUNK)  # other rows, which must leave no trace
    rewind(0)
    same(score(e.ids[:20], CHUNK), e.expected[:20])
    same(score(e.ids[20:], 1), e.expected[20:])


def test_native_session_matches_the_decoder(exported):
    with (
        Model(exported.package, threads=2) as model,
        Session(model, context=CAPACITY, prefill_chunk=CAPACITY) as session,
    ):

        def score(tokens, chunk):
            return np.concatenate([session.score(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])

        _check(score, session.rewind, exported)


def test_plain_onnxruntime_matches_the_decoder(exported):
    session = StockSession(exported.package, CAPACITY, threads=2)
    _check(lambda tokens, chunk: session.score(tokens, chunk, decode=0), session.rewind, exported)
