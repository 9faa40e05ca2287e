"""What an int8 cache costs the bundled model in quality: against the same weights with an fp16 cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge_qkv import Session
from edge_qkv.export import export_package
from edge_qkv.recipe import HELD_TEXT

WINDOW, DEPTH, SCORED, CHUNK = 512, 32768, 2048, 512


@dataclass
class Difference:
    perplexity_fp16: float
    perplexity_int8: float
    same_choice: float  # share of positions with the same likeliest token
    divergence: float  # mean KL(fp16 || int8), nats

    @property
    def change(self) -> float:
        return self.perplexity_int8 / self.perplexity_fp16 - 1


@pytest.fixture(scope="module")
def held_tokens(bundled_checkpoint) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundled_checkpoint / "tokenizer.json"))
    return tokenizer.encode((bundled_checkpoint / HELD_TEXT).read_text(encoding="utf-8")).ids


@pytest.fixture(scope="module")
def packages(bundled_package, bundled_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Packages of the bundled model by cache type, with the same int8 weights, which prefill fastest."""
    int8 = tmp_path_factory.mktemp("int8") / "package"
    export_package("onnx", str(bundled_checkpoint), int8, weights="int8", cache="int8", parity=False)
    return {"fp16": bundled_package("int8")[0], "int8": int8}


def measure(packages: dict[str, Path], contexts: list[list[int]], unscored: int = 0) -> Difference:
    """Both caches over the same contexts, side by side a chunk at a time; the first tokens only fill the caches."""
    losses, same, divergence, count = np.zeros(2), 0, 0.0, 0
    length = len(contexts[0])
    sessions = [Session(packages[cache], context=length, prefill_chunk=CHUNK) for cache in ("fp16", "int8")]
    with sessions[0], sessions[1]:
        for tokens in contexts:
            for session in sessions:
                session.rewind(0)
                session.evaluate(tokens[:unscored])
            for start in range(unscored, len(tokens) - 1, CHUNK):
                targets = torch.tensor(tokens[start + 1 : start + 1 + CHUNK])
                chunk = tokens[start : start + len(targets)]
                fp16, int8 = (torch.from_numpy(session.score(chunk)).log_softmax(-1) for session in sessions)
                losses += [F.nll_loss(scores, targets, reduction="sum").item() for scores in (fp16, int8)]
                same += (fp16.argmax(-1) == int8.argmax(-1)).sum().item()
                divergence += F.kl_div(int8, fp16, reduction="sum", log_target=True).item()
                count += len(targets)
        used = [session.memory()["cache_used"] for session in sessions]
        dim = sessions[0].model.config.only.head_dim
    assert used[1] / used[0] == (dim + 2) / (2 * dim)
    fp16, int8 = (math.exp(loss / count) for loss in losses)
    return Difference(fp16, int8, same / count, divergence / count)


def check(name: str, d: Difference, capsys) -> None:
    with capsys.disabled():
        print(
            f"\nint8 cache, {name}: perplexity {d.perplexity_int8:.3f}, fp16 {d.perplexity_fp16:.3f} "
            f"({d.change:+.3%}); same choice at {d.same_choice:.2%} of positions; KL {d.divergence:.2e} nats"
        )
    assert abs(d.change) < 0.005
    assert d.same_choice > 0.95
    assert 0 < d.divergence < 0.01


def test_perplexity_in_windows_of_the_trained_length(packages, held_tokens, capsys):
    starts = range(0, 16 * WINDOW, WINDOW)
    d = measure(packages, [held_tokens[i : i + WINDOW + 1] for i in starts])
    check(f"windows of {WINDOW}", d, capsys)


@pytest.mark.slow
def test_perplexity_at_full_depth(packages, held_tokens, capsys):
    """One context as deep as it goes, where a token mixes tens of thousands of rounded rows. So far past its training
    the model is bad at its text, with either cache."""
    d = measure(packages, [held_tokens[:DEPTH]], DEPTH - SCORED)
    check(f"the last {SCORED} of {DEPTH}", d, capsys)
