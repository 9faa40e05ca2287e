"""The bundled model: what its report says is true, and its exports keep what it learnt."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from conftest import needs
from edge_qkv import Model, Sampling, Session, attention
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.export import export_package
from edge_qkv.export.progress import silent
from edge_qkv.recipe import HELD_TEXT
from edge_qkv.targets import stored_as
from edge_qkv.training import held_out_loss


@pytest.fixture(scope="module")
def checkpoint(bundled_checkpoint):
    return read_checkpoint(str(bundled_checkpoint))


@pytest.fixture(scope="module")
def decoder(checkpoint):
    return checkpoint.load()


@pytest.fixture(scope="module")
def held_tokens(bundled_checkpoint) -> list[int]:
    """The Tempest, whole."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundled_checkpoint / "tokenizer.json"))
    return tokenizer.encode((bundled_checkpoint / HELD_TEXT).read_text(encoding="utf-8")).ids


@pytest.fixture(scope="module")
def reference(decoder, held_tokens) -> float:
    """The checkpoint's perplexity in windows of the trained context."""
    return math.exp(held_out_loss(decoder, torch.tensor(held_tokens), decoder.config.trained_context))


def test_it_is_a_small_q_mqa_model(checkpoint, bundled_checkpoint):
    config = checkpoint.config
    assert (config.variant, config.positions) == ("Q-MQA", "rotary-conjugate")
    assert sum(file.stat().st_size for file in bundled_checkpoint.iterdir()) < 16e6


def test_the_reported_perplexity_is_measured_again(bundled_checkpoint, reference, held_tokens):
    report = json.loads((bundled_checkpoint / "training.json").read_text())
    assert report["held_out_tokens"] == len(held_tokens)
    assert report["held_out_perplexity"] == pytest.approx(reference, rel=1e-3)


# How much of the perplexity each weight type may cost: over the whole held-out play, or what is read of it in bearable
# time.
@pytest.mark.parametrize(
    ("target", "weights", "allowed", "count"),
    [
        ("onnx", "int4", 0.03, None),
        pytest.param("onnx", "int8", 0.005, None, marks=pytest.mark.slow),
        pytest.param("onnx", "fp32", 0.001, None, marks=pytest.mark.slow),
        pytest.param("executorch", "8da4w", 0.03, 4096, marks=pytest.mark.slow),
    ],
)
def test_quantised_perplexity_stays_near_fp32(
    target, weights, allowed, count, bundled_package, decoder, reference, held_tokens, capsys
):
    package, manifest = bundled_package(weights, target)
    window, held_tokens = manifest["config"]["trained_context"], held_tokens[:count]
    if count is not None:
        reference = math.exp(held_out_loss(decoder, torch.tensor(held_tokens), window))
    total = 0.0
    with Session(package, context=window) as session:
        for start in range(0, len(held_tokens) - 1, window):
            tokens = held_tokens[start : start + window + 1]
            session.rewind(0)
            logits = session.score(tokens[:-1])
            scores = torch.from_numpy(logits)
            total += torch.nn.functional.cross_entropy(scores, torch.tensor(tokens[1:]), reduction="sum").item()
    measured = math.exp(total / (len(held_tokens) - 1))
    parity = manifest["parity"]
    with capsys.disabled():
        print(
            f"\n{target} {weights}: perplexity {measured:.3f}, checkpoint {reference:.3f} "
            f"({measured / reference - 1:+.3%}); greedy choices agree at {parity['top1_agreement']:.1%}"
        )
    assert abs(measured / reference - 1) < allowed
    assert abs(parity["perplexity_change"]) < allowed
    assert parity["input"] == "text" and parity["engine"] == "edge-qkv"


def test_perplexity_with_8_bits_for_executorch_stays_near_fp32(checkpoint, decoder, held_tokens, capsys):
    """Of the decoder whose weights are stored so: lowering a second one takes minutes, and test_executorch.py shows
    that a program computes what that decoder does."""
    needs("executorch")
    from edge_qkv.export.executorch import weights as executorch_weights

    how = stored_as("executorch", "8da8w", None)[1]
    quantised = executorch_weights.load(checkpoint, attention.attend, how, silent)
    tokens, window = torch.tensor(held_tokens[:4096]), decoder.config.trained_context
    measured, reference = (math.exp(held_out_loss(model, tokens, window)) for model in (quantised, decoder))
    with capsys.disabled():
        change = f"{measured / reference - 1:+.3%}"
        print(f"\nexecutorch 8da8w: perplexity {measured:.3f}, checkpoint {reference:.3f} ({change})")
    assert 0 < abs(measured / reference - 1) < 0.03


def test_greedy_text_is_the_decoders(checkpoint, decoder, tmp_path):
    """Golden text: the exported model writes, token by token, what the eager module writes."""
    export_package("onnx", str(checkpoint.path), tmp_path / "package", weights="fp32", cache="fp32", parity=False)
    with Session(tmp_path / "package", context=128) as session:
        prompt = session.model.package.tokenizer().encode("KING HENRY.\n").ids
        written = list(session.generate_tokens(prompt, 64, Sampling(temperature=0)))
    tokens = list(prompt)
    caches = decoder.new_caches(128)
    with torch.no_grad():
        logits, _ = decoder(torch.tensor([tokens]), 0, caches)
        for token in written:
            assert token == int(logits[0, -1].argmax())
            logits, _ = decoder(torch.tensor([[token]]), len(tokens), caches)
            tokens.append(token)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_context_is_read_the_same_in_any_chunks(bundled_package, held_tokens, threads):
    """8,192 tokens, far past one cache split: prefill in other chunks gives the same next-token distribution."""
    package, _ = bundled_package("int8")
    results = []
    with Model(package, threads=threads) as model:
        for chunk in (128, 500):
            with Session(model, context=8192, prefill_chunk=chunk) as session:
                session.evaluate(held_tokens[:8191])
                results.append(session.logits())
                assert session.memory()["cache_used"] == 8191 * model.info.cache_bytes_per_token
    # activations are rounded to int8 a block, cache rows to fp16: a sum in another order may round the other way
    assert np.abs(results[0] - results[1]).max() < 0.05 * results[0].std()
