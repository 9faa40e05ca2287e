"""The recipe: text in, a checkpoint out; a stopped run goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from edge_qkv import InputError
from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.cli import main
from edge_qkv.recipe import Recipe
from edge_qkv.training import END_OF_TEXT, held_out_loss, split_held_out, train

SIZES = dict(layers=1, width=32, heads=4, mlp_width=48)
OPTIONS = dict(variant="Q-MQA", query="projected", positions="rotary-conjugate") | SIZES
RECIPE = Recipe(steps=8, batch=2, context=32, warmup=2, evaluate_every=4, held_out=0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "corpus.txt"
    verses = [f"Line {i}: the {('quick', 'slow', 'old')[i % 3]} fox and the {i % 7} dogs.\n" for i in range(400)]
    file.write_text("".join(verses))
    return file


def test_training_learns_and_writes_a_checkpoint(data, tmp_path, capsys):
    command = ["train", "--data", data, "--output", tmp_path / "out", "--steps", 30, "--batch", 4, "--context", 32]
    command += ["--layers", 1, "--width", 32, "--heads", 4, "--mlp-width", 48, "--vocab-size", 300]
    command += ["--learning-rate", 0.01, "--warmup", 5, "--weights", "fp32", "--held-out", 0.1]
    assert main([str(word) for word in command]) == 0
    assert "bits a byte" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/training.json").read_text())
    assert report["held_out_perplexity"] < 100  # 300 when it has learnt nothing
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "held-out.txt",
        "model.safetensors",
        "tokenizer.json",
        "training.json",
    ]
    checkpoint = read_checkpoint(str(tmp_path / "out"))
    assert checkpoint.config.variant == "Q-MQA" and checkpoint.config.max_positions == 32768
    tokenizer = checkpoint.tokenizer.read_text()
    from tokenizers import Tokenizer

    held = split_held_out(data.read_text(), 0.1)[1]
    ids = torch.tensor(Tokenizer.from_str(tokenizer).encode(held).ids)
    loss = held_out_loss(checkpoint.load(), ids, 32)
    assert math.exp(loss) == pytest.approx(report["held_out_perplexity"], rel=1e-3)
    assert report["held_out_bits_per_byte"] == pytest.approx(
        loss * len(ids) / math.log(2) / len(held.encode()), rel=1e-3
    )


def test_a_stopped_run_goes_on_exactly(data, tmp_path, monkeypatch):
    """Stopped by Ctrl-C in the middle of a step, the weights are those of an unbroken run."""
    import edge_qkv.training as training

    train(data, tmp_path / "whole", RECIPE, OPTIONS, 300, "fp32")
    calls = 0
    real = torch.nn.utils.clip_grad_norm_

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of the sixth step
        return real(*arguments)

    monkeypatch.setattr(training.torch.nn.utils, "clip_grad_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "broken", RECIPE, OPTIONS, 300, "fp32")
    monkeypatch.undo()
    assert not (tmp_path / "broken/model.safetensors").exists()
    with pytest.raises(InputError, match="other options"):
        train(data, tmp_path / "broken", Recipe(steps=9), OPTIONS, 300, "fp32")
    train(data, tmp_path / "broken", RECIPE, OPTIONS, 300, "fp32")
    whole, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_a_finished_or_foreign_directory_is_left_alone(data, tmp_path, capsys):
    """Nothing is written before a run is accepted, and no run writes over a finished one."""
    train(data, tmp_path / "done", RECIPE, OPTIONS, 300, "fp16")
    before = {file.name: file.read_bytes() for file in (tmp_path / "done").iterdir()}
    with pytest.raises(InputError, match="holds a finished checkpoint"):
        train(data, tmp_path / "done", RECIPE, OPTIONS, 300, "fp16")
    assert {file.name: file.read_bytes() for file in (tmp_path / "done").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        train(data, tmp_path / "file", RECIPE, OPTIONS, 300, "fp16")
    (tmp_path / "short.txt").write_text("too short\n")
    with pytest.raises(InputError, match="too short"):
        train(tmp_path / "short.txt", tmp_path / "new", RECIPE, OPTIONS, 300, "fp16")
    assert not (tmp_path / "new").exists()


def test_an_unfinished_run_is_bound_to_its_data(data, tmp_path, monkeypatch):
    import edge_qkv.training as training

    real = torch.nn.utils.clip_grad_norm_

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(training.torch.nn.utils, "clip_grad_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "out", RECIPE, OPTIONS, 300, "fp16")
    monkeypatch.undo()
    other = tmp_path / "other.txt"
    other.write_text(data.read_text() + "one more line\n")
    with pytest.raises(InputError, match="other options or data"):
        train(other, tmp_path / "out", RECIPE, OPTIONS, 300, "fp16")
    (tmp_path / "out/training-state.pt").write_bytes(b"junk")
    with pytest.raises(InputError, match="is damaged"):
        train(data, tmp_path / "out", RECIPE, OPTIONS, 300, "fp16")


def test_divergence_is_an_error_and_leaves_no_checkpoint(data, tmp_path):
    recipe = Recipe(steps=200, batch=2, context=32, warmup=0, learning_rate=0.999, weight_decay=9.9, held_out=0.1)
    with pytest.raises(InputError, match=r"diverged|do not fit"):
        train(data, tmp_path / "out", recipe, OPTIONS, 300, "fp16")
    assert not (tmp_path / "out/model.safetensors").exists()


def test_held_out_text_starts_with_a_document():
    text = f"one\n{END_OF_TEXT}\ntwo two\n{END_OF_TEXT}\nthree\n"
    assert split_held_out(text, 0.5) == (f"one\n{END_OF_TEXT}\ntwo two\n", "three\n")
    assert split_held_out("a\nb\nc\nd\n", 0.5) == ("a\nb\nc\n", "d\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "absent.txt"], "cannot be read"),
        (["--variant", "K=V"], "variant 'K=V' is not known"),
        (["--steps", "0"], "--steps 0"),
        (["--heads", "5"], "multiple of --heads 5"),
        (["--context", "100000"], "too short"),
        (["--width", "100000000", "--heads", "1"], "parameters; this recipe is for at most"),
        (["--batch", "100000000000"], "--batch 100000000000"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--vocab-size", "-1"], "--vocab-size -1"),
        (["--variant", "Q=K=V", "--query", "identity"], "query"),
    ],
)
def test_bad_options_get_one_sentence(options, words, data, tmp_path, capsys):
    base = ["train", "--data", str(data), "--output", str(tmp_path / "out"), "--vocab-size", "300"]
    assert main(base + options) == 2
    assert words in capsys.readouterr().err
