"""Tokens and text that a session writes: how they are chosen, where they end, and how the conversation goes on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_qkv import InputError, Sampling, Session
from edge_qkv.tokenizer import stream_text

from .engines import CAPACITY, CHUNK, on

GREEDY = Sampling(temperature=0)
# The sampler is the native library's: it is given a session's logits there, and those of engines that Python hosts.
both_samplers = on("onnx", "eager")


def test_greedy_tokens_are_the_decoders(engine, session, ids):
    written = list(session.generate_tokens(ids[:20], 30, GREEDY))
    with torch.no_grad():
        logits = engine.decoder(torch.tensor([ids[:20] + written]))[0][0, 19:-1].numpy()
    chosen = logits[np.arange(len(written)), written]
    # The likeliest, or one as likely.
    assert written and (logits.max(-1) - chosen).max() <= 2 * engine.expected.tolerance


def test_same_seed_same_text_other_seed_other_text(model):
    def text(seed):
        with Session(model, context=CAPACITY) as session:
            options = Sampling(temperature=1.5, top_k=0, top_p=1, seed=seed)
            return tuple(session.generate_tokens([1, 2], 30, options))

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(3)}) > 1


def test_conversation_goes_on_where_generation_stopped(session, fresh, ids):
    """The last token that was yielded is part of what follows."""
    whole = list(session.generate_tokens(ids[:5], 12, GREEDY))
    halves = list(fresh.generate_tokens(ids[:5], 6, GREEDY)) + list(fresh.generate_tokens([], 6, GREEDY))
    assert (halves, fresh.tokens) == (whole, session.tokens)


def test_streaming_text_and_stop_string(session, fresh, bytes_tokenizer):
    options = Sampling(temperature=1.2, top_k=0, top_p=1, seed=4)
    whole = "".join(session.generate("abc", 40, options))
    assert whole == bytes_tokenizer.decode(session.tokens[3:]).rstrip("\N{REPLACEMENT CHARACTER}")
    assert len(whole) > 4
    stop = whole[2:4]
    assert "".join(fresh.generate("abc", 40, options, stop=stop)) == whole[: whole.index(stop)]


@both_samplers
def test_a_conversation_ends_before_the_stop_string_that_ended_a_text(model, bytes_tokenizer, tmp_path):
    """Wherever that begins, as it goes on at once and as it is saved."""
    sampling = Sampling(temperature=1.2, top_k=0, top_p=1.0, seed=4)
    with Session(model, context=CAPACITY) as session:
        whole = "".join(session.generate("abc", 60, sampling))
        pieces = stream_text(bytes_tokenizer, session.tokens[:3], session.generated)
        boundaries = {0, *itertools.accumulate(map(len, pieces))}  # bytes that are no text come out several at once
    assert len(whole) > 12 and len(boundaries) > 8
    for begin in range(1, 12):
        stop = whole[begin : begin + 2]
        shown = whole[: whole.index(stop)]
        with Session(model, context=CAPACITY) as session, Session(model, context=CAPACITY) as fresh:
            assert "".join(session.generate("abc", 60, sampling, stop)) == shown
            held = "".join(stream_text(bytes_tokenizer, session.tokens[:3], session.generated))
            assert shown.startswith(held) and len(held) == max(end for end in boundaries if end <= len(shown))
            tokens = session.tokens
            assert tokens == bytes_tokenizer.encode("abc").ids + session.generated
            session.save(tmp_path / "saved")
            fresh.evaluate(tokens)
            following = list(fresh.generate_tokens([], 5, GREEDY))
            assert list(session.generate_tokens([], 5, GREEDY)) == following
            fresh.restore(tmp_path / "saved")
            assert fresh.tokens == tokens
            assert list(fresh.generate_tokens([], 5, GREEDY)) == following


# ---- the sampler ----


@both_samplers
def test_sampling_filters_choose_among_the_likeliest(engine, session, ids):
    session.evaluate(ids[:20])
    expected = engine.expected.logits[19]
    order = np.argsort(-expected)
    probabilities = np.exp(expected - expected.max())
    probabilities /= probabilities.sum()
    off = dict(top_k=0, top_p=1.0, min_p=0.0)

    def drawn(**options):
        chosen = set()
        for seed in range(300):
            session.set_sampling(Sampling(**(off | options), temperature=1.0, seed=seed))
            chosen.add(session.sample())
        return chosen

    assert drawn(top_k=1) == {int(order[0])}
    assert drawn(top_k=3) <= {int(t) for t in order[:3]}
    nucleus = int(np.searchsorted(np.cumsum(probabilities[order]), 0.6)) + 1
    assert drawn(top_p=0.6) <= {int(t) for t in order[:nucleus]}
    keep = {int(t) for t in np.flatnonzero(probabilities >= 0.3 * probabilities.max())}
    assert drawn(min_p=0.3) <= keep
    assert len(drawn()) > len(keep)


@both_samplers
def test_sampled_frequencies_are_the_softmax(engine, session, ids):
    session.evaluate(ids[:20])
    expected = engine.expected.logits[19]
    draws = 4000
    counts = np.zeros(len(expected))
    for seed in range(draws):
        session.set_sampling(Sampling(temperature=2.0, top_k=0, top_p=1.0, seed=seed))
        counts[session.sample()] += 1
    probabilities = np.exp((expected - expected.max()) / 2.0)
    probabilities /= probabilities.sum()
    # five standard deviations of a binomial: one false alarm in a million a token
    bound = 5 * np.sqrt(draws * probabilities * (1 - probabilities)) + 2
    assert (np.abs(counts - draws * probabilities) < bound).all()


@both_samplers
def test_repetition_penalty_makes_repeats_rarer(model, ids):
    def distinct(penalty):
        with Session(model, context=CAPACITY) as session:
            options = Sampling(temperature=0, repetition_penalty=penalty, repetition_window=0)
            return len(set(session.generate_tokens(ids[:4], 80, options)))

    assert distinct(5.0) > distinct(1.0)


@on("eager")
def test_sampling_is_the_native_engines(engine, model, random_package, ids):
    native = random_package("onnx", engine.engine.config, "fp32")[1]
    options = Sampling(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, repetition_window=0)
    written = []
    with Session(model, CAPACITY, CHUNK) as hosted, Session(native, CAPACITY, threads=1) as other:
        stops = model.package.stop_tokens
        for session in (hosted, other):
            written.append([])
            for seed in range(5):
                session.rewind(0)
                tokens = tuple(session.generate_tokens(ids[:7], 12, replace(options, seed=seed)))
                # The other package has no tokenizer, and so no token that ends a text.
                written[-1].append(tuple(itertools.takewhile(lambda t: t not in stops, tokens)))
    assert written[0] == written[1]
    assert len(set(written[0])) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"seed": -1},
    ],
)
def test_impossible_sampling_names_the_option(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Sampling(**options)
