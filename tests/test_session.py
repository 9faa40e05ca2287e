"""A session behaves like the eager decoder with a cache, and never loses its footing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch
from other_threads import check_every_method, check_soundness

from edge_qkv import Cancelled, ContextFull, InputError, Model, Sampling, Session
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.tokenizer import stream_text

CAPACITY, CHUNK = 96, 16
LENGTHS = (1, 2, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - 1, CAPACITY)
# fp32 weights and cache: sums of at most 100 products in another order, logits of order 10.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_package):
    with Model(tiny_package, threads=2) as model:
        yield model


@pytest.fixture
def session(model):
    with Session(model, context=CAPACITY, prefill_chunk=CHUNK) as session:
        yield session


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (CAPACITY,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint, ids):
    """The eager decoder's logits of the whole sequence, [CAPACITY, V]."""
    with torch.no_grad():
        logits, _ = read_checkpoint(str(tiny_checkpoint)).load()(torch.tensor([ids]))
    return logits[0].numpy()


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_matches_the_decoder(session, ids, expected, length):
    session.evaluate(ids[:length])
    np.testing.assert_allclose(session.logits(), expected[length - 1], atol=TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_rows_logits_match(session, ids, expected, length):
    np.testing.assert_allclose(session.score(ids[:length]), expected[:length], atol=TOLERANCE)


def test_decode_matches_token_by_token(session, ids, expected):
    for i, token in enumerate(ids):
        session.evaluate([token])
        np.testing.assert_allclose(session.logits(), expected[i], atol=TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
def test_rewind_then_go_on(session, ids, expected, length):
    session.evaluate([(t + 1) % 256 for t in ids])  # other tokens: their rows must leave no trace
    session.rewind(0)
    session.evaluate(ids[:length])
    session.rewind(length // 2)
    assert session.tokens == ids[: length // 2]
    np.testing.assert_allclose(session.score(ids[length // 2 : length]), expected[length // 2 : length], atol=TOLERANCE)


def test_rewind_to_the_same_length_keeps_the_conversation(session, ids, expected):
    session.evaluate(ids[:9])
    session.rewind(9)
    session.evaluate(ids[9:10])
    np.testing.assert_allclose(session.logits(), expected[9], atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, CHUNK, CAPACITY, 500])
def test_chunk_size_does_not_change_the_result(model, ids, expected, chunk):
    with Session(model, context=CAPACITY, prefill_chunk=chunk) as session:
        np.testing.assert_allclose(session.score(ids), expected, atol=TOLERANCE)


def test_a_prompt_that_does_not_fit_is_refused_as_a_whole(session, ids):
    session.evaluate(ids[:10])
    with pytest.raises(ContextFull, match=f"87 more tokens do not fit: 10 of the context of {CAPACITY}"):
        session.evaluate(ids[:87])
    assert session.tokens == ids[:10]
    session.evaluate(ids[:86])
    with pytest.raises(ContextFull):
        session.evaluate([1])


def test_generation_at_capacity_says_so(session, ids):
    session.evaluate(ids[:90])
    seen = []
    with pytest.raises(ContextFull):
        for token in session.generate_tokens([], 50, Sampling(temperature=0)):
            seen.append(token)
    assert len(seen) == 7  # the last one needs no row until something follows it
    assert session.tokens == ids[:90] + seen


@pytest.mark.parametrize("length", [CAPACITY - 1, CAPACITY])
def test_the_token_after_a_full_context_is_yielded(model, ids, expected, tmp_path, length):
    """It is known without a further row; what must evaluate it says that the context is full, and rewinding helps."""
    greedy = Sampling(temperature=0)
    more = CAPACITY - length + 1
    with Session(model, context=CAPACITY) as session:
        seen = list(session.generate_tokens(ids[:length], more, greedy))
        assert len(seen) == more and seen[0] == int(expected[length - 1].argmax())
        assert session.tokens == ids[:length] + seen
        for use in (
            session.logits,
            session.sample,
            session.fork,
            lambda: session.save(tmp_path / "saved"),
            lambda: session.evaluate([1]),
            lambda: session.score([1]),
            lambda: next(session.generate_tokens([], 1, greedy)),
        ):
            with pytest.raises(ContextFull, match=rf"more tokens? do(es)? not fit: {CAPACITY} of the context"):
                use()
            assert session.tokens == ids[:length] + seen
        session.rewind(CAPACITY)
        session.save(tmp_path / "saved")
        assert list(session.generate_tokens([], 1, greedy)) == seen[-1:]
    with Session(model, context=CAPACITY) as other:
        other.restore(tmp_path / "saved")
        assert list(other.generate_tokens([], 1, greedy)) == seen[-1:]


def test_greedy_is_the_largest_logit(session, ids, expected):
    generated = list(session.generate_tokens(ids[:20], 1, Sampling(temperature=0)))
    assert generated == [int(expected[19].argmax())]


def test_same_seed_same_text_other_seed_other_text(model):
    def text(seed):
        with Session(model, context=CAPACITY) as session:
            return "".join(session.generate("Hello", 40, Sampling(temperature=1.5, top_k=0, top_p=1, seed=seed)))

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(5)}) > 1


def test_conversation_goes_on_where_generation_stopped(model, ids):
    """The last token that was yielded is part of what follows."""
    greedy = Sampling(temperature=0)
    with Session(model, context=CAPACITY) as once, Session(model, context=CAPACITY) as twice:
        whole = list(once.generate_tokens(ids[:5], 12, greedy))
        halves = list(twice.generate_tokens(ids[:5], 6, greedy))
        halves += list(twice.generate_tokens([], 6, greedy))
        assert halves == whole
        assert twice.tokens == once.tokens


def test_sampling_filters_choose_among_the_likeliest(session, ids, expected):
    session.evaluate(ids[:20])
    order = np.argsort(-expected[19])
    probabilities = np.exp(expected[19] - expected[19].max())
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


def test_sampled_frequencies_are_the_softmax(session, ids, expected):
    session.evaluate(ids[:20])
    draws = 4000
    counts = np.zeros(260)
    for seed in range(draws):
        session.set_sampling(Sampling(temperature=2.0, top_k=0, top_p=1.0, seed=seed))
        counts[session.sample()] += 1
    probabilities = np.exp((expected[19] - expected[19].max()) / 2.0)
    probabilities /= probabilities.sum()
    # five standard deviations of a binomial: one false alarm in a million a token
    bound = 5 * np.sqrt(draws * probabilities * (1 - probabilities)) + 2
    assert (np.abs(counts - draws * probabilities) < bound).all()


def test_repetition_penalty_makes_repeats_rarer(model, ids):
    def distinct(penalty):
        with Session(model, context=CAPACITY) as session:
            options = Sampling(temperature=0, repetition_penalty=penalty, repetition_window=0)
            return len(set(session.generate_tokens(ids[:4], 80, options)))

    assert distinct(5.0) > distinct(1.0)


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


def test_streaming_text_and_stop_string(model, session, bytes_tokenizer):
    greedy = Sampling(temperature=0)
    whole = "".join(session.generate("abc", 40, greedy))
    assert whole == bytes_tokenizer.decode(session.tokens[3:]).rstrip("\N{REPLACEMENT CHARACTER}")
    stop = whole[10:12]
    with Session(model, context=CAPACITY) as other:
        assert "".join(other.generate("abc", 40, greedy, stop=stop)) == whole[: whole.index(stop)]


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
            following = list(fresh.generate_tokens([], 5, Sampling(temperature=0)))
            assert list(session.generate_tokens([], 5, Sampling(temperature=0))) == following
            fresh.restore(tmp_path / "saved")
            assert fresh.tokens == tokens
            assert list(fresh.generate_tokens([], 5, Sampling(temperature=0))) == following


@pytest.mark.parametrize("options", [{}, {"overflow": "shift", "block": 20}], ids=["error", "shift"])
def test_tokens_are_taken_back_to_any_length(model, ids, options):
    with Session(model, 40, CHUNK, **options) as session, Session(model, CAPACITY) as fresh:
        for count in (0, 1, 2, 7, 39, 1000):
            session.rewind(0)
            given = list(session.generate_tokens(ids[:30], 30 if options else 10, Sampling(seed=2)))
            before = session.tokens
            session.take_back(count)
            assert session.tokens == before[: max(0, len(before) - count)]
            assert session.generated == given[: max(0, len(given) - count)]
            if session.tokens and not options:
                fresh.rewind(0)
                fresh.evaluate(session.tokens)
                np.testing.assert_allclose(session.logits(), fresh.logits(), atol=TOLERANCE)
        with pytest.raises(InputError, match="tokens to take back"):
            session.take_back(-1)


def test_a_second_thread_is_refused_by_every_method(model, ids, tmp_path):
    with Session(model, CAPACITY, CHUNK) as session:
        check_every_method(session, tmp_path / "saved", ids[:40])


def test_threads_that_share_a_session_leave_it_sound(model, ids, tmp_path):
    with Session(model, CAPACITY, CHUNK) as session:
        check_soundness(session, tmp_path / "saved", ids)


def test_a_package_may_be_opened_by_a_relative_path(tiny_package, tmp_path, monkeypatch):
    """And the current directory change afterwards: the tokenizer is read, and caches are moved to files, later."""
    shutil.copytree(tiny_package, tmp_path / "here/package")
    (tmp_path / "here/spill").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Model("package", memory="64MB", spill="spill", context=CAPACITY) as model, Session(model, CAPACITY) as session:
        monkeypatch.chdir(tmp_path)
        session.evaluate([1, 2, 3])
        logits = session.logits()
        model.trim("all")
        assert len("".join(session.generate("abc", 8, Sampling(temperature=0)))) > 0
        session.rewind(2)
        session.evaluate([3])
        np.testing.assert_allclose(session.logits(), logits, atol=TOLERANCE)


def test_cancel_from_another_thread_stops_a_generation(model):
    with Session(model, context=CAPACITY) as session:
        canceller = threading.Timer(0.05, session.cancel)
        canceller.start()
        with pytest.raises(Cancelled):
            while True:
                session.rewind(0)
                session.evaluate(list(range(90)))
        canceller.join()
        session.rewind(0)
        session.evaluate([1, 2, 3])  # and the session is usable again
        assert session.tokens == [1, 2, 3]


def test_closing_waits_for_the_call_of_another_thread(model):
    session = Session(model, context=CAPACITY, prefill_chunk=1)
    failures = []

    def work():
        try:
            while True:
                session.rewind(0)
                session.evaluate(list(range(90)))
        except InputError as error:
            failures.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.2)
    session.close()
    worker.join(timeout=30)
    assert failures == ["the session is closed; open a new one"]


ROUNDS = 40  # interruptions at different times


class Interrupt(BaseException):
    pass


def _interrupt(*_) -> None:
    raise Interrupt


@pytest.fixture
def alarm():
    """alarm(handler, seconds): calls the handler once after that long, at whatever the main thread then does."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(handler, seconds: float) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "options",
    [{}, {"overflow": "shift", "block": 20}, {"overflow": "window", "window": 88}],
    ids=["error", "shift", "window that splits chunks"],
)
def test_an_interrupted_call_leaves_a_sound_session(model, ids, tmp_path, alarm, options):
    """Whatever an exception out of a signal handler ends, the session knows afterwards what its cache holds."""
    generator = np.random.default_rng(7)
    interrupted = 0
    with Session(model, CAPACITY, CHUNK, **options) as session, Session(model, CAPACITY, CHUNK) as fresh:
        session.evaluate(ids[:40])
        session.save(tmp_path / "saved")
        for _ in range(ROUNDS):
            with contextlib.suppress(Interrupt):
                alarm(_interrupt, generator.uniform(1e-4, 0.01))
                while True:
                    session.rewind(len(session.tokens) // 2)
                    session.evaluate(ids[: int(generator.integers(1, 45))])
                    session.restore(tmp_path / "saved")
                    session.fill(int(generator.integers(40, 50)))
                    session.reuse(ids[: int(generator.integers(1, 60))])
                    list(session.generate_tokens([1], 3))
            interrupted += 1
            tokens = session.tokens
            assert tokens[: len(tokens) - len(session._pending)] == session._engine.tokens().tolist()
            # A row that has moved is not what its token gives again.
            kept = 0 if options else min(5, len(tokens))
            session.rewind(kept)
            session.evaluate(ids[5:30])
            assert session.tokens == session._engine.tokens().tolist() == tokens[:kept] + ids[5:30]
            fresh.rewind(0)
            if tokens[:kept] == ids[:kept]:  # nor is one of noise
                fresh.evaluate(session.tokens)
                np.testing.assert_allclose(session.logits(), fresh.logits(), atol=TOLERANCE)
    assert interrupted == ROUNDS


@pytest.mark.parametrize(
    "options, count", [({}, 70), ({"overflow": "shift", "block": 20}, 150)], ids=["error", "shift"]
)
def test_a_token_that_was_yielded_is_in_the_cache_once_after_an_interruption(model, ids, alarm, options, count):
    generator = np.random.default_rng(3)
    sampling = Sampling(temperature=1.5, seed=1)
    with Session(model, CAPACITY, CHUNK, **options) as session:
        whole = ids[:20] + list(session.generate_tokens(ids[:20], count, sampling))
        seconds = session.timing.prefill_seconds + session.timing.decode_seconds
    stopped = 0
    for _ in range(ROUNDS):
        with Session(model, CAPACITY, CHUNK, **options) as session:
            with contextlib.suppress(Interrupt):
                alarm(_interrupt, generator.uniform(0.05, 0.9) * seconds)
                list(session.generate_tokens(ids[:20], count, sampling))
                signal.setitimer(signal.ITIMER_REAL, 0)
            tokens, written = session.tokens, session.dropped + len(session.tokens)
            assert tokens == whole[session.dropped : written]
            if written > 20:  # the interruption may come between the two notes that a token is taken down in
                assert written - 20 - len(session.generated) in (0, 1)
                stopped += written < len(whole)
            session._evaluate_rest()
            assert session._engine.tokens().tolist() == session.tokens == whole[session.dropped : written]
    assert stopped > ROUNDS // 4


def test_a_signal_handler_may_close_a_session_that_is_in_a_call(model, ids, alarm):
    sentences = []

    def handler(*_) -> None:
        for use in (session.logits, lambda: session.rewind(0), lambda: session.tokens):
            with contextlib.suppress(InputError):
                use()
        try:
            session.save(os.devnull)
        except InputError as error:
            sentences.append(str(error))
        session.close()

    closed = 0
    while not any("in a call of this thread" in sentence for sentence in sentences):
        session = Session(model, context=CAPACITY, prefill_chunk=CAPACITY)
        alarm(handler, 0.02)
        with pytest.raises(InputError, match="the session is closed"):
            while True:
                session.rewind(0)
                session.evaluate(ids)
                session.logits()
        closed += 1
        assert closed < 50, sentences


def test_a_cancelled_generation_keeps_what_it_yielded(model):
    with Session(model, context=CAPACITY) as session:
        tokens = session.generate_tokens([1, 2], 20, Sampling(temperature=0))
        given = [next(tokens), next(tokens)]
        session.cancel()
        with pytest.raises(Cancelled):
            next(tokens)
        assert session.tokens == [1, 2, *given]
        more = list(session.generate_tokens([], 3, Sampling(temperature=0)))
    with Session(model, context=CAPACITY) as other:
        assert [*given, *more] == list(other.generate_tokens([1, 2], 5, Sampling(temperature=0)))


def test_sessions_of_one_model_run_in_parallel(model, ids, expected):
    results = {}

    def work(shift):
        with Session(model, context=CAPACITY, prefill_chunk=CHUNK) as session:
            for _ in range(5):
                session.rewind(0)
                results[shift] = session.score(ids[: CAPACITY - shift])

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for shift, logits in results.items():
        np.testing.assert_allclose(logits, expected[: CAPACITY - shift], atol=TOLERANCE)


def test_memory_counts_the_cache_row_by_row(model, session, ids):
    per_token = model.info.cache_bytes_per_token
    assert per_token == model.config.cache_bytes_per_token("fp32")
    session.evaluate(ids[:10])
    memory = session.memory()
    assert memory["cache_used"] == 10 * per_token
    assert 0 <= memory["cache_reserved"] - CAPACITY * per_token < 2 * 65536  # each layer ends with its page
    assert memory["cache_committed"] > 0
    assert memory["resident"] >= memory["anonymous"] > 0
    assert memory["peak_resident"] >= memory["resident"] * 0.99


def test_bad_values_are_refused_by_name(model, tiny_package, session):
    huge = 2**64 + 1  # what ctypes would make 1 of
    for option, values in {
        "context": (97, 0, huge, "7", 1.5, True),
        "prefill_chunk": (-1, huge, 1.5),
        "sinks": (-1, huge),
        "window": (huge, "4"),
        "block": (2**31, 1.0),
    }.items():
        for value in values:
            with pytest.raises(InputError, match=re.escape(f"{option} = {value!r}: must be a whole number")):
                Session(model, **{option: value})
    for token in (260, -1, huge, 1.5, "7", False):
        for use in (session.evaluate, session.score, session.reuse):
            with pytest.raises(InputError, match=re.escape(f"token = {token!r}: ")):
                use([1, token])
    for length in (5, -1, huge, 0.0):
        with pytest.raises(InputError, match=re.escape(f"length to rewind to = {length!r}: ")):
            session.rewind(length)
    for length, seed in ((huge, 0), (1.5, 0), (3, huge), (3, -1)):
        with pytest.raises(InputError, match=r"(length|seed) = .*: must be a whole number"):
            session.fill(length, seed)
    for option in ("threads", "context", "prefill_chunk"):
        with pytest.raises(InputError, match=f"{option} = {huge}"):
            Model(tiny_package, **{option: huge})
    session.evaluate(np.array([1, 2]))  # numpy's whole numbers are as good
    session.rewind(np.int64(0))
    with Session(model, prefill_chunk=0) as default:
        assert default.prefill_chunk == 128
    with pytest.raises(InputError, match="max_tokens"):
        next(session.generate_tokens([1], 0))
    with pytest.raises(InputError, match="no tokens"):
        next(session.generate("", 5))
    with pytest.raises(InputError):
        session.logits()  # nothing evaluated yet
    assert session.tokens == []


def test_fill_gives_a_deep_context_at_once(session, ids):
    session.fill(CAPACITY - 1)
    session.evaluate(ids[:1])
    assert np.isfinite(session.logits()).all()
    with pytest.raises(ContextFull):
        session.evaluate(ids[:1])
