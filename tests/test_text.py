"""Streaming never splits a character and never shows a stop string, whatever the pieces."""

import random

import pytest

from edge_qkv import ContextFull
from edge_qkv.tokenizer import stream_text, until_stop


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語テキスト", "👩‍👩‍👧 family 🎭", "a\n\tb", "שלום"])
def test_pieces_are_whole_characters(bytes_tokenizer, text):
    ids = bytes_tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    pieces = list(stream_text(bytes_tokenizer, bytes_tokenizer.encode("x").ids, ids))
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_an_unfinished_character_is_not_shown(bytes_tokenizer):
    ids = bytes_tokenizer.encode("ok é").ids[:-1]
    assert "".join(stream_text(bytes_tokenizer, [], ids)) == "ok "


def test_stop_string_across_pieces_is_cut():
    assert "".join(until_stop(["Hello wo", "r", "ld", "!END", " more"], ["END"])) == "Hello world!"
    assert "".join(until_stop(["a<", "|", "en", "d|> b"], ["<|end|>"])) == "a"
    assert "".join(until_stop(["a<", "|", "en", "x"], ["<|end|>"])) == "a<|enx"
    assert list(until_stop(["END"], ["END"])) == []
    assert "".join(until_stop(["abc"], ["", "c"])) == "ab"


def test_every_split_gives_the_same_text():
    rng = random.Random(0)
    text, stops = "one two ababac three", ["ababac", "threX"]
    for _ in range(200):
        cuts = sorted(rng.sample(range(len(text) + 1), 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert "".join(until_stop(pieces, stops)) == "one two "


def test_what_is_taken_back_at_a_stop_string_is_every_piece_of_hidden_text():
    """For every split: the pieces that stay are whole, are shown, and no piece more would be."""
    rng = random.Random(1)
    text, stop = "one two ababac three", "ababac"
    at = text.index(stop)
    for _ in range(300):
        cuts = sorted(rng.choices(range(len(text) + 1), k=6))  # some pieces are empty, as half characters are
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        drawn, taken = [], []
        shown = "".join(until_stop((drawn.append(piece) or piece for piece in pieces), [stop], taken.append))
        assert shown == text[:at] and len(taken) == 1
        kept = drawn[: len(drawn) - taken[0]]
        assert shown.startswith("".join(kept)) and (not kept or kept[-1])
        more = "".join(drawn[: len(kept) + 1])
        assert len(more) > at or more == "".join(kept), (pieces, taken)
    assert "".join(until_stop(pieces, ["X"], taken.append)) == text and len(taken) == 1


def test_text_that_was_held_back_is_shown_before_an_error():
    def pieces():
        yield "abc<|en"
        raise ContextFull("full")

    seen = []
    with pytest.raises(ContextFull):
        for piece in until_stop(pieces(), ["<|end|>"]):
            seen.append(piece)
    assert "".join(seen) == "abc<|en"


def test_text_without_a_stop_is_streamed_at_once():
    seen = until_stop(iter(["ab", "cd"]), ["x"])
    assert next(seen) == "ab"
