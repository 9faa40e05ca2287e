"""The command line where memory is short and conversations go on: budgets, overflow, save and restore, pack."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edge_qkv import Sampling, Session
from edge_qkv.bench.package import snapshots
from edge_qkv.cli import main
from edge_qkv.planning import plan


def _json(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    assert main([str(a) for a in (*arguments, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


def _refused(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("edge-qkv: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def package(bundled_package) -> Path:
    return bundled_package("int4")[0]


RUN = ("--prompt", "KING HENRY.\n", "--max-tokens", "12", "--seed", "5", "--threads", "2")


def test_a_budget_gives_the_longest_context_it_holds(package, capsys):
    needed = plan(package, context=3000, prefill_chunk=128, threads=2).total
    figures = _json(capsys, "run", package, *RUN, "--memory", needed)["figures"]
    assert figures["context"] == plan(package, memory=needed, prefill_chunk=128, threads=2).context >= 3000
    assert _json(capsys, "run", package, *RUN, "--memory", "1GB", "--context", "max")["figures"]["context"] == 32768
    assert _json(capsys, "run", package, *RUN, "--memory", "1GB", "--context", "1,777")["figures"]["context"] == 1777


def test_a_conversation_that_outgrows_the_budget_is_told_so(package, capsys):
    budget = ("--threads", "2", "--memory", plan(package, context=10, prefill_chunk=128, threads=2).total)
    held = _json(capsys, "run", package, "--tokens", "1", "--max-tokens", "1", *budget)["figures"]["context"]
    message = _refused(capsys, "run", package, "--tokens", ",".join(["1"] * (held + 1)), *budget)
    assert f"{held + 1} more tokens do not fit: 0 of" in message and f"(its memory budget holds {held})" in message


def test_benchmarks_go_as_far_as_the_model_does(tiny_package, capsys):
    found = _json(capsys, "bench", tiny_package, "--only", "decode", "--repeats", 1)
    assert [row["depth"] for row in found["decode"]["depths"]] == [0, 95]
    assert snapshots.main([str(tiny_package), "--repeats", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 95


def test_what_a_budget_does_not_hold_is_refused_with_what_would_fit(package, capsys):
    needed = plan(package, context=32768, prefill_chunk=128, threads=2).total
    message = _refused(capsys, "run", package, *RUN, "--context", "32768", "--memory", needed - 5_000_000)
    assert "short" in message and "int8 cache" in message and "a context of" in message
    assert "Even a context of 1 token needs" in _refused(capsys, "run", package, *RUN, "--memory", "10MB")
    assert "--context" in _refused(capsys, "run", package, *RUN, "--context", "many")
    assert "no size" in _refused(capsys, "run", package, *RUN, "--memory", "much")


def test_a_conversation_goes_on_where_it_was_saved(package, tmp_path, capsys):
    saved = tmp_path / "story"
    whole = _json(capsys, "run", package, *RUN[:2], "--max-tokens", "24", "--seed", "5")
    first = _json(capsys, "run", package, *RUN, "--save", saved)
    assert os.listdir(tmp_path) == ["story"]
    rest = _json(capsys, "run", package, "--tokens", "", *RUN[2:], "--restore", saved)
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert rest["figures"]["timing"]["prefill_tokens"] == 0
    assert rest["figures"]["tokens"] == whole["figures"]["tokens"]


def test_a_context_that_overflows_says_what_was_dropped(package, capsys):
    options = ("--context", "24", "--overflow", "window", "--sinks", "2", "--window", "10", "--max-tokens", "60")
    assert main(["run", str(package), *RUN, *options]) == 0
    assert "tokens of the conversation were dropped" in capsys.readouterr().err
    figures = _json(capsys, "run", package, *RUN, *options)["figures"]
    assert "belong to the overflow policy" in _refused(capsys, "run", package, *RUN, "--window", "10")
    assert figures["dropped"] > 24 and figures["finish"] == "max_tokens"
    assert "fewer than the context" in _refused(capsys, "run", package, *RUN, *options[:-2], "--window", "22")


def test_files_that_cannot_be_used_are_refused(package, tiny_package, tmp_path, capsys):
    saved = tmp_path / "story"
    _json(capsys, "run", package, *RUN, "--save", saved)
    assert "another model" in _refused(capsys, "run", tiny_package, *RUN, "--restore", saved)
    missing = tmp_path / "missing"
    assert f"--restore {missing}" in _refused(capsys, "run", tmp_path, *RUN, "--restore", missing)  # before loading
    assert f"packed = {missing}: is not a directory" in _refused(capsys, "run", package, *RUN, "--packed", missing)
    assert f"spill = {saved}: is not a directory" in _refused(capsys, "run", package, *RUN, "--spill", saved)
    assert "--save" in _refused(capsys, "run", package, *RUN, "--save", tmp_path / "no" / "story")


def test_packed_weights_are_found_where_they_were_put(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = _json(capsys, "run", package, *RUN)
    assert main(["pack", str(package)]) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"{tmp_path / 'edge-qkv'}: packed; ") and first.rstrip().endswith("MiB on disk")
    assert main(["pack", str(package)]) == 0
    again = capsys.readouterr()
    assert again.out == first.replace(": packed;", ": was packed already;") and again.err == ""
    assert main(["plan", str(package)]) == 0
    assert "weights packed" in capsys.readouterr().out
    packed = _json(capsys, "run", package, *RUN)
    assert packed["tokens"] == before["tokens"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert not _json(capsys, "run", package, *RUN, "--packed", elsewhere)["figures"]["packed"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    assert _json(capsys, "run", package, *RUN, "--packed", tmp_path / "edge-qkv")["figures"]["packed"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packed["figures"]["packed"] and not before["figures"]["packed"]
    planned = _json(capsys, "plan", package, "--context", "1024")
    assert planned["weights_anonymous"] == 0
    assert _json(capsys, "plan", package, "--context", "1024", "--no-packed")["weights_anonymous"] > 0


@pytest.mark.parametrize("stop", ["ING", "\n", "him", "o"])
def test_a_stop_string_is_no_part_of_what_is_saved(package, tmp_path, capsys, stop):
    """Tokens of several characters: one that the stop string begins in goes whole."""
    saved, options = tmp_path / "saved", ("--seed", "5", "--max-tokens", "60")
    whole = _json(capsys, "run", package, "--prompt", "KING HENRY.\n", *options)["text"]
    assert stop in whole
    first = _json(capsys, "run", package, "--prompt", "KING HENRY.\n", *options, "--stop", stop, "--save", saved)
    assert first["text"] == whole[: whole.index(stop)] and first["figures"]["finish"] == "stop"
    with Session(package) as session:
        session.restore(saved)
        tokenizer = session.model.package.tokenizer()
        held = tokenizer.decode(session.tokens).removeprefix("KING HENRY.\n")
        assert first["text"].startswith(held) and stop not in held
        assert tokenizer.decode(first["tokens"]) == held
        following = tokenizer.decode([*session.tokens, *session.generate_tokens([], 1, Sampling(temperature=0))])
    again = _json(capsys, "run", package, "--restore", saved, "--prompt", "", "--temperature", "0", "--max-tokens", "1")
    assert following == "KING HENRY.\n" + held + again["text"]


def test_stop_strings_among_token_ids(package, tmp_path, capsys):
    saved, options = tmp_path / "saved", ("--tokens", "5,6,7", "--seed", "5", "--max-tokens", "20")
    whole = _json(capsys, "run", package, *options)["tokens"]
    words = [f"{token} " for token in whole]
    stop = words[4]
    cut = _json(capsys, "run", package, *options, "--stop", stop, "--save", saved)
    shown = "".join(words[: len(cut["tokens"])])
    assert len(cut["tokens"]) in (3, 4) and cut["text"].startswith(shown)
    assert cut["text"] == "".join(words)[: "".join(words).index(stop)]
    with Session(package) as session:
        session.restore(saved)
        assert session.tokens == [5, 6, 7, *cut["tokens"]]


def test_tokens_that_fill_the_context_have_one_that_follows(tiny_package, tmp_path, capsys):
    run = ("run", str(tiny_package), "--tokens", ",".join(["1"] * 20), "--context", "20", "--temperature", "0")
    saved = tmp_path / "saved"
    assert main([*run, "--max-tokens", "1", "--save", str(saved)]) == 0
    captured = capsys.readouterr()
    assert "the saved conversation ends before it" in captured.err
    assert main([*run, "--max-tokens", "2"]) == 2
    full = capsys.readouterr()
    assert full.out == captured.out and "1 more token does not fit: 20 of the context of 20" in full.err
    again = ("run", str(tiny_package), "--restore", str(saved), "--tokens", "", "--temperature", "0")
    assert main([*again, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == captured.out
