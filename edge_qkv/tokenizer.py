"""From token ids to text as it is generated: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def stream_text(tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of `tokens` piece by piece; a character is held back until its last byte is there.

    The prompt's ids are what the tokens follow: some tokenizers write a space only between words.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    for token in tokens:
        if piece := stream.step(tokenizer, token):
            yield piece


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yields `pieces` up to the first occurrence of any stop string, which is not yielded.

    Text that may turn out to be the start of a stop string is held back until it is decided.
    """
    stops = [s for s in stops if s]
    held = ""
    for piece in pieces:
        held += piece
        found = [i for s in stops if (i := held.find(s)) >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        safe = len(held) - max((_overlap(held, s) for s in stops), default=0)
        if safe:
            yield held[:safe]
            held = held[safe:]
    if held:
        yield held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
