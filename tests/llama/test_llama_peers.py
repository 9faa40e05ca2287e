"""llama.cpp as a contestant of `edge-qkv bench peers`: the same weights, noise as its cache, both of its attentions."""

from __future__ import annotations

import json

import bench_results
import numpy as np
import pytest

from conftest import TINY, changed
from edge_qkv.bench.__main__ import main
from edge_qkv.bench.package import speed
from edge_qkv.bench.package.random_weights import random_package
from edge_qkv.bench.peers import command as peers
from edge_qkv.bench.peers.engines import open_peer

CONFIG = changed(TINY, heads=8, head_dim=16, width=128, mlp_width=64, max_positions=512, positions="learned")
CONFIG = changed(CONFIG, norm="layernorm", norm_bias=True, mlp="gelu")
KINDS = "llama.cpp", "llama.cpp, no flash attention"


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_noise_up_to_a_depth(tmp_path, kind):
    package = random_package("small", CONFIG, tmp_path, "gguf", "q4_0", "fp16")
    peer, tokens = open_peer(kind, package.path, 1, 512), speed.prompt(40, CONFIG.vocab_size)
    whole = peer.score(tokens)
    assert whole.shape == (40, CONFIG.vocab_size)
    peer.rewind(12)
    for i in range(12, 40):
        after = peer.evaluate(tokens[i : i + 1])
    assert np.abs(after - whole[-1]).max() < 0.1 * whole.std()  # activations are rounded to 8 bits
    peer.fill(300)
    first = peer.evaluate(tokens[:1])
    assert np.isfinite(first).all() and np.abs(first - whole[0]).max() > 0.1 * whole.std()
    peer.rewind(300)
    assert np.array_equal(peer.evaluate(tokens[:1]), first)


def test_llama_cpp_takes_its_turns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "perplexity_change", lambda target, weights, at: 0.01)  # a minute of export
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    options = ("--depths", "0", "400", "--prompts", "32", "--repeats", "2", "--threads", "1", "--output", str(tmp_path))
    assert main(["peers", str(path), *options, "--directory", str(tmp_path / "packages")]) == 0, capsys.readouterr().err
    found = bench_results.read(tmp_path, "peers")
    rows = {row["name"]: row for row in found["contestants"]}
    assert not [row for row in found["left_out"] if "llama" in row["name"]]
    heads = {"llama.cpp": 1, "llama.cpp, GQA-4": 4, "llama.cpp, multi-head": CONFIG.heads}
    for name, count in heads.items():
        for mode in ("", peers.NO_FLASH):
            row = rows[name + mode]
            assert row["cache_bytes_per_token"] == CONFIG.layers * 2 * count * CONFIG.head_dim * 2
            assert [one["depth"] for one in row["decode"]] == [0, 400] and row["prefill"]
            # The same weights, other than those of other variants.
            assert (row["difference"] is None) == (count > 1) and (row["difference"] or 0) < 0.6
    measured = [target for target in found["targets"] if target["ratios"]]
    assert {target["what"].split(",")[0] for target in measured} == {"decode at depth 0"}
    first = [target["what"] for target in measured if target["ours"] == peers.OURS]
    assert first == [f"decode at depth 0, beside llama.cpp{mode}" for mode in ("", peers.NO_FLASH)]
