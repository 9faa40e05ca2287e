"""Every decoder that a GGUF file can hold: llama.cpp's logits and its cache against the eager decoder."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf_variants
from conftest import changed
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.export import export_package
from gguf_graphs import File, gelu_from_table
from gguf_variants import LLAMA, PLAIN, VARIANTS
from llama_file import opened

# Both sides in float32, sums of at most ~100 products in another order, logits of order 1. llama.cpp forms an angle by
# repeated products: at position 95 that is another 1e-5 of the last place.
TOLERANCE = 2e-5
# A GELU's argument beside the border of two fp16 numbers is rounded to either: few are, but later tokens see them.
TABLE_TOLERANCE = 1e-3
# Of the deviation of logits: GELU in fp16 (2^-11 of each activation), and the tanh form (4.7e-4 of an argument of 2).
GELU_ERROR = 0.005
COUNT = 90


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(config) -> (the model file, tokens, the eager decoder's logits [COUNT, V])."""
    made = {}

    @torch.no_grad()
    def make(config):
        if config not in made:
            folder = tmp_path_factory.mktemp("llama")
            checkpoint = gguf_variants.write(folder / "checkpoint", config)
            export_package("gguf", str(checkpoint), folder / "package", weights="f32", cache="fp32", parity=False)
            ids = torch.randint(0, config.vocab_size, (COUNT,), generator=torch.Generator().manual_seed(1))
            logits = read_checkpoint(str(checkpoint)).load()(ids[None])[0][0].numpy()
            made[config] = folder / "package" / "model.gguf", ids.tolist(), logits
        return made[config]

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_eager_decoder(exported, name):
    config, _ = VARIANTS[name]
    path, ids, expected = exported(config)
    file = File.read(path)
    with opened(path) as model:
        logits = model.score(ids)
        parts = [model.score(ids[:40]), model.score(ids[40:60], 40)]  # prefill, a chunk of it, decode
        parts += [model.score([token], past) for past, token in enumerate(ids[60:], 60)]
        model.score(ids[::-1])
        again = np.concatenate([model.score(ids[:50]), model.score(ids[20:], 20)[30:]])  # after a rewind to 20
    error, spread = np.abs(logits - expected).max(), expected.std()
    if config.only.mlp == "swiglu":
        assert error < TOLERANCE
        tolerance = TOLERANCE
    else:
        # As near as the table lets it be to what the file says, and that as near as the forms are to each other.
        to_table = np.abs(logits - file.logits(ids, gelu_from_table))
        assert np.median(to_table) < TOLERANCE and to_table.max() < TABLE_TOLERANCE
        assert error < GELU_ERROR * spread
        tolerance = TABLE_TOLERANCE
    np.testing.assert_allclose(np.concatenate(parts), logits, rtol=0, atol=tolerance)
    np.testing.assert_allclose(again, logits, rtol=0, atol=tolerance)
    form = np.abs(file.logits(ids) - expected).max()
    print(
        f"{file.architecture:<10} {name:<40} {config.only.mlp:<10} logits of deviation {spread:.2f}, error {error:.1e}",
        end="",
    )
    print("" if config.only.mlp == "swiglu" else f", without the table {form:.1e}")


@pytest.mark.parametrize("config", [LLAMA, PLAIN], ids=["llama", "deepseek2"])
@pytest.mark.parametrize(("cache", "flash"), [("fp32", True), ("fp16", False), ("fp16", True)])
def test_other_caches_and_kernels(exported, config, cache, flash):
    """An fp16 cache rounds rows by 2^-11, and flash attention does so whatever the cache."""
    path, ids, expected = exported(config)
    with opened(path, cache=cache, flash=flash) as model:
        logits = np.concatenate([model.score(ids[:60]), *(model.score([t], i) for i, t in enumerate(ids[60:], 60))])
    assert TOLERANCE < np.abs(logits - expected).max() < 0.02 * expected.std()


@pytest.mark.parametrize(("config", "one_row"), [(LLAMA, False), (PLAIN, True)], ids=["llama", "deepseek2"])
def test_the_cache_costs_what_the_package_says(exported, config, one_row):
    """What llama.cpp reports; with one row for keys and values it is half of it."""
    path, _, _ = exported(config)
    tokens = 8192
    with opened(path, tokens, "fp16", flash=False, batch=64) as model:
        (line,) = (line for line in model.log.splitlines() if "llama_kv_cache: size =" in line)
    print(line)
    keys, values = (float(mib) for mib in re.findall(r"[KV] \(f16\): +([0-9.]+) MiB", line))
    manifest = File.read(path).metadata
    assert manifest["edge_qkv.kv_heads"] == "1"
    row = len(config.layers) * config.only.head_dim * 2 * tokens / 2**20
    assert (keys, values) == (row, 0.0 if one_row else row)


def test_a_window_as_long_as_the_context_changes_nothing(exported):
    path, ids, expected = exported(changed(LLAMA, window=LLAMA.max_positions))
    with opened(path) as model:
        np.testing.assert_allclose(model.score(ids), expected, atol=TOLERANCE)


def test_a_state_goes_on_where_it_was(exported, tmp_path: Path):
    """llama.cpp's own state, of the cache with one row too."""
    for config in (LLAMA, PLAIN):
        path, ids, expected = exported(config)
        with opened(path) as model:
            model.score(ids[:50])
            state = model.state()
            model.score(ids[::-1])
            model.restore(state)
            np.testing.assert_allclose(model.score(ids[50:], 50), expected[50:], atol=TOLERANCE)
