"""Sessions: a thin layer over an engine's that adds text.

A `Model` is loaded once; each `Session` on it is one conversation with its own cache. A session is used by
one thread at a time, `cancel` and `close` excepted: another one gets an `InputError`, and the session stays sound.
Between the tokens of a generation it is free. Sessions of one model may run in parallel.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from edge_qkv import _native
from edge_qkv.checks import chunk_size, whole
from edge_qkv.errors import ContextFull, EdgeQKVError, InputError
from edge_qkv.loaded import DEFAULT_CHUNK, Model
from edge_qkv.package import Progress
from edge_qkv.sampling import Sampling
from edge_qkv.targets import named
from edge_qkv.tokenizer import encode, stream_text, until_stop

DEFAULT_CONTEXT = 4096
DEFAULT_SINKS = 4
OVERFLOW = {"error": 0, "window": 1, "shift": 2}


def _by_one_thread(method):
    """A method of a session, or of a part of one: another thread that is in one already makes it an `InputError`."""

    @functools.wraps(method)
    def guarded(self, *arguments, **options):
        me = threading.get_ident()
        before = self._user.get("thread")
        try:
            if self._user.setdefault("thread", me) != me:  # atomic
                raise InputError(
                    "the session is in a call of another thread; open a session for each thread, or wait for that call"
                )
            return method(self, *arguments, **options)
        finally:
            if before != me and self._user.get("thread") == me:
                del self._user["thread"]

    return guarded


class Session:
    """One conversation.

    package: a package directory or a loaded `Model`. context: capacity in tokens (the native engines commit memory as
    rows are written, others at once); "max": all that the budget or the model allows; None: so with a budget, else
    `DEFAULT_CONTEXT`. prefill_chunk: tokens evaluated at once; 0: `DEFAULT_CHUNK`. memory, packed, spill, progress: of
    the model that is loaded here, see `Model`.

    overflow says what happens when tokens do not fit: 'error' raises `ContextFull`; 'window' drops all but the first
    `sinks` (None: `DEFAULT_SINKS`) and the last `window` tokens (None: half of the context, sinks included); 'shift'
    drops the oldest `block` tokens (None: a quarter of the context). Tokens after the dropped ones move up to their
    places; models with learned positions are refused, for their cached rows cannot move. These are the conversation's
    window and sinks, beside which a model's layers may have their own.

    margin: rows that layers with a window keep behind it, for rewinds; 0: as many as the window. Raises `InputError`.
    """

    def __init__(
        self,
        package: str | Path | Model,
        context: int | str | None = None,
        prefill_chunk: int = DEFAULT_CHUNK,
        threads: int = 0,
        verify: bool = True,
        *,
        memory: int | str | None = None,
        packed: str | Path | bool | None = None,
        spill: str | Path | None = None,
        progress: Progress | None = None,
        overflow: str = "error",
        sinks: int | None = None,
        window: int | None = None,
        block: int | None = None,
        margin: int = 0,
    ) -> None:
        if overflow not in OVERFLOW:
            raise InputError(f"overflow = {overflow!r}: must be one of {', '.join(OVERFLOW)}")
        prefill_chunk = chunk_size(prefill_chunk) or DEFAULT_CHUNK
        if sinks is None and overflow == "window":
            sinks = DEFAULT_SINKS
        dropping = {"sinks": sinks, "window": window, "block": block}
        dropping = {name: whole(value, name) for name, value in dropping.items() if value is not None}
        longest = context == "max"
        if not isinstance(package, Model):
            planned = None if longest or memory is None else context  # only a budget asks
            loading = dict(memory=memory, context=planned, prefill_chunk=prefill_chunk, packed=packed, spill=spill)
            package = Model(package, threads, verify, progress=progress, **loading)
        elif any(option is not None for option in (memory, packed, spill)):
            raise InputError("memory, packed and spill belong to the model; give them when the model is opened")
        self.model = package
        limit = self.model.info.context
        if context is None or longest:
            context = limit if longest or self.model.has_budget else min(DEFAULT_CONTEXT, limit)
        context = whole(context, "context", 1, limit, f", the most {self._limited_by()}")
        self.context, self.prefill_chunk = context, prefill_chunk
        # What belongs to another overflow option is refused there.
        options = dict(context=context, prefill_chunk=prefill_chunk, overflow=OVERFLOW[overflow]) | dropping
        options["margin"] = whole(margin, "margin")
        options = _native.SessionOptions(**options)
        self._overflow = overflow
        self._user: dict[str, int] = {}  # the thread that is in a method, by `_by_one_thread`
        self._engine = self.model.open_session(options)
        self._evaluated: list[int] = []  # the tokens in the cache
        self._pending: list[int] = []  # those that follow and are not evaluated yet
        self._dropped = 0  # by the overflow option
        # During a call that changes the cache, and for good where an exception ended it (Ctrl-C, a cancellation): how
        # many tokens were ever in the cache before, and those that follow them. See `_sync`.
        self._changing: tuple[int, list[int]] | None = None
        self.generated: list[int] = []  # what the last generation has yielded
        self.timing = Timing()

    @property
    @_by_one_thread
    def tokens(self) -> list[int]:
        """The conversation, without what the overflow option has dropped."""
        self._sync()
        return self._evaluated + self._pending

    # ---- tokens ----

    @_by_one_thread
    def evaluate(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> None:
        """Appends tokens to the conversation and computes what follows them.

        progress(done, total) is called after each chunk. Raises `ContextFull` before anything is evaluated
        when the tokens do not fit, `Cancelled` after `cancel` (chunks already evaluated stay).
        """
        self._append(tokens)
        self._evaluate_rest(progress)

    @_by_one_thread
    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Like `evaluate`, and returns the logits after each of the tokens: [len(tokens), vocab_size].

        With a budget: the logits of a whole chunk take up to 8 * prefill_chunk * vocab_size bytes beyond the plan.
        """
        self._evaluate_rest()
        self._append(tokens)
        logits = np.empty((len(tokens), self.model.config.vocab_size), np.float32)
        self._evaluate_rest(logits=logits)
        return logits

    @_by_one_thread
    def logits(self) -> np.ndarray:
        """The logits after the last token, [vocab_size]."""
        self._evaluate_rest()
        return self._engine.logits()

    @_by_one_thread
    def set_sampling(self, sampling: Sampling) -> None:
        """Chooses how `sample` works from now on."""
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        values = {f.name: getattr(sampling, f.name) for f in fields(sampling)} | {"seed": seed}
        self._engine.set_sampler(_native.SamplerOptions(**values))

    @_by_one_thread
    def sample(self) -> int:
        """Chooses the next token; it is not appended."""
        self._evaluate_rest()
        return self._engine.sample()

    @_by_one_thread
    def rewind(self, length: int, progress: Callable[[int, int], None] | None = None) -> int:
        """Forgets all but the first `length` tokens, and returns how many of those had to be evaluated again.

        That is 0 unless layers with a window have given back rows that the next token sees: then all are, and
        progress(done, total) is called after each chunk.
        """
        self._sync()
        in_cache, total = len(self._evaluated), len(self._evaluated) + len(self._pending)
        length = whole(length, "length to rewind to", 0, total, ", the tokens of the session")
        if length >= in_cache:
            del self._pending[length - in_cache :]
            return 0
        kept = self._evaluated[:length]
        self._change([])
        again = self._engine.rewind(length, progress)
        self._changed(kept, [])
        return again

    @_by_one_thread
    def take_back(self, count: int) -> None:
        """Forgets the last `count` tokens, or all where there are fewer, in `generated` as well.

        A generation can go on from there: unlike after `rewind`, the last token left has logits.
        """
        count, tokens = whole(count, "tokens to take back"), self.tokens
        length = max(0, len(tokens) - count)
        if 0 < length < len(self._evaluated):  # the logits after it are gone: evaluated once more
            self.rewind(length - 1)
            self._pending = [tokens[length - 1]]
        else:
            self.rewind(length)
        del self.generated[max(0, len(self.generated) - count) :]

    @_by_one_thread
    def reuse(self, tokens: Sequence[int]) -> int:
        """Keeps the first tokens that the session has in common with `tokens`, forgets the rest, and returns their
        number: evaluate `tokens[that:]` to have the session hold exactly `tokens`."""
        given = np.asarray(self._checked(tokens), np.int32)
        self._change([])
        kept = self._engine.match(given)
        self._changed(self._evaluated[:kept], [])
        return kept

    @_by_one_thread
    def fill(self, length: int, seed: int = 0) -> None:
        """Fills the cache to `length` rows of noise, to measure a deep context without its prefill."""
        length, seed = whole(length, "length"), whole(seed, "seed", 0, 2**64 - 1)
        self._evaluate_rest()
        self._change([])
        self._engine.fill(length, seed)
        self._changed(self._evaluated + [0] * (length - len(self._evaluated)), [])

    def cancel(self) -> None:
        """Stops the evaluation that is running, or else the next one.

        Any thread may call it, but not at the same time as `close`.
        """
        self._engine.cancel()

    # ---- text ----

    def generate_tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        reuse: bool = False,
    ) -> Iterator[int]:
        """Appends the prompt and yields the tokens that follow, until one that ends a text or `max_tokens`.

        reuse: the prompt is the whole conversation; what the session already holds of it is not evaluated again.

        After a full context there is still one token to yield, which then needs no row; `ContextFull` is raised by
        what has to evaluate it, the next token or `save`, until `rewind` forgets it.
        """
        max_tokens = whole(max_tokens, "max_tokens", 1)
        self._begin(prompt, sampling, progress, reuse)
        for _ in range(max_tokens):
            if (token := self._next_token()) is None:
                return
            yield token

    @_by_one_thread
    def _begin(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None,
        progress: Callable[[int, int], None] | None,
        reuse: bool,
    ) -> None:
        """Evaluates the prompt of a generation."""
        if not len(prompt) and (reuse or not self.tokens):
            raise InputError("the prompt has no tokens; give at least one")
        self.set_sampling(sampling or Sampling())
        kept = self.reuse(prompt) if reuse else 0
        self.generated = []
        self.timing = Timing(prefill_tokens=len(self._pending) + len(prompt) - kept, reused_tokens=kept)
        began = time.perf_counter()
        self.evaluate(prompt[kept:], progress)
        self.timing.prefill_seconds = time.perf_counter() - began

    @_by_one_thread
    def _next_token(self) -> int | None:
        """Samples and appends a token; None: the text ends here."""
        began = time.perf_counter()
        # One token ahead of the cache: what was yielded is evaluated only when more is asked for.
        self._evaluate_rest(keep=True)
        token = self.sample()
        self.timing.decode_seconds += time.perf_counter() - began
        self.timing.decode_tokens += 1
        if token in self.model.package.stop_tokens:
            return None
        self._pending.append(token)
        self.generated.append(token)
        return token

    def generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        *,
        reuse: bool = False,
    ) -> Iterator[str]:
        """Appends the prompt and yields the text that follows in pieces of whole characters.

        Ends at a token that ends a text, at a stop string, or after `max_tokens`; raises `ContextFull` when the
        context is full before that. reuse: the prompt is the whole conversation, see `generate_tokens`.

        A stop string is not yielded, and the conversation goes on before it: it ends with the last token before the
        stop string. Where that begins inside a token, the whole token is taken back, so that the conversation never
        holds text that was not shown.
        """
        tokenizer = self.model.package.tokenizer()
        ids = encode(tokenizer, prompt, self.model.package.stop_tokens, start=reuse or not self.tokens)
        stop = [stop] if isinstance(stop, str) else stop
        tokens = self.generate_tokens(ids, max_tokens, sampling, progress, reuse=reuse)
        return until_stop(stream_text(tokenizer, ids, tokens), stop, self.take_back)

    # ---- state ----

    @_by_one_thread
    def save(self, path: str | Path) -> None:
        """Writes tokens, cache and logits to a file, which is replaced only when all is on the disk.

        The format is documented in `runtime/core/snapshot.md`, that of engines that Python hosts in
        `edge_qkv/engines/hosted.py`.
        """
        self._evaluate_rest()
        self._engine.save(os.fsencode(path))

    @_by_one_thread
    def restore(self, path: str | Path) -> None:
        """Puts the session into a saved state: nothing is evaluated again, and the native engines map the cache from
        the file.

        Raises `InputError` for a damaged snapshot or one of another model or cache type, `ContextFull` when its
        tokens do not fit; the session is then as it was.
        """
        self._sync()
        before = self._evaluated, self._pending
        self._change([])
        try:
            self._engine.restore(os.fsencode(path))
        except EdgeQKVError:
            self._sync()
            if self._evaluated == before[0]:
                self._pending = before[1]
            raise
        self._sync()

    @_by_one_thread
    def fork(self) -> Session:
        """A session with the same options and conversation. In the native engines both share the pages of the cache,
        and each gets its own copy of those that it changes; elsewhere the cache is copied."""
        self._evaluate_rest()
        other = Session.__new__(Session)
        other.model, other.context, other.prefill_chunk = self.model, self.context, self.prefill_chunk
        other._overflow, other.generated, other.timing = self._overflow, [], Timing()
        other._engine = self._engine.fork()
        other._evaluated, other._pending, other._dropped, other._changing = list(self._evaluated), [], 0, None
        other._user = {}
        return other

    @property
    @_by_one_thread
    def dropped(self) -> int:
        """Tokens that the overflow option has dropped so far."""
        return self._engine.info().dropped

    @_by_one_thread
    def memory(self) -> dict[str, int]:
        """Bytes, from the kernel's own accounting: this process (resident, anonymous, file_backed,
        peak_resident) and this session's cache (cache_used, cache_committed, cache_reserved)."""
        process, session = _native.MemoryInfo(), self._engine.info()
        _native.call("eqkv_memory", ctypes.byref(process))
        names = ("resident", "anonymous", "file_backed", "peak_resident")
        caches = ("cache_used", "cache_committed", "cache_reserved")
        return {n: getattr(process, n) for n in names} | {n: getattr(session, n) for n in caches}

    def close(self) -> None:
        """Frees the cache, once the call that a thread is in has ended (this thread's, in a signal handler).

        The session must not be used afterwards.
        """
        self._engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- inside ----

    def _limited_by(self) -> str:
        budget = self.model.info.context < self.model.config.max_positions
        return "its memory budget holds" if budget else "this model allows"

    def _change(self, pending: list[int]) -> None:
        """Before a call that changes the cache. `pending`: the tokens that follow what is in the cache now."""
        self._sync()
        self._changing = len(self._evaluated) + self._dropped, pending

    def _changed(self, evaluated: list[int], pending: list[int]) -> None:
        """After such a call; without it what is in the cache is read when it is next asked for."""
        self._evaluated, self._pending = evaluated, pending
        self._changing = None

    def _sync(self) -> None:
        """Reads what is in the cache where a call that changed it may have ended anywhere, or has dropped tokens."""
        if self._changing is None:
            return
        begin, pending = self._changing
        tokens = self._engine.tokens().tolist()
        self._dropped = self._engine.info().dropped
        done = max(0, len(tokens) + self._dropped - begin)
        self._changed(tokens, pending[done:])

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        vocabulary = self.model.config.vocab_size
        note = f", for the vocabulary has {vocabulary}"
        return [whole(token, "token", 0, vocabulary - 1, note) for token in tokens]

    def _append(self, tokens: Sequence[int]) -> None:
        tokens = self._checked(tokens)
        self._sync()
        self._check_fits(len(tokens))
        self._pending.extend(tokens)

    def _check_fits(self, more: int) -> None:
        """Whether there is room for so many tokens besides those of the session; raises `ContextFull`."""
        total = len(self._evaluated) + len(self._pending) + more
        if self._overflow == "error" and total > self.context:
            used = min(total - more, self.context)
            lacking = "1 more token does" if total - used == 1 else f"{total - used} more tokens do"
            remedies = "fewer tokens, or an overflow option"
            if named(self.model.package.target).hosted:
                remedies = "or fewer tokens"
            raise ContextFull(
                f"{lacking} not fit: {used} of the context of {self.context} are used; give a larger context "
                f"({self._limited_by()} {self.model.info.context}), {remedies}"
            )

    def _evaluate_rest(
        self,
        progress: Callable[[int, int], None] | None = None,
        logits: np.ndarray | None = None,
        keep: bool = False,
    ) -> None:
        """Evaluates the tokens that are not in the cache yet, a chunk at a time so that Ctrl-C is heard.

        logits [tokens, vocab_size] receives those of each of them when given. When it is stopped, the tokens
        that are left are forgotten, unless `keep` says that the caller was already given them.
        """
        self._sync()
        self._check_fits(0)  # the last token of a generation may have no room
        total, done = len(self._pending), 0
        try:
            while self._pending:
                done += self._evaluate_chunk(None if logits is None else logits[done:])
                if progress:
                    progress(done, total)
        except BaseException:
            if not keep:
                self._pending.clear()
                if self._changing:
                    self._changing = self._changing[0], []
            raise

    def _evaluate_chunk(self, logits: np.ndarray | None) -> int:
        chunk = np.asarray(self._pending[: self.prefill_chunk], np.int32)
        self._change(self._pending)
        self._engine.evaluate(chunk, logits)
        if len(self._evaluated) + len(chunk) <= self.context:
            self._evaluated += self._pending[: len(chunk)]
            self._changed(self._evaluated, self._pending[len(chunk) :])
        else:
            self._sync()
        return len(chunk)


@dataclass
class Timing:
    """Where the last generation's time went."""

    prefill_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, that were in the cache already
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
