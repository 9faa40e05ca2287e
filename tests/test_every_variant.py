"""From a file as it was published to logits: every variant, in our runtime and in plain onnxruntime.

Each file is exported with fp32 weights and cache and must give the eager decoder's logits through prefill,
chunked prefill, single-token decode and after rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from conftest import TINY, write_checkpoint
from edge_qkv import Model, Session
from edge_qkv.checkpoints import read_checkpoint
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
# Our own format, for what the published files do not have.
OURS = {
    f"{positions} {sharing} x{kv_heads}": dict(positions=positions, sharing=sharing, kv_heads=kv_heads)
    for positions in ("rotary-conjugate", "rotary-on-read", "none")
    for sharing, kv_heads in (("q-k=v", 1), ("qkv", 2))
}


@dataclass
class Exported:
    expected: np.ndarray  # [CAPACITY, V], the eager decoder's
    ids: list[int]
    package: str


@pytest.fixture(scope="module", params=[*FILES, *OURS])
def exported(request, tmp_path_factory) -> Exported:
    folder = tmp_path_factory.mktemp("variant")
    source = folder / "checkpoint"
    if request.param in FILES:
        FILES[request.param](source)
    else:
        from dataclasses import replace

        write_checkpoint(source, replace(TINY, max_positions=CAPACITY, **OURS[request.param]))
    TARGETS["onnx"](str(source), folder / "package", weights="fp32", cache="fp32", parity=False)
    decoder = read_checkpoint(str(source)).load()
    ids = torch.randint(0, decoder.config.vocab_size, (CAPACITY,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits, _ = decoder(ids[None])
    assert logits.abs().max() > 1
    return Exported(logits[0].numpy(), ids.tolist(), str(folder / "package"))


def _check(score: Callable, rewind: Callable, e: Exported) -> None:
    """score(tokens, chunk) appends and returns logits [n, V]; rewind(n) forgets all but n tokens."""
    for length in LENGTHS:
        rewind(0)
        np.testing.assert_allclose(score(e.ids[:length], CAPACITY), e.expected[:length], atol=TOLERANCE)
        rewind(length // 2)
        rest = slice(length // 2, length)
        np.testing.assert_allclose(score(e.ids[rest], CHUNK), e.expected[rest], atol=TOLERANCE)
    rewind(0)
    score([(i + 1) % 90 for i in e.ids], CHUNK)  # other rows, which must leave no trace
    rewind(0)
    np.testing.assert_allclose(score(e.ids[:20], CHUNK), e.expected[:20], atol=TOLERANCE)
    np.testing.assert_allclose(score(e.ids[20:], 1), e.expected[20:], atol=TOLERANCE)


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
