"""Text and token ids: a model's tokenizer, and text as it is generated, whole characters and no stop string."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_qkv import files
from edge_qkv.errors import EdgeQKVError, InputError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Names that tokenizers give to the token that ends a text.
_END_TOKENS = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|end|>",
)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Reads a `tokenizer.json` and checks that the model has a row for each of its tokens."""
    from tokenizers import Tokenizer

    text = files.read_text(path, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for anything it cannot parse
        raise InputError(f"{path}: is not a tokenizer.json ({one_line(error)})") from None
    tokenizer.no_truncation()  # files made for training carry both; a prompt is neither cut nor filled up
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise InputError(f"{path}: has an empty vocabulary; give the tokenizer.json the model was trained with")
    if largest >= vocab_size:
        raise InputError(
            f"{path}: belongs to another model: it has token {largest}, the model has {vocab_size} tokens; "
            "give the tokenizer.json the model was trained with"
        )
    return tokenizer


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens of a tokenizer that end a text."""
    return sorted(i for name in _END_TOKENS if (i := tokenizer.token_to_id(name)) is not None)


def encode(tokenizer: Tokenizer, text: str, stops: frozenset[int], start: bool) -> list[int]:
    """The ids of `text`; `start` puts the tokens before it that open a text (never one that ends it).

    Raises `InputError` for text that the tokenizer cannot express.
    """
    try:
        text.encode()  # bytes of a command line that are no UTF-8 arrive as lone surrogates
        opening = [i for i in tokenizer.encode("").ids if i not in stops] if start else []
        return opening + tokenizer.encode(text, add_special_tokens=False).ids
    except UnicodeEncodeError:
        raise InputError("the text must be UTF-8; this has bytes that are not") from None
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"the tokenizer cannot encode this text ({one_line(error)})") from None


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of `tokens`, a piece a token; a character is held back until its last byte is there.

    The prompt's ids are what the tokens follow: some tokenizers write a space only between words.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer, token) or ""


def until_stop(
    pieces: Iterable[str], stops: Sequence[str], stopped: Callable[[int], None] = lambda count: None
) -> Iterator[str]:
    """Yields the text of `pieces` up to the first occurrence of any stop string, which is not yielded.

    Text that may turn out to be the start of a stop string is held back until it is decided. `stopped` is called at
    a stop string, before the text up to it is yielded: with the number of last pieces of which any part, or nothing
    at all, is text from there on.
    """
    stops = [s for s in stops if s]
    held, given = "", 0  # what is not yielded yet, and the characters that are
    ends: list[int] = []  # of each piece, in characters of the whole text
    try:
        for piece in pieces:
            held += piece
            ends.append(given + len(held))
            found = [i for s in stops if (i := held.find(s)) >= 0]
            if found:
                stopped(len(ends) - _pieces_before(given + min(found), ends))
                if min(found):
                    yield held[: min(found)]
                return
            safe = len(held) - max((_overlap(held, s) for s in stops), default=0)
            if safe:
                yield held[:safe]
                held, given = held[safe:], given + safe
    except EdgeQKVError:  # the context is full: what was held back is text all the same
        if held:
            yield held
        raise
    if held:
        yield held


def _pieces_before(position: int, ends: Sequence[int]) -> int:
    """How many pieces make up the text that ends with a whole piece at `position`, or else as soon before as any.

    Pieces without text after those are not counted: they may be the first bytes of a character.
    """
    whole = bisect.bisect_right(ends, position)
    return bisect.bisect_left(ends, ends[whole - 1]) + 1 if whole and ends[whole - 1] else 0


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
