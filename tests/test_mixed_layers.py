"""Models whose layers differ, as people run them, in contexts of many pages: what becomes of their rows.

That they compute what the decoder computes is in test_every_variant.py; here it must stay so after all that moves rows,
and memory must be what the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_windowed_layers import PAGE, most_bytes, whole_pages

from eager import Expected, expect
from edge_qkv import InputError, Model, Session, plan
from edge_qkv.attention import rotary_tables, rotate
from edge_qkv.config import ModelConfig
from edge_qkv.model import Decoder
from mixed_models import MIXED, WINDOW

CONTEXT, CHUNK, TOKENS = 2048, 16, 120
DEPTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 2 * WINDOW + CHUNK, 65, TOKENS - 4)
QUICK = (
    "gemma 4",
    "rows of an earlier layer",
    "mla",
)  # in each run; and to ExecuTorch, which takes seconds a layer, none


def _cases() -> list:
    cases = []
    for i, name in enumerate(MIXED):
        for target in ("onnx", "executorch"):
            for cache in ("fp32", "fp16", "int8"):
                quick = target == "onnx" and name in QUICK and cache == ("fp32", "int8")[i % 2]
                marks = [] if quick else [pytest.mark.slow]
                cases.append(pytest.param((target, cache, name), marks=marks, id=f"{target} {cache} {name}"))
    return cases


@dataclass(frozen=True)
class Made:
    config: ModelConfig
    decoder: Decoder
    package: Path
    cache: str
    expected: Expected

    def score(self, session: Session, count: int) -> None:
        begin = len(session.tokens)
        wanted = self.expected.logits[begin : begin + count]
        found = session.score(self.expected.ids[begin : begin + count])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=self.expected.tolerance)

    def keeps(self, length: int, to: int, margin: int) -> bool:
        """Whether a session of that length can go back without evaluating again."""
        windows = {tensor.window for tensor in self.config.cache_tensors(self.cache) if tensor.window}
        return to in (0, length) or all(max(0, to - w + 1) >= max(0, length - w - margin) for w in windows)


@pytest.fixture(scope="module", params=_cases())
def made(request, random_package) -> Made:
    target, cache, name = request.param
    config = replace(MIXED[name], max_positions=CONTEXT)
    decoder, package = random_package(target, config, cache, chunk=CHUNK)
    return Made(config, decoder, package, cache, expect(decoder, TOKENS, cache))


@pytest.fixture(scope="module")
def model(made, tmp_path_factory):
    with Model(made.package, threads=2, spill=tmp_path_factory.mktemp("spill")) as model:
        yield model


def _open(model: Model, **options) -> Session:
    return Session(model, **{"context": CONTEXT, "prefill_chunk": CHUNK, **options})


def test_rows_that_moved_are_the_decoders(made, model, tmp_path):
    """Snapshots, forks and spills at each depth, then on, back inside the margin, and back beyond it."""
    for depth in DEPTHS:
        with _open(model) as session:
            session.evaluate(made.expected.ids[:depth])
            session.save(tmp_path / "saved")
            with session.fork() as child, _open(model, margin=1) as restored:
                child.evaluate([9, 8, 7])  # into pages that both have
                child.rewind(depth)
                restored.evaluate(made.expected.ids[::-1][:50])
                restored.restore(tmp_path / "saved")
                model.trim("all")
                assert session.memory()["cache_committed"] == 0
                for each in (session, child, restored):
                    assert each.tokens == made.expected.ids[:depth]
                    made.score(each, 2)
                    each.rewind(depth - 2)
                    made.score(each, 3)
                    model.trim("all")
                    each.rewind(depth // 3)
                    made.score(each, 3)


@pytest.mark.parametrize("margin", [0, 1, 9])
def test_rewinds_evaluate_again_only_where_rows_are_gone(made, model, margin):
    of = margin or WINDOW
    for depth in DEPTHS:
        for to in sorted({0, 1, depth // 2, *(depth - of + d for d in (-2, -1, 0, 1, 2)), depth - 1}):
            if not 0 <= to < depth:
                continue
            with _open(model, margin=margin) as session:
                session.evaluate(made.expected.ids[:depth])
                assert session.rewind(to) == (0 if made.keeps(depth, to, of) else to)
                made.score(session, 3)


def test_the_plan_is_what_the_kernel_counts(made, model):
    ids = torch.randint(0, 260, (CONTEXT,), generator=torch.Generator().manual_seed(3)).tolist()
    kept = 2 * WINDOW + CHUNK
    with _open(model) as session:
        for start in range(0, CONTEXT, 8 * CHUNK):
            session.evaluate(ids[start : start + 8 * CHUNK])
            length, memory = len(session.tokens), session.memory()
            assert memory["cache_used"] == made.config.cache_bytes(length, made.cache)
            assert memory["cache_used"] <= memory["cache_committed"]
            assert memory["cache_committed"] <= most_bytes(made.config, made.cache, length, kept)
        counted = memory["cache_committed"]
    planned = plan(made.package, context=CONTEXT, prefill_chunk=CHUNK).cache
    tensors = made.config.cache_tensors(made.cache)
    spare = sum(t.kv_heads * (whole_pages(t.row_bytes * CHUNK) + 2 * PAGE) for t in tensors if t.window)
    assert counted <= planned <= counted + spare
    assert planned <= most_bytes(made.config, made.cache, CONTEXT, kept)


# ---- overflow ----

SMALL = 96  # a context that is soon full
POLICIES = {
    "window": dict(overflow="window", sinks=4, window=40),
    "window without sinks": dict(overflow="window", sinks=0, window=30),
    "shift": dict(overflow="shift", block=20),
}


def _drop(decoder: Decoder, caches, first: int, last: int, length: int) -> None:
    """Takes rows [first, last) out of the caches; rotated keys are turned back and to their new positions."""
    for spec, layer in zip(decoder.config.layers, caches, strict=True):
        cos, sin = rotary_tables(spec, CONTEXT) if spec.rotary else (None, None)
        for i, cache in enumerate(layer):
            rows = cache[:, :, last:length].clone()
            if spec.positions == "rotary-conjugate" and i == 0:
                turned = rows[..., spec.rotary_offset : spec.rotary_offset + spec.rotated]
                turned = rotate(turned, cos[last:length], -sin[last:length])
                turned = rotate(turned, cos[first : first + length - last], sin[first : first + length - last])
                rows[..., spec.rotary_offset : spec.rotary_offset + spec.rotated] = turned
            cache[:, :, first : first + length - last] = rows


@torch.no_grad()
def _expected(decoder: Decoder, tokens: list[int], policy: dict) -> tuple[np.ndarray, int]:
    """Logits [n, V] of the eager decoder under the policy, and how many tokens it dropped."""
    caches, length, dropped, logits = decoder.new_caches(SMALL), 0, 0, []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        missing = length + len(chunk) - SMALL
        if missing > 0:
            blocks = -(-missing // policy.get("block", 1)) * policy.get("block", 1)
            first, last = (policy["sinks"], length - policy["window"]) if "sinks" in policy else (0, blocks)
            _drop(decoder, caches, first, last, length)
            length -= last - first
            dropped += last - first
        logits.append(decoder(torch.tensor([chunk]), length, caches)[0][0])
        length += len(chunk)
    return torch.cat(logits).numpy(), dropped


NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MIXED]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_context_goes_on_like_the_decoder(random_package, name):
    """Whatever the margin: rows of windowed layers that a policy needs are there, for it keeps more than a window."""
    ids = torch.randint(0, 260, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    decoder, package = random_package("onnx", replace(MIXED[name], max_positions=CONTEXT))
    with Model(package, threads=2) as model:
        for policy in POLICIES.values():
            expected, dropped = _expected(decoder, ids, policy)
            for margin in (0, 1, SMALL):
                with _open(model, context=SMALL, margin=margin, **policy) as session:
                    found = session.score(ids)
                    assert session.dropped == dropped > SMALL
                # As in test_overflow.py: each drop rotates the rows once more.
                np.testing.assert_allclose(found, expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_refused_where_windows_would_see_the_sinks_out_of_place(random_package, name):
    config = replace(MIXED[name], max_positions=CONTEXT)
    _, package = random_package("onnx", config)
    options = dict(context=SMALL, overflow="window", sinks=4, window=WINDOW - 1)
    with Model(package) as model:
        if any(tensor.window for tensor in config.cache_tensors()):
            with pytest.raises(InputError, match=f"layers that see only the last {WINDOW}: .* at least {WINDOW}"):
                _open(model, **options)
        else:
            _open(model, **options).close()
        _open(model, **options | dict(window=WINDOW)).close()
