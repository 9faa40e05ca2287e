"""The recipe: text in, a checkpoint out; a stopped run goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

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
        "training-state.pt",
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


@pytest.fixture(autouse=True)
def not_in_the_background():
    """A shell ignores SIGINT for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stop_at(monkeypatch, step: int, *signals: int) -> None:
    """Sends this process signals in the middle of a step."""
    calls, real = 0, torch.nn.utils.clip_grad_norm_

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == step:
            for each in signals:
                os.kill(os.getpid(), each)
        return real(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)


def weights(directory):
    return load_file(directory / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A finished run, not to be changed."""
    output = tmp_path_factory.mktemp("whole")
    train(data, output, RECIPE, OPTIONS, 300, "fp32")
    return output


@pytest.mark.parametrize(
    ("signals", "handler"),
    [
        ([signal.SIGINT], signal.default_int_handler),
        ([signal.SIGTERM], signal.default_int_handler),  # as the command line has it
        ([signal.SIGTERM], lambda *_: None),
        ([signal.SIGTERM, signal.SIGTERM], lambda *_: None),
        ([signal.SIGINT, signal.SIGTERM], lambda *_: None),
    ],
)
def test_a_stopped_run_goes_on_exactly(signals, handler, whole, data, tmp_path, monkeypatch):
    """Stopped in the middle of the sixth step, the last evaluation being at the fourth."""
    before = {each: signal.signal(each, handler) for each in set(signals)}
    try:
        stop_at(monkeypatch, 6, *signals)
        with pytest.raises(KeyboardInterrupt):
            train(data, tmp_path / "broken", RECIPE, OPTIONS, 300, "fp32")
        assert all(signal.getsignal(each) is handler for each in before)
    finally:
        for each, was in before.items():
            signal.signal(each, was)
    monkeypatch.undo()
    assert torch.load(tmp_path / "broken/training-state.pt")["state"]["step"] == 6
    assert not (tmp_path / "broken/model.safetensors").exists()
    with pytest.raises(InputError, match="other options"):
        train(data, tmp_path / "broken", Recipe(steps=9), OPTIONS, 300, "fp32")
    train(data, tmp_path / "broken", RECIPE, OPTIONS, 300, "fp32")
    assert equal(weights(whole), weights(tmp_path / "broken"))


@pytest.mark.parametrize(("call", "code"), [("main", 130), ("train", -signal.SIGTERM)])
def test_a_process_that_is_ended_saves_its_last_step(call, code, data, tmp_path):
    """By SIGTERM, as Docker and Slurm do: the command line, and a program that has no handler for it."""
    program = f"""
import os, signal, torch
from pathlib import Path
from edge_qkv.cli import main
from edge_qkv.recipe import Recipe
from edge_qkv.training import train
real, left = torch.nn.utils.clip_grad_norm_, [None] * 2
def ended(*arguments):
    left.pop() if left else os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments)
torch.nn.utils.clip_grad_norm_ = ended
if {call!r} == "main":
    options = "--layers 1 --width 32 --heads 4 --mlp-width 48 --vocab-size 300 --context 32 --batch 2".split()
    raise SystemExit(main(["train", "--data", {str(data)!r}, "--output", "out", *options]))
train(Path({str(data)!r}), Path("out"), Recipe(batch=2, context=32), {OPTIONS!r}, 300, "fp32")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert torch.load(tmp_path / "out/training-state.pt")["state"]["step"] == 3


def test_an_ignored_signal_stays_ignored(whole, data, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 6, signal.SIGTERM)
        train(data, tmp_path / "out", RECIPE, OPTIONS, 300, "fp32")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert equal(weights(whole), weights(tmp_path / "out"))


@pytest.mark.parametrize("stopped_at", [None, 3, 7])
def test_a_run_is_extended(stopped_at, whole, data, tmp_path, monkeypatch, capsys):
    """A finished or stopped one goes on with more steps, on the longer schedule; and may be stopped in them."""
    output = tmp_path / "out"
    if stopped_at is None:
        shutil.copytree(whole, output)
    else:
        stop_at(monkeypatch, stopped_at, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(data, output, RECIPE, OPTIONS, 300, "fp32")
        monkeypatch.undo()
    done = stopped_at or RECIPE.steps
    longer = replace(RECIPE, steps=12)
    for fewer in range(1, RECIPE.steps):
        with pytest.raises(InputError, match=f"--steps {fewer}: the run in .* is one of 8; give as many or more"):
            train(data, output, replace(RECIPE, steps=fewer), OPTIONS, 300, "fp32")
    capsys.readouterr()
    stop_at(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(data, output, longer, OPTIONS, 300, "fp32")
    monkeypatch.undo()
    assert "the schedule of 8 steps becomes one of 12" in capsys.readouterr().out
    report = train(data, output, longer, OPTIONS, 300, "fp32")
    assert [row["step"] for row in report["history"]] == [4, 8, 12]
    assert report["recipe"]["steps"] == 12 and report["extended_at"] == [done]
    trained = weights(output)
    assert not equal(trained, weights(whole)) and all(tensor.isfinite().all() for tensor in trained.values())
    with pytest.raises(InputError, match="holds a finished checkpoint of 12 steps; give more --steps"):
        train(data, output, longer, OPTIONS, 300, "fp32")
    (output / "training-state.pt").unlink()
    with pytest.raises(InputError, match=r"without the training-state\.pt"):
        train(data, output, replace(longer, steps=16), OPTIONS, 300, "fp32")


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
    stop_at(monkeypatch, 1, signal.SIGINT)
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
