"""A `tokenizer.json` as the metadata by which llama.cpp's own tokenizer gives the same tokens.

llama.cpp knows how a text is split before the merges by name only; `SPLITS` are those whose expressions were
compared with theirs, one by one, in `tests/llama`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_qkv.errors import InputError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types of GGUF
# llama.cpp wants merges, and `gguf` writes no empty list. Where nothing is merged, no word has such parts.
_NO_MERGE = "[none] [none]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# The expressions that split a text, and whether a word that is a token is taken whole -> llama.cpp's name.
SPLITS = {
    ((GPT2,), False): "gpt-2",
    ((r"\p{N}", GPT2), False): "starcoder",
    ((LLAMA3,), True): "llama-bpe",
    ((QWEN2,), False): "qwen2",
}


def metadata(path: Path | None, vocab_size: int, stop_tokens: Sequence[int]) -> dict[str, Any]:
    """The `tokenizer.ggml` keys of the tokenizer at `path`, one that `load_tokenizer` has found sound.

    None: no tokenizer; the model then takes token ids only. Raises `InputError` for what llama.cpp cannot express.
    """
    if path is None:
        return {"model": "no_vocab"}
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        return _metadata(content, vocab_size, stop_tokens)
    except _Unknown as error:
        raise InputError(
            f"{path}: llama.cpp's tokenizer has no {error}; export to gguf without it, by a checkpoint directory that "
            "has no tokenizer.json, or to onnx"
        ) from None


class _Unknown(Exception):
    """Names what llama.cpp has not."""


def _metadata(content: dict[str, Any], vocab_size: int, stop_tokens: Sequence[int]) -> dict[str, Any]:
    model, added = content["model"], content.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise _Unknown(f"byte-level form of a {model.get('type')} model")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise _Unknown(f"{name} in a byte-level BPE")
    if content.get("normalizer"):
        raise _Unknown(f"normalizer {content['normalizer'].get('type')}")
    for token in added:
        for name in ("lstrip", "rstrip", "single_word"):
            if token.get(name):
                raise _Unknown(f"{name} of an added token ({token['content']!r})")
    whole = bool(model.get("ignore_merges"))
    expressions = _expressions(content.get("pre_tokenizer"))
    if (expressions, whole) not in SPLITS:
        by = " and then by ".join(expressions) or "nothing"
        raise _Unknown(f"pre-tokenizer that splits by {by} (ignore_merges: {str(whole).lower()})")
    tokens, types = _tokens(model["vocab"], added, vocab_size)
    opening, closing = _template(content.get("post_processor"))
    ends = [t for t in stop_tokens if t < vocab_size]
    metadata: dict[str, Any] = {
        "model": "gpt2",  # llama.cpp's word for byte-level BPE
        "pre": SPLITS[expressions, whole],
        "tokens": tokens,
        "token_type": types,
        "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]] or [_NO_MERGE],
        "add_bos_token": opening is not None,
        "add_eos_token": closing is not None,
        "add_space_prefix": False,
    }
    # Without a key of its own each is token 11 to llama.cpp.
    end = closing if closing is not None else (ends[0] if ends else None)
    start = opening if opening is not None else end
    metadata |= {f"{name}_token_id": t for name, t in (("bos", start), ("eos", end)) if t is not None}
    return metadata


def _expressions(node: dict[str, Any] | None) -> tuple[str, ...]:
    """The expressions by which a pre-tokenizer splits, in order; the last step is the mapping of bytes."""
    steps = [node] if node and node["type"] != "Sequence" else (node or {}).get("pretokenizers", [])
    found: list[str] = []
    for step in steps:
        match step["type"]:
            case "ByteLevel" if not step.get("add_prefix_space"):
                found += [GPT2] if step.get("use_regex", True) else []
            case "Digits" if step.get("individual_digits"):
                found.append(r"\p{N}")
            case "Split" if step["behavior"] == "Isolated" and not step.get("invert") and "Regex" in step["pattern"]:
                found.append(step["pattern"]["Regex"])
            case kind:
                raise _Unknown(f"pre-tokenizer {kind} with these options")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise _Unknown("pre-tokenizer without bytes as characters (ByteLevel)")
    return tuple(found)


def _tokens(vocab: dict[str, int], added: list[dict[str, Any]], vocab_size: int) -> tuple[list[str], list[int]]:
    """The text and the type of every id; rows of the model without a token are unused ones."""
    tokens, types = [f"[unused{i}]" for i in range(vocab_size)], [_UNUSED] * vocab_size
    for text, i in vocab.items():
        tokens[i], types[i] = text, _NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = _CONTROL if token.get("special") else _USER_DEFINED
    return tokens, types


def _template(node: dict[str, Any] | None) -> tuple[int | None, int | None]:
    """The tokens that a post-processor puts before and after a text."""
    if node is None or node["type"] == "ByteLevel":  # the latter changes offsets only
        return None, None
    if node["type"] == "Sequence":
        found = [_template(step) for step in node["processors"]]
        return next((f for f in found if f != (None, None)), (None, None))
    if node["type"] != "TemplateProcessing":
        raise _Unknown(f"post-processor {node['type']}")
    pieces = [next(iter(piece.items())) for piece in node["single"]]
    at = next((i for i, (kind, _) in enumerate(pieces) if kind == "Sequence"), 0)

    def ids(part: list[tuple[str, Any]]) -> list[int]:
        return [i for kind, piece in part if kind == "SpecialToken" for i in node["special_tokens"][piece["id"]]["ids"]]

    before, after = ids(pieces[:at]), ids(pieces[at + 1 :])
    if len(before) > 1 or len(after) > 1:
        raise _Unknown("template with several tokens before or after a text")
    return (before or [None])[0], (after or [None])[0]
