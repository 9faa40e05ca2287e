"""llama.cpp's tokenizer against the package's `tokenizer.json`, on text of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import gguf_variants
from conftest import changed
from edge_qkv.export import export_package
from edge_qkv.export.gguf import tokenizer as gguf_tokenizer
from gguf_variants import LLAMA
from llama_file import opened

CODE = (
    "def f(x: int) -> str:\n\tif x >= 10_000:\n\t\treturn f'{x:>8,d}'  # tabs\n    else:\n"
    '        print("it\'s", x**2, 3.14159e-10)\r\n\r\n\n\n   \n}\n'
)
UNICODE = (
    "Ünïcödé naïve Ελληνικά русский 日本語テスト 中文，标点。 한국어 العربية עברית हिन्दी ไทย 👩‍👩‍👧‍👦🏳️‍🌈 "
    "e\u0301 ½ Ⅷ ①② ٣٤ \u00a0nbsp\u2003em\u200bzw\u3000 ﬁ ǅ ʰ ª ²³ 1234567890 12 345\u0000x\x7f \U0001f469\u0300"
)
SPACES = "  two\t\ttabs\n\n\nnl   \n  trail  \r\n\r x  y   z    \n"
SPECIAL = "<|endoftext|>To be<|endoftext|><|endoftext|> a<|endoftext|>\n<|user|>hi <|user|> <|endoftext |><|"
_PIECES = [
    *" \t\n\r'abcXYZ019.,;:!?-_(){}[]<>\"`~@#$%^&*+=|\\/éßñäÖ½²Ⅷ中日本語한אबहไ👍\u00a0\u2003\u200b\u3000\u0301ǅ",
    *("'s", "'LL", "'re", "  ", "\n\n", "\r\n", "<|endoftext|>", "<|user|>", "12", "345"),
]


def texts(prose: str) -> Iterator[str]:
    yield from (prose, CODE, UNICODE, SPACES, SPECIAL, "")
    chance = random.Random(0)
    for _ in range(2000):
        yield "".join(chance.choices(_PIECES, k=chance.randrange(1, 40)))


def _trained(prose: str, pre_tokenizer, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose, CODE * 20, UNICODE * 10, SPACES * 10], trainer)
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    return tokenizer


def _split(expression: str):
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), bytes_only])


def _tokenizer(kind: str, prose: str, bundled: Path) -> Tokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match kind:
        case "bundled":
            return Tokenizer.from_file(str(bundled / "tokenizer.json"))
        case "gpt-2":
            return _trained(prose, plain)
        case "starcoder":
            return _trained(prose, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]))
        case "llama-bpe":
            return _trained(prose, _split(gguf_tokenizer.LLAMA3), ignore_merges=True)
        case _:
            return _trained(prose, _split(gguf_tokenizer.QWEN2))


def _file(folder: Path, tokenizer: Tokenizer) -> Path:
    vocab_size = max(tokenizer.get_vocab().values()) + 5  # some rows of the model have no token
    checkpoint = gguf_variants.write(folder / "checkpoint", changed(LLAMA, vocab_size=vocab_size), tokenizer)
    export_package("gguf", str(checkpoint), folder / "package", weights="f16", parity=False)
    return folder / "package" / "model.gguf"


@pytest.mark.parametrize("kind", ["bundled", *gguf_tokenizer.SPLITS.values()])
def test_tokens_are_those_of_the_package(tmp_path, bundled_checkpoint, kind):
    prose = (bundled_checkpoint / "held-out.txt").read_text()
    tokenizer = _tokenizer(kind, prose, bundled_checkpoint)
    with opened(_file(tmp_path, tokenizer)) as model:
        for text in texts(prose):
            assert model.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids, repr(text[:80])
        assert model.ends() == {tokenizer.token_to_id("<|endoftext|>")}


def test_a_template_puts_its_tokens_before_and_after(tmp_path, bytes_tokenizer):
    tokenizer = Tokenizer.from_str(bytes_tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = {name: tokenizer.token_to_id(name) for name in ("<s>", "</s>")}
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=list(ids.items()))
    with opened(_file(tmp_path, tokenizer)) as model:
        assert model.tokenize("a text", opening=True) == tokenizer.encode("a text").ids
        assert model.tokenize("a text") == tokenizer.encode("a text", add_special_tokens=False).ids
