"""Does an export compute what its checkpoint computes? Compares logits, whatever the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.model import Decoder

# Token ids of one sequence -> the logits after each of them, [n, V] float32.
Score = Callable[[Sequence[int]], np.ndarray]
_CHUNK = 64
_FEWEST_TOKENS, _MOST_TOKENS = 256, 4096
_MOST_WORK = 1 << 38  # parameters * tokens
_MOST_LOGITS = 1 << 26  # values in memory, on each side


@torch.inference_mode()
def score_eagerly(decoder: Decoder, tokens: Sequence[int]) -> np.ndarray:
    """The reference: logits [n, V] of the eager decoder in float32, prefilled in chunks through its cache."""
    ids = torch.as_tensor(tokens, dtype=torch.int64)[None]  # [1, n]
    caches = decoder.new_caches(ids.shape[1])
    parts = []
    for start in range(0, ids.shape[1], _CHUNK):
        logits, caches = decoder(ids[:, start : start + _CHUNK], start, caches)  # [1, T, V]
        parts.append(logits[0].float().numpy())
    return np.concatenate(parts)


def random_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """The same ids every time; for a checkpoint without text to try it on."""
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def compare(reference: np.ndarray, exported: np.ndarray, tokens: Sequence[int]) -> dict[str, float | int]:
    """The parity report of two [n, V] arrays of logits after each of `tokens`.

    Logit errors are absolute; `top1_agreement` is the share of positions with the same likeliest token;
    perplexities are of the n - 1 tokens that have a predecessor. Raises `InputError` when the export's
    logits have another shape or are not finite.
    """
    if exported.shape != reference.shape:
        raise InputError(f"the export gives logits {list(exported.shape)}, the checkpoint {list(reference.shape)}")
    if not np.isfinite(exported).all():
        raise InputError("the export gives logits that are not finite; try --weights fp32 or --cache fp32")
    error = np.abs(reference.astype(np.float64) - exported)
    before, after = perplexity(reference, tokens), perplexity(exported, tokens)
    return {
        "tokens": len(tokens),
        "max_logit_error": float(error.max()),
        "mean_logit_error": float(error.mean()),
        "logit_std": float(reference.std()),  # what to measure the errors by
        "top1_agreement": float((reference.argmax(-1) == exported.argmax(-1)).mean()),
        "perplexity_checkpoint": before,
        "perplexity_export": after,
        "perplexity_change": after / before - 1,
    }


def perplexity(logits: np.ndarray, tokens: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of tokens[1:] under logits [n, V]; NaN for fewer than two tokens."""
    if len(tokens) < 2:
        return math.nan
    scores = torch.from_numpy(np.ascontiguousarray(logits[:-1], np.float32))
    loss = torch.nn.functional.cross_entropy(scores, torch.as_tensor(tokens[1:]))
    return math.exp(min(loss.item(), 700.0))


def check(
    decoder: Decoder, score: Score, engine: str, text_tokens: Sequence[int] | None, most: int | None = None
) -> dict:
    """Runs both sides on the text's first tokens, or on random ids where there is no text; on `most` of them at most.

    The tokens are taken in windows of the length the model was trained on, each a sequence of its own.
    """
    count, window = lengths(decoder.config)
    count = min(count, most or count)
    text = text_tokens is not None and len(text_tokens) > 1
    tokens = list(text_tokens)[:count] if text else random_tokens(decoder.config.vocab_size, count)
    windows = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    reference = np.concatenate([score_eagerly(decoder, w) for w in windows])
    exported = np.concatenate([score(w) for w in windows])
    return {"engine": engine, "input": "text" if text else "random tokens", **compare(reference, exported, tokens)}


def lengths(config: ModelConfig) -> tuple[int, int]:
    """How many tokens a check takes, and its window: about a minute of eager arithmetic at most."""
    window = config.trained_context or min(config.max_positions, 1024)
    affordable = min(_MOST_WORK // config.parameters(), _MOST_LOGITS // config.vocab_size)
    count = max(_FEWEST_TOKENS, min(_MOST_TOKENS, affordable))
    return count, min(window, count)
