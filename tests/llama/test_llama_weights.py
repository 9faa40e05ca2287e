"""What quantised weights cost, on models that were trained for it: perplexity in llama.cpp against the checkpoint's."""

from __future__ import annotations

import numpy as np
import pytest

from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.export import export_package, parity
from edge_qkv.recipe import Recipe
from edge_qkv.tokenizer import load_tokenizer
from edge_qkv.training import train
from llama_file import opened

CONTEXT = 64
SIZES = dict(layers=2, width=256, heads=4, mlp_width=512)  # rows of whole blocks of 256, which q4_k has
RECIPE = Recipe(steps=60, batch=8, context=CONTEXT, warmup=10, learning_rate=3e-3, dropout=0.0, evaluate_every=60)


@pytest.fixture(scope="module", params=["rotary-on-read", "none"])
def trained(request, tmp_path_factory, bundled_checkpoint):
    """A checkpoint of some seconds' training on the bundled text, and tokens that it was not trained on."""
    output = tmp_path_factory.mktemp("trained") / request.param
    options = dict(variant="Q-MQA", query="projected", positions=request.param) | SIZES
    report = train(bundled_checkpoint / "held-out.txt", output, RECIPE, options, 512, "fp32")
    assert report["held_out_perplexity"] < 250  # 512 when it has learnt nothing
    tokenizer = load_tokenizer(output / "tokenizer.json", 512)
    return output, tokenizer.encode((output / "held-out.txt").read_text()).ids[: 16 * CONTEXT]


def test_the_parity_report_is_llama_cpps(trained, tmp_path):
    report = export_package("gguf", str(trained[0]), tmp_path / "package", weights="f32", cache="fp32")["parity"]
    assert (report["engine"], report["input"]) == ("llama.cpp", "text")
    assert report["max_logit_error"] < 1e-4 and report["top1_agreement"] > 0.999


# The most that perplexity may change.
@pytest.mark.parametrize(("weights", "most"), [("f16", 0.0005), ("q8_0", 0.003), ("q4_0", 0.05), ("q4_k", 0.05)])
def test_perplexity(trained, tmp_path, weights, most):
    checkpoint, tokens = trained
    manifest = export_package("gguf", str(checkpoint), tmp_path / "package", weights=weights, parity=False)
    windows = [tokens[i : i + CONTEXT] for i in range(0, len(tokens), CONTEXT)]
    decoder = read_checkpoint(str(checkpoint)).load()
    expected = np.concatenate([parity.score_eagerly(decoder, window) for window in windows])
    with opened(tmp_path / "package" / "model.gguf", CONTEXT * 2, "fp16") as model:
        logits = np.concatenate([model.score(window) for window in windows])
    report = parity.compare(expected, logits, tokens)
    size = manifest["files"]["model.gguf"]["bytes"]
    print(
        f"{manifest['architecture']:<9} {weights:<4} {size:>9,} bytes, perplexity "
        f"{report['perplexity_checkpoint']:.3f} -> {report['perplexity_export']:.3f} "
        f"({report['perplexity_change']:+.3%}), logit error mean {report['mean_logit_error']:.1e}"
    )
    assert abs(report["perplexity_change"]) < most
