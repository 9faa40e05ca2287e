"""Every format gives the logits of an independent forward pass, and hands its tensors out lazily."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import changed
from edge_qkv.checkpoints import Checkpoint, read_checkpoint
from edge_qkv.checkpoints import random as random_format
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.layer import biases
from edge_qkv.model import Decoder
from edge_qkv.presets import preset
from samples import QUERY_MODES_2510, VARIANTS_2606, reference_logits, write_2510, write_2606

IDS = [3, 96, 0, 41, 41, 7, 55, 12, 88, 23, 1]


def check(path: Path, tolerance: float = 1e-5) -> Checkpoint:
    """The reader and the decoder against the reference, and every promise of `Checkpoint`."""
    checkpoint = read_checkpoint(str(path))
    model = checkpoint.load()
    assert not model.training
    assert list(checkpoint.tensors) == list(Decoder(checkpoint.config).weight_names())
    assert all(p.dtype == torch.float32 and not p.is_meta for p in model.parameters())
    with torch.no_grad():
        logits = model(torch.tensor([IDS]))[0][0].numpy()  # [T, V]
    expected = reference_logits(path, IDS)
    assert np.abs(expected).max() > 0.5  # a reference of zeros would agree with anything
    np.testing.assert_allclose(logits, expected, rtol=tolerance, atol=tolerance)
    return checkpoint


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("variant", VARIANTS_2606)
def test_paper_2606_variant_gives_the_published_codes_logits(tmp_path, variant, bias, tied):
    write_2606(tmp_path / "model.pt", variant, bias=bias, tied=tied)
    config = check(tmp_path / "model.pt").config
    assert config.variant == {"GQA": "GQA-2", "Q-GQA": "Q-GQA-2"}.get(variant, variant)
    assert (config.only.biases, config.tied_head) == (biases(bias, bias), tied)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed(tmp_path, prefix):
    write_2606(tmp_path / "a.pt", "QKV", prefix=prefix)
    write_2510(tmp_path / "b.pt", "original", prefix=prefix)
    check(tmp_path / "a.pt")
    check(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "options",
    [
        {"norm_bias": False},
        {"mask_buffers": False},
        {"eps": 0.1},
        {"stored_head": True},
        {"legacy": True},
        {"layers": 12, "width": 24, "heads": 3},
        {"width": 24, "heads": 2, "groups": 1},  # head_dim 12
        {"dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["Q-MQA", "Q-K=V"])
def test_paper_2606_options(tmp_path, variant, options):
    write_2606(tmp_path / "model.pt", variant, **options)
    check(tmp_path / "model.pt")


@pytest.mark.parametrize("variant", ["GQA", "Q-GQA"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_groups_are_told_by_the_tensors(tmp_path, variant, groups):
    write_2606(tmp_path / "model.pt", variant, heads=8, groups=groups)
    assert check(tmp_path / "model.pt").config.only.kv_heads == groups


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mode", QUERY_MODES_2510)
def test_paper_2510_query_mode_gives_the_published_codes_logits(tmp_path, mode, bias, tied):
    write_2510(tmp_path / "ckpt.pt", mode, bias=bias, tied=tied)
    config = check(tmp_path / "ckpt.pt").config
    assert config.only.query == {"original": "projected"}.get(mode, mode)
    assert (config.only.sharing, config.only.head_dim, config.norm_bias) == ("qkv", 6, bias)


@pytest.mark.parametrize("mode", QUERY_MODES_2510)
def test_published_head_size_62(tmp_path, mode):
    write_2510(tmp_path / "ckpt.pt", mode, layers=1, heads=12, head_size=62)
    config = check(tmp_path / "ckpt.pt").config
    assert (config.only.head_dim, config.width) == (62, 744)


@pytest.mark.parametrize("options", [{"stored_head": False}, {"width": 40}, {"scale": 0.9}, {"legacy": True}], ids=str)
def test_paper_2510_options(tmp_path, options):
    write_2510(tmp_path / "ckpt.pt", "original", **options)
    check(tmp_path / "ckpt.pt")


def test_half_precision_stays_half_until_it_is_cast(tmp_path):
    write_2606(tmp_path / "model.pt", "QKV", dtype=torch.bfloat16)
    checkpoint = check(tmp_path / "model.pt", tolerance=1e-4)
    assert {load().dtype for load in checkpoint.tensors.values()} == {torch.bfloat16}


def test_format_is_found_whatever_the_file_is_called(tmp_path):
    write_2606(tmp_path / "a", "MQA")
    write_2510(tmp_path / "b.bin", "residual")
    native(tmp_path / "c.pt")
    assert read_checkpoint(str(tmp_path / "a")).format == "arXiv 2606.04032"
    assert read_checkpoint(str(tmp_path / "b.bin")).format == "arXiv 2510.23912"
    assert read_checkpoint(str(tmp_path / "c.pt")).format == "edge-qkv"
    assert read_checkpoint("random:300M").format == "random"


def test_tokenizer_is_found_beside_the_file(tmp_path):
    write_2606(tmp_path / "model.pt", "QKV")
    assert read_checkpoint(str(tmp_path / "model.pt")).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_checkpoint(str(tmp_path / "model.pt")).tokenizer == tmp_path / "tokenizer.json"


# ---- our own ----

CONFIG = ModelConfig.uniform(
    vocab_size=97,
    max_positions=64,
    layers=2,
    width=32,
    heads=4,
    head_dim=8,
    kv_heads=1,
    mlp_width=80,
    sharing="q-k=v",
    positions="learned",
)


def native(directory: Path, config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Decoder:
    """Writes a native checkpoint and returns the module it holds."""
    model = Decoder(config).eval()
    model.init_weights(torch.Generator().manual_seed(5))
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    state = model.state_dict()
    save_file({name: state[name].to(dtype) for name in model.weight_names()}, directory / "model.safetensors")
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_head": False, "biases": biases(True, True), "norm_bias": True},
        {"positions": "rotary-conjugate", "mlp": "swiglu", "norm": "rmsnorm"},
        {"positions": "rotary-on-read", "mlp": "geglu"},
    ],
    ids=str,
)
def test_native_directory_gives_the_saved_modules_logits(tmp_path, changes):
    model = native(tmp_path, changed(CONFIG, **changes))
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.config == model.config
    assert list(checkpoint.tensors) == list(model.weight_names())
    ids = torch.tensor([IDS])
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.load()(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        torch.nn.DataParallel,
        lambda model: torch.compile(torch.nn.DataParallel(model)),
        lambda model: torch.nn.DataParallel(torch.compile(model)),
    ],
    ids=["compiled", "parallel", "compiled parallel", "parallel compiled"],
)
def test_a_native_directory_may_hold_the_names_of_a_wrapped_module(tmp_path, wrap):
    model = native(tmp_path)
    wrapped = wrap(model).state_dict()
    kept = {name: x for name, x in wrapped.items() if name.endswith(tuple(model.weight_names()))}
    assert not kept.keys() & set(model.weight_names())
    save_file(kept, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(str(tmp_path))
    assert list(checkpoint.tensors) == list(model.weight_names())
    assert all(torch.equal(load(), model.state_dict()[name]) for name, load in checkpoint.tensors.items())
    name = model.weight_names()[0]
    save_file(kept | {name: model.state_dict()[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"model.safetensors: tensor '{name}' occurs twice"):
        read_checkpoint(str(tmp_path))


def test_loaded_model_survives_the_removal_of_its_file(tmp_path):
    model = native(tmp_path / "c")
    loaded = read_checkpoint(str(tmp_path / "c")).load()
    shutil.rmtree(tmp_path / "c")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids)[0], model(ids)[0], rtol=0, atol=0)


def test_tied_head_stays_one_tensor(tmp_path):
    native(tmp_path)
    model = read_checkpoint(str(tmp_path)).load()
    assert model.head.weight is model.embedding.weight


# ---- random ----


def test_random_weights_are_reproducible_and_like_gpt2s(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(CONFIG, width=256, head_dim=64).to_dict()))
    first, second = (read_checkpoint(f"random:{tmp_path / 'config.json'}") for _ in range(2))
    for name, load in first.tensors.items():
        assert torch.equal(load(), second.tensors[name]())
    assert first.tensors["embedding.weight"]().std() == pytest.approx(0.02, rel=0.05)
    assert first.tensors["layers.0.mlp.down.weight"]().std() == pytest.approx(0.01, rel=0.05)  # / sqrt(2 * layers)
    one, other = (first.tensors[f"layers.{i}.mlp.up.weight"]() for i in (0, 1))
    assert not torch.equal(one, other)
    assert torch.isfinite(first.load()(torch.tensor([IDS]))[0]).all()


def test_random_preset_makes_one_tensor_at_a_time(monkeypatch):
    made = []
    make = random_format._make
    monkeypatch.setattr(random_format, "_make", lambda name, *rest: made.append(name) or make(name, *rest))
    checkpoint = read_checkpoint("random:1.2B/Q-MQA")
    assert checkpoint.config == preset("1.2B/Q-MQA") and not made
    assert checkpoint.tensors["layers.21.attention.key.weight"]().shape == (64, 2048)
    assert made == ["layers.21.attention.key.weight"]


# ---- laziness ----


def test_opening_a_large_file_does_not_read_it(tmp_path):
    write_2606(tmp_path / "model.pt", "QKV", layers=2, width=1024, heads=8, inner=4096, vocab=20000, positions=128)
    size = (tmp_path / "model.pt").stat().st_size
    script = (
        "import resource, sys\n"
        "import torch\n"
        "from edge_qkv.checkpoints import read_checkpoint\n"
        "import edge_qkv.model\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "checkpoint = read_checkpoint(sys.argv[1])\n"
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert size > 150e6 and int(run.stdout) < size / 4


# ---- without PyTorch ----

_BLOCKED = (
    "import sys\n"
    "for name in ('torch', 'safetensors'):\n"
    "    sys.modules[name] = None\n"  # makes `import torch` raise ImportError
    "from edge_qkv.checkpoints import read_checkpoint\n"
    "from edge_qkv.errors import InputError\n"
)


def without_torch(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", _BLOCKED + code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_config_is_read_without_torch(tmp_path):
    native(tmp_path)
    code = "c = read_checkpoint(sys.argv[1])\nprint(c.config.variant, c.format)\n"
    assert without_torch(code, tmp_path).split() == ["Q-MQA", "edge-qkv"]
    assert without_torch(code, "random:1.2B/Q-GQA-8").split() == ["Q-GQA-8", "random"]


@pytest.mark.parametrize("use", ["c.load()", "c.tensors['embedding.weight']()", "list(c.tensors)", "len(c.tensors)"])
def test_weights_without_torch_say_what_to_install(tmp_path, use):
    native(tmp_path)
    code = f"c = read_checkpoint(sys.argv[1])\ntry:\n    {use}\nexcept InputError as error:\n    print(error)\n"
    message = without_torch(code, tmp_path)
    assert "needs PyTorch: pip install 'edge-qkv[export]'" in message and str(tmp_path) in message


def test_pickled_file_without_torch_says_what_to_install(tmp_path):
    write_2606(tmp_path / "model.pt", "QKV")
    code = "try:\n    read_checkpoint(sys.argv[1])\nexcept InputError as error:\n    print(error)\n"
    assert "needs PyTorch: pip install 'edge-qkv[export]'" in without_torch(code, tmp_path / "model.pt")


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys\nimport edge_qkv.checkpoints\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_random_needs_a_known_preset_or_a_config():
    with pytest.raises(InputError, match=r"random:9B: .*300M, 1\.2B.*config\.json"):
        read_checkpoint("random:9B")
