"""Layers with a window beside layers without: what the kernel counts of their caches, and what they compute.

Five local layers to a global one, of other heads and rotary bases. The quick form has a window of 48 in a context of
1,024; the slow one 12 layers with a window of 512, of which 32,768 tokens are evaluated.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eager import Expected, expect
from edge_qkv import InputError, Model, Session, plan
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.layer import LayerSpec
from edge_qkv.model import Decoder

PAGE = mmap.PAGESIZE
QUICK, PATTERN = ("local",) * 5 + ("global",), (("local",) * 5 + ("global",)) * 2


def five_to_one(window: int, context: int, pattern: tuple[str, ...], sharing: str = "q-k=v") -> ModelConfig:
    local = LayerSpec(
        heads=2,
        head_dim=64,
        kv_heads=1,
        mlp_width=128,
        sharing=sharing,
        window=window,
        positions="rotary-conjugate",
        mlp="swiglu",
    )
    whole = replace(local, window=0, head_dim=128, rotary_base=1e6)
    kinds = {"local": local, "global": whole}
    return ModelConfig(kinds=kinds, pattern=pattern, vocab_size=260, max_positions=context, width=128, norm="rmsnorm")


@dataclass(frozen=True)
class Made:
    """A package, what it must compute, and the sizes that its rows are kept by."""

    decoder: Decoder
    package: Path
    cache: str
    window: int
    chunk: int
    context: int
    expected: Expected  # of its first tokens
    ids: list[int]  # as many as the context holds

    @property
    def margin(self) -> int:
        return self.window  # the default

    @property
    def depths(self) -> list[int]:
        """Lengths around all that changes: windows, margins, chunks, pages."""
        w, rows_of_page = self.window, PAGE // (64 * CACHE_BYTES[self.cache][0])
        borders = (w, 2 * w, 2 * w + self.chunk, 3 * w, 4 * w, rows_of_page, 4 * rows_of_page)
        count = len(self.expected.ids)
        return sorted({d for border in borders for d in (border - 1, border, border + 1) if 1 < d < count - 8})

    def open(self, model: Model, **options) -> Session:
        return Session(model, **{"context": self.context, "prefill_chunk": self.chunk, **options})

    def score(self, session: Session, count: int) -> None:
        """Evaluates the next tokens and compares what follows each."""
        begin = len(session.tokens)
        found = session.score(self.expected.ids[begin : begin + count])
        wanted = self.expected.logits[begin : begin + count]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=self.expected.tolerance)

    def keeps(self, length: int, to: int, margin: int) -> bool:
        """Whether a session of that length can go back without evaluating again."""
        first_live = max(0, length - self.window - margin)
        return to == 0 or to == length or max(0, to - self.window + 1) >= first_live


def _made(random_package, target, cache, config, chunk, count) -> Made:
    spec = config.kinds["local"]
    decoder, package = random_package(target, config, cache, chunk=chunk)
    context = config.max_positions
    ids = torch.randint(0, 260, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = expect(decoder, count, cache)
    ids[:count] = expected.ids
    return Made(decoder, package, cache, spec.window, chunk, context, expected, ids)


SLOW = pytest.mark.slow
QUICK_CASES = [
    ("onnx", "fp32", "q-k=v", QUICK),
    ("onnx", "int8", "qkv", ("local", "local", "global")),
    ("executorch", "fp16", "q-k=v", ("local", "global")),
    pytest.param(("onnx", "fp16", "qkv", QUICK), marks=SLOW),
    pytest.param(("executorch", "fp32", "q-k=v", QUICK), marks=SLOW),
    pytest.param(("executorch", "int8", "qkv", QUICK), marks=SLOW),
]


def _name(case: tuple) -> str:
    target, cache, sharing, pattern = case
    return f"{target} {cache} {sharing} x{len(pattern)}"


@pytest.fixture(scope="module", params=QUICK_CASES, ids=_name)
def made(request, random_package) -> Made:
    target, cache, sharing, pattern = request.param
    config = five_to_one(48, 1024, pattern, sharing)
    return _made(random_package, target, cache, config, chunk=16, count=320)


@pytest.fixture(scope="module")
def model(made, tmp_path_factory):
    with Model(made.package, threads=2, spill=tmp_path_factory.mktemp("spill")) as model:
        yield model


# ---- what the kernel counts ----


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def most_bytes(config: ModelConfig, cache: str, length: int, kept: int) -> int:
    """All rows of global layers, and `kept` rows of local ones, which begin and end anywhere in a page."""
    total = 0
    for tensor in config.cache_tensors(cache):
        slab = whole_pages(tensor.row_bytes * length)
        if tensor.window:
            slab = min(slab, whole_pages(tensor.row_bytes * kept) + PAGE)
        total += tensor.kv_heads * slab
    return total


def check_memory(made: Made, session: Session, margin: int | None = None) -> int:
    """Returns what the kernel counts, after it is compared with the rows that may be there."""
    config, length = session.model.config, len(session.tokens)
    margin = made.margin if margin is None else margin
    memory = session.memory()
    assert memory["cache_used"] == config.cache_bytes(length, made.cache, margin)
    kept = made.window + margin + made.chunk
    assert memory["cache_committed"] <= most_bytes(config, made.cache, length, kept)
    return memory["cache_committed"]


def check_plan(made: Made, config: ModelConfig, counted: int) -> None:
    """The plan of a full context holds what was counted and, beyond it, a chunk and two pages a local slab at most."""
    planned = plan(made.package, context=made.context, prefill_chunk=made.chunk).cache
    local = [tensor for tensor in config.cache_tensors(made.cache) if tensor.window]
    spare = sum(tensor.kv_heads * (whole_pages(tensor.row_bytes * made.chunk) + 2 * PAGE) for tensor in local)
    assert counted <= planned <= counted + spare
    rows = made.window + made.margin + made.chunk
    assert planned <= most_bytes(config, made.cache, made.context, rows)
    assert planned < most_bytes(config, made.cache, made.context, made.context)


def check_counts(made: Made, model: Model, folder: Path, every: int = 1) -> None:
    """Through a full context and all that moves rows."""
    config, chunk = model.config, made.chunk
    with made.open(model) as session:
        for start in range(0, made.context, chunk):
            session.evaluate(made.ids[start : start + chunk])
            if start // chunk % every == 0:
                check_memory(made, session)
        counted = check_memory(made, session)
        assert counted >= config.cache_bytes(made.context, made.cache)
        check_plan(made, config, counted)

        file = folder / "saved"
        session.save(file)
        # The file has the live rows alone, too: beyond them the tokens, logits, and what fills up its pages.
        slabs = sum(tensor.kv_heads for tensor in config.cache_tensors(made.cache))
        beside = 4 * (made.context + config.vocab_size) + (3 * slabs + 2) * PAGE
        assert file.stat().st_size <= config.cache_bytes(made.context, made.cache) + beside
        with made.open(model) as other:
            other.evaluate(made.ids[:200])
            other.restore(file)
            check_memory(made, other)
            other.rewind(made.context - 2)
            other.evaluate(made.ids[-2:])
            check_memory(made, other)
            np.testing.assert_allclose(other.logits(), session.logits(), rtol=0, atol=made.expected.tolerance)
        with made.open(model, margin=chunk) as other:  # fewer of the rows in the file
            other.restore(file)
            check_memory(made, other, margin=chunk)

        with session.fork() as child:
            child.rewind(made.context - 3)
            child.evaluate([5, 6, 7])
            for either in (session, child):
                check_memory(made, either)

        model.trim("all")
        assert session.memory()["cache_committed"] == 0
        assert session.rewind(made.context - chunk) == 0
        session.evaluate(made.ids[-chunk:])
        check_memory(made, session)


def test_a_full_context_takes_the_windows_and_the_global_rows(made, model, tmp_path):
    check_counts(made, model, tmp_path)


@pytest.mark.parametrize("margin", [1, 5, 500, 10**6])
def test_any_margin_is_kept_and_no_more(made, model, margin):
    with made.open(model, margin=margin) as session:
        for start in range(0, 800, made.chunk):
            session.evaluate(made.ids[start : start + made.chunk])
            check_memory(made, session, min(margin, made.context))
        session.rewind(700)
        session.fill(made.context - 1, 3)
        check_memory(made, session, min(margin, made.context))


def test_a_rewind_beyond_the_margin_takes_no_more_than_an_evaluation(made, model):
    with made.open(model) as session:
        session.evaluate(made.ids[:900])
        assert session.rewind(500) == 500
        check_memory(made, session)
        assert session.rewind(0) == 0
        assert session.memory()["cache_committed"] == session.memory()["cache_used"] == 0


# ---- what is computed ----


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 300])
def test_every_depth_is_the_decoders(made, model, chunk):
    with made.open(model, prefill_chunk=chunk) as session:
        made.score(session, len(made.expected.ids))


def test_single_tokens_at_every_border_are_the_decoders(made, model):
    for depth in made.depths:
        with made.open(model, margin=1) as session:
            session.evaluate(made.expected.ids[:depth])
            for _ in range(3):
                made.score(session, 1)


def _targets(made: Made, depth: int, margin: int) -> list[int]:
    """Lengths to go back to: on both sides of the last one that needs no evaluation, and far from it."""
    border = max(0, depth - margin - 1)
    return sorted({to for to in (0, 1, depth // 2, border - 1, border, border + 1, depth - 1) if 0 <= to < depth})


@pytest.mark.parametrize("margin", [0, 1, 20])
def test_rewinds_inside_and_beyond_the_margin_are_the_decoders(made, model, margin):
    beyond = 0
    for depth in made.depths[:: 1 if margin == 0 else 3]:
        for to in _targets(made, depth, margin or made.margin):
            with made.open(model, margin=margin) as session:
                session.evaluate(made.expected.ids[:depth])
                told: list[int] = []
                again = session.rewind(to, lambda done, _, told=told: told.append(done))
                assert again == (0 if made.keeps(depth, to, margin or made.margin) else to)
                assert told == [min(done, to) for done in range(made.chunk, again + made.chunk, made.chunk)]
                assert session.tokens == made.expected.ids[:to]
                made.score(session, 5)
                beyond += again > 0
    assert beyond > 5


def test_a_prompt_in_common_is_reused_where_its_rows_are_there(made, model):
    for depth in made.depths[::3]:
        for to in _targets(made, depth, made.margin):
            with made.open(model) as session:
                session.evaluate(made.expected.ids[:depth])
                prompt = [*made.expected.ids[:to], (made.expected.ids[to] + 1) % 260]
                assert session.reuse(prompt) == (to if made.keeps(depth, to, made.margin) else 0)
                held = len(session.tokens)
                assert held in (0, to)
                made.score(session, to + 3 - held)


def _moves(made: Made, model: Model, folder: Path) -> dict[str, Callable[[Session], Session]]:
    """What may happen to a session's rows: each gives the session to go on with."""

    def fork(session: Session) -> Session:
        return session.fork()

    def parent_of_fork(session: Session) -> Session:
        with session.fork() as child:
            child.evaluate([1, 2, 3])  # into pages that both have
            child.rewind(len(session.tokens) - 2)
            child.evaluate([4, 5, 6, 7])
        return session

    def spill(session: Session) -> Session:
        model.trim("all")
        return session

    def twice(session: Session) -> Session:
        model.trim("all")
        session.rewind(len(session.tokens) - 1)
        session.evaluate(made.expected.ids[len(session.tokens) :][:1])
        model.trim("all")
        return session

    def restore(session: Session, **options) -> Session:
        session.save(folder / "saved")
        other = made.open(model, **options)
        other.evaluate(made.ids[::-1][:100])
        other.restore(folder / "saved")
        return other

    return {
        "fork": fork,
        "parent of a fork": parent_of_fork,
        "spill": spill,
        "spill twice": twice,
        "restore": restore,
        "restore to a smaller margin": lambda session: restore(session, margin=1),
        "restore to a larger margin": lambda session: restore(session, margin=400),
        "restore to another context": lambda session: restore(session, context=made.context - 77),
    }


MOVES = tuple(_moves(None, None, Path()))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MOVES)
def test_rows_that_moved_are_the_decoders(made, model, tmp_path, name):
    """At every border: they go on, back inside the margin and on again, and back beyond it."""
    move = _moves(made, model, tmp_path)[name]
    for depth in made.depths[::2]:
        with made.open(model) as session:
            session.evaluate(made.expected.ids[:depth])
            with move(session) as moved:
                assert moved.tokens == made.expected.ids[:depth]
                made.score(moved, 2)
                moved.rewind(max(0, depth - 3))
                made.score(moved, 4)
                moved.rewind(depth // 3)
                made.score(moved, 3)


def test_a_policy_that_the_layers_do_not_allow_is_refused_at_once(made, model):
    refused = dict(overflow="window", sinks=4, window=made.window - 1)
    words = rf"see only the last {made.window}: .* window of at least {made.window}, or no sinks"
    with pytest.raises(InputError, match=words):
        made.open(model, **refused)
    for allowed in (
        dict(overflow="window", sinks=4, window=made.window),
        dict(overflow="window", sinks=0, window=made.window // 2),
        dict(overflow="shift", block=100),
    ):
        with made.open(model, context=160, **allowed) as session:
            session.evaluate(made.ids[:600])
            assert session.dropped + len(session.tokens) == 600
            check_memory_of_any(made, session)


def check_memory_of_any(made: Made, session: Session) -> None:
    """After drops: rows that were sinks may be kept besides."""
    kept = made.window + made.margin + made.chunk
    most = most_bytes(session.model.config, made.cache, len(session.tokens), kept)
    assert 0 < session.memory()["cache_committed"] <= most


# ---- a long context ----


def rows_of_snapshot(file: Path, decoder: Decoder, capacity: int, dtype: torch.dtype) -> list:
    """The caches that a snapshot holds, as `Decoder.new_caches` makes them; see runtime/core/snapshot.md."""
    data = file.read_bytes()
    alignment, tokens = struct.unpack_from("<QQ", data, 24)
    (count,), (at,) = struct.unpack_from("<Q", data, 56), struct.unpack_from("<Q", data, 144)
    caches, kind = decoder.new_caches(capacity, dtype), {torch.float16: np.float16, torch.float32: np.float32}[dtype]
    for i in range(count):
        layer, part, _, heads, dim, _, sinks, live = struct.unpack_from("<4I4Q", data, 256 + 48 * i)
        row = dim * np.dtype(kind).itemsize
        begin, end = -(-sinks * row // alignment) * alignment, live * row // alignment * alignment
        gap = max(0, end - begin) if live else 0
        cache = caches[layer][1 if part == 2 else 0]
        for head in range(heads):
            first = live * row - gap
            rows = np.frombuffer(data, kind, (tokens - live) * dim, at + first)
            cache[0, head, live:tokens] = torch.from_numpy(rows.copy()).unflatten(0, (-1, dim))
            at += -(-(tokens * row - gap) // alignment) * alignment
    assert at >= len(data) > at - alignment
    return caches


def check_a_long_context(made: Made, model: Model, folder: Path) -> None:
    """The logits at the end of a context against the decoder over the rows that the session has there."""
    last = 6
    with made.open(model) as session:
        session.evaluate(made.ids[:-last])
        session.save(folder / "deep")
        dtype = {"fp16": torch.float16, "fp32": torch.float32}[made.cache]
        caches = rows_of_snapshot(folder / "deep", made.decoder, made.context, dtype)
        with torch.no_grad():
            expected = made.decoder(torch.tensor([made.ids[-last:]]), made.context - last, caches)[0][0].numpy()
        found = session.score(made.ids[-last:])
        np.testing.assert_allclose(found, expected, rtol=0, atol=made.expected.tolerance)
        assert session.rewind(made.context - last) == 0
        singly = np.concatenate([session.score([token]) for token in made.ids[-last:]])
        np.testing.assert_allclose(singly, expected, rtol=0, atol=made.expected.tolerance)


def test_the_end_of_a_context_is_the_decoders(made, model, tmp_path):
    if made.cache != "int8":  # whose rows the decoder holds otherwise
        check_a_long_context(made, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cache", "sharing"),
    [
        ("onnx", "fp16", "q-k=v"),
        ("onnx", "fp32", "q-k=v"),
        ("onnx", "fp16", "qkv"),
        ("onnx", "int8", "q-k=v"),
        ("executorch", "fp16", "q-k=v"),
        ("executorch", "fp32", "q-k=v"),
    ],
)
def test_12_layers_in_a_context_of_32768(random_package, tmp_path, target, cache, sharing):
    config = five_to_one(512, 32768, PATTERN, sharing)
    made = _made(random_package, target, cache, config, chunk=512, count=2200)
    with Model(made.package, threads=2, spill=tmp_path) as model:
        check_counts(made, model, tmp_path, every=8)
        if cache != "int8":
            check_a_long_context(made, model, tmp_path)
        with made.open(model) as session:
            made.score(session, len(made.expected.ids))
        for depth in made.depths:
            with made.open(model) as session:
                session.evaluate(made.expected.ids[:depth])
                made.score(session, 2)
                border = max(0, depth - made.margin)  # two tokens more were evaluated
                for to in (border + 2, border):
                    again = session.rewind(to)
                    assert again == (0 if made.keeps(len(session.tokens), to, made.margin) else to) or to == border
                    made.score(session, 2)
