"""The attention operator beside others': who takes part, what is written, and that a wrong answer is never timed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace

import bench_results
import pytest

from edge_qkv import _native
from edge_qkv.bench.attention import command as attention
from edge_qkv.bench.attention.problem import Missing

NAMES = [contestant.name for contestant in attention.CONTESTANTS]
QUICK = ("--depths", "16", "--threads", "1", "--repeats", "3", "--layers", "2")
HAS_EXECUTORCH = bool(importlib.util.find_spec("executorch") and _native.executorch_path())


@pytest.fixture
def in_onnxruntime(monkeypatch):
    """Those that leave ExecuTorch's threads, which the process has once, alone."""
    chosen = tuple(one for one in attention.CONTESTANTS if "ExecuTorch" not in one.name)
    monkeypatch.setattr(attention, "CONTESTANTS", chosen)
    return chosen


def test_every_operator_that_is_there_is_timed(tmp_path):
    options = ("--depths", "16", "130", "--threads", "1", "2", "--repeats", "2", "--layers", "2")
    command = [sys.executable, "-m", "edge_qkv.bench.attention.command", *options, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = bench_results.read(tmp_path, "attention")
    found, absent = content["attention"], {row["operator"] for row in content["attention"]["left_out"]}
    assert content["complete"] and found["threads"] == [1, 2]
    assert all("ExecuTorch" in name for name in absent) and (not absent or not HAS_EXECUTORCH)
    there = [name for name in NAMES if name not in absent]
    assert [(row["depth"], row["operator"]) for row in found["results"]] == [(d, n) for d in (16, 130) for n in there]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in found["results"])
    assert [row["times_faster"]["median"] for row in found["results"] if row["operator"] == attention.FIRST] == [1, 1]
    assert [(row["depth"], row["operator"], row["from"], row["threads"]) for row in found["scaling"]] == [
        (depth, name, 1, 2) for depth in (16, 130) for name in (attention.FP16, attention.INT8)
    ]
    written = (tmp_path / "bench.md").read_text()
    assert all(name in written and name in done.stdout for name in there)
    assert "not measured" in written
    if importlib.util.find_spec("matplotlib"):
        assert attention.INT8 in (tmp_path / "attention.svg").read_text()


def test_several_tokens_are_checked_too(in_onnxruntime):
    found = attention.compare([130], 1, [1], tokens=5, layers=2)
    assert [row["operator"] for row in found["results"]] == [one.name for one in in_onnxruntime]
    assert found["tokens"] == 5 and not any(target.ratios for target in attention.targets(found))


@pytest.mark.parametrize("wrong", [NAMES.index(attention.INT8), 0])
def test_a_wrong_answer_is_an_error(wrong, monkeypatch, capsys):
    right = attention.CONTESTANTS[wrong]

    def doubled(problem):
        bound = right.bind(problem)
        return replace(bound, output=lambda: 2 * bound.output())

    monkeypatch.setattr(attention, "CONTESTANTS", (replace(right, bind=doubled),))
    assert attention.main(QUICK) == 2
    assert f"{right.name} at depth 16 is off by" in capsys.readouterr().err


def test_who_is_not_installed_is_left_out(monkeypatch, capsys):
    def bind(problem):
        raise Missing("it is elsewhere")

    first = attention.CONTESTANTS[0]
    absent = replace(first, name="another", bind=bind)
    monkeypatch.setattr(attention, "CONTESTANTS", (absent, first))
    assert attention.main(QUICK) == 0
    assert "another is left out: it is elsewhere" in capsys.readouterr().out


def test_after_the_time_limit_there_is_no_further_round(in_onnxruntime, capsys):
    found = attention.compare([16], 3, [1], seconds=1e-9, layers=2)
    assert all(len(row["ms"]) == 1 for row in found["results"])
    assert attention.main([*QUICK, "--seconds", "0"]) == 2
    assert "--seconds 0.0: must be above 0" in capsys.readouterr().err


def test_targets_are_of_the_depth_and_threads_they_name():
    ms = {attention.FIRST: [10, 12], attention.FIRST_FP16: [20, 16], attention.FP16: [2, 2], attention.INT8: [1, 1]}
    rows = [{"depth": attention.TARGET_DEPTH, "operator": name, "ms": each} for name, each in ms.items()]
    scaling = [
        {"depth": depth, "operator": attention.FP16, "from": 1, "threads": threads, "ratios": ratios}
        for depth, threads, ratios in ((8192, 2, [9.0]), (attention.TARGET_DEPTH, 2, [1.7]), (32768, 4, [3.0]))
    ]
    result = {"tokens": 1, "results": rows, "scaling": scaling}
    found = attention.targets(result)
    assert [target.ratios for target in found] == [[5, 6], [10, 8], [10, 12], [10, 12], [1.7], []]
    assert [target.met for target in found] == [True, True, True, False, False, None]
    assert "--threads 1 2" in found[-1].note
    others = attention.targets(result | {"results": [row | {"depth": 8192} for row in rows], "scaling": []})
    assert [target.met for target in others] == [None] * len(found)
    prefill = attention.targets(result | {"tokens": 64})
    assert [target.met for target in prefill] == [None] * len(found)
