"""`edge-qkv bench peers`: the engines agree, take turns, and are left out or refused when they should be."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import bench_results
import numpy as np
import pytest

from conftest import TINY, changed
from edge_qkv import EdgeQKVError
from edge_qkv.bench.__main__ import main
from edge_qkv.bench.package import speed
from edge_qkv.bench.package.random_weights import random_package
from edge_qkv.bench.peers import command as peers
from edge_qkv.bench.peers import report as peers_report
from edge_qkv.bench.peers.engines import open_peer
from edge_qkv.bench.peers.process import PeerProcess

CONFIG = changed(TINY, heads=8, head_dim=16, width=128, mlp_width=64, max_positions=96, positions="learned")
CONFIG = changed(CONFIG, norm="layernorm", norm_bias=True, mlp="gelu")
OURS, GROUP_QUERY, FUNCTION = (peers.CONTESTANTS[i].name for i in (0, -2, -1))
BOUND = 0.1  # standard deviations of the logits: activations are rounded to 8 bits, caches are fp16 and fp32


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def config(directory) -> Path:
    path = directory / "small.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    return path


@pytest.fixture(scope="module")
def package(directory) -> Path:
    return random_package("small", CONFIG, directory, "onnx", "int4", "fp16").path


@pytest.mark.parametrize("kind", ["GroupQueryAttention", "function"])
def test_onnx_runtime_alone_computes_the_same(package, kind):
    ours, other = (open_peer(k, package, 1, 96) for k in ("ours", kind))
    tokens = speed.prompt(40, CONFIG.vocab_size)
    for start, end in ((0, 1), (1, 9), (9, 33)):
        want, found = (peer.score(tokens[start:end]) for peer in (ours, other))
        assert np.abs(want - found).max() < BOUND * want.std()
    for peer in (ours, other):
        peer.rewind(12)
    want, found = (peer.evaluate(tokens[12:13]) for peer in (ours, other))
    assert np.abs(want - found).max() < BOUND * want.std()
    other.fill(90)
    other.evaluate([1])
    other.rewind(9)  # the noise began at 0
    assert np.abs(other.evaluate(tokens[9:10]) - want).max() > BOUND * want.std()


def test_peers_take_turns_and_are_written_down(config, package, directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "perplexity_change", lambda target, weights, at: 0.01)  # a minute of export
    options = ("--depths", "0", "80", "--prompts", "32", "--repeats", "2", "--threads", "1", "--only", "ONNX", "llama")
    code = main(["peers", str(config), *options, "--directory", str(directory), "--output", str(tmp_path)])
    assert code == 0, capsys.readouterr().err
    printed, found = capsys.readouterr(), bench_results.read(tmp_path, "peers")
    rows = {row["name"]: row for row in found["contestants"]}
    assert {OURS, GROUP_QUERY, FUNCTION} <= set(rows) and found["complete"]
    for name, row in rows.items():
        assert [one["depth"] for one in row["decode"]] == [0, 80] and row["verified"]["tokens"] == 16
        assert row["verified"]["equal"] >= 14  # of random weights, which the last bit may turn
        assert all(len(one["ms"]) == 2 and min(one["ms"]) > 0 for one in row["decode"])
        assert [one["tokens"] for one in row["prefill"]] == [32]
        same = name != OURS and row["variant"] == rows[OURS]["variant"]
        assert (row["difference"] is not None) == same and (row["difference"] or 0) < 0.5
    assert rows[OURS]["cache_bytes_per_token"] == CONFIG.cache_bytes_per_token("fp16")
    assert rows[GROUP_QUERY]["cache_bytes_per_token"] == 4 * rows[OURS]["cache_bytes_per_token"]
    if importlib.util.find_spec("llama_cpp") is None:
        left_out = {row["name"]: row["why"] for row in found["left_out"]}
        assert left_out[peers_report.SAME] == "llama_cpp is not installed"
        assert f"{peers_report.SAME} is left out: llama_cpp is not installed" in printed.out
    order = [line.split(": ")[1] for line in printed.err.splitlines() if line.startswith("prefill of 32")]
    assert order == [*rows, *reversed(rows)]
    assert "not measured" in printed.out and f"| {OURS} |" in (tmp_path / "bench.md").read_text()


def test_a_target_is_of_the_rounds_of_one_run():
    ours = {"name": OURS, "decode": [{"depth": 4096, "ms": [10.0, 11.0, 20.0]}], "prefill": [], "notes": []}
    theirs = {"name": peers_report.SAME, "decode": [{"depth": 4096, "ms": [25.0, 22.0, 42.0]}], "prefill": []}
    theirs |= {"notes": ["not measured beyond depth 4,096, where a token takes 3.0 s"]}
    left_out = [{"name": peers_report.MULTI_HEAD, "why": "llama_cpp is not installed"}]
    plain = theirs | {"name": peers_report.SAME + peers_report.NO_FLASH}
    plain |= {"decode": [{"depth": 4096, "ms": [15.0, 11.0, 20.0]}]}
    made = peers_report.targets({"contestants": [ours, theirs, plain], "left_out": left_out})
    reached = [target for target in made if target.ratios]
    assert [target.ratios for target in reached] == [[2.5, 2.0, 2.1], [1.5, 1.0, 1.0]]
    assert [target.met for target in reached] == [True, False] and all("4,096" in target.what for target in reached)
    notes = [target.note for target in made if not target.ratios]
    assert any("llama_cpp is not installed" in note for note in notes) and all(notes)
    assert peers_report.ratios([4.0, 8.0], [2.0]) == [2.0, 4.0] and peers_report.ratios([4.0], [1.0, 2.0]) == [4.0, 2.0]
    assert peers_report.ratios([], [1.0]) == []


def test_an_engine_that_computes_another_model_is_refused(package, directory):
    other = random_package("other", changed(CONFIG, mlp="gelu", norm_eps=0.5), directory, "onnx", "int4", "fp16").path
    participants = []
    for contestant, path in zip(peers.CONTESTANTS[:2], (package, other), strict=True):
        process = PeerProcess("ours", path, 1, 64)
        participants.append(peers.Participant(contestant, peers.Package.open(package), [], [], process))
    try:
        with pytest.raises(EdgeQKVError, match="computes another model than edge-qkv, ONNX Runtime"):
            peers._compare_logits(participants)
    finally:
        for one in participants:
            one.process.close()


def test_what_an_engine_died_of_is_said(package, tmp_path):
    with pytest.raises(EdgeQKVError, match=f"^{tmp_path}: "):
        PeerProcess("ours", tmp_path, 1, 64)
    process = PeerProcess("ours", package, 1, 64)
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(EdgeQKVError, match=f"^{package}: its process was killed by signal 9$"):
        process.ask("decode", 0, 4)
    process = PeerProcess("ours", package, 1, 64)
    with pytest.raises(EdgeQKVError, match="no_such"):
        process.ask("no_such")


def test_one_that_dies_takes_no_further_part(package):
    """The others go on; what it was asked last is no figure."""
    participants = []
    for contestant in (peers.CONTESTANTS[0], peers.CONTESTANTS[-1]):
        process = PeerProcess(contestant.kind, package, 1, 64)
        participants.append(peers.Participant(contestant, peers.Package.open(package), [0, 20], [32], process))
    ours, other = participants
    first = peers.Participant(peers.CONTESTANTS[-1], other.package, [0], [], PeerProcess("function", package, 1, 64))
    try:
        os.kill(first.process._process.pid, signal.SIGKILL)  # as an instruction that the processor has not
        peers._compare_logits([ours, first])
        assert first.difference is None and not first.depths and "killed by signal 9" in first.notes[0]
        peers._decode(participants, 0, 2, 10)
        os.kill(other.process._process.pid, signal.SIGKILL)
        peers._decode(participants, 20, 2, 10)
        peers._prefill(participants, 32, None, 2, 10, 10)
        assert set(ours.decode) == {0, 20} and len(ours.decode[20]) == 2 and len(ours.prefill[32]) == 2
        assert set(other.decode) == {0} and not other.prefill
        assert other.notes == [f"no further part: {package}: its process was killed by signal 9"]
        os.kill(ours.process._process.pid, signal.SIGKILL)
        with pytest.raises(EdgeQKVError, match="killed by signal 9"):
            peers._decode(participants, 20, 2, 10)
    finally:
        for one in (*participants, first):
            one.process.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("no-such-model",), "no-such-model: is no config such as 1.2B/Q-MQA"),
        (("1.2B/Q-MQA", "--only", "llama"), "--only llama: leaves out 'edge-qkv, ONNX Runtime'"),
        (("1.2B/Q-MQA", "--depths", "32768"), "--depths = 32768: must be"),
        (("1.2B/Q-MQA", "--prompts", "0"), "--prompts = 0: must be"),
        (("1.2B/Q-MQA", "--prompts", "32769"), "--prompts = 32769: must be"),
        (("1.2B/Q-MQA", "--prompt-seconds", "nan"), "--prompt-seconds nan"),
        (("1.2B/Q-MQA", "--repeats", "0"), "--repeats = 0: must be"),
    ],
)
def test_bad_options_are_one_sentence(options, said, capsys):
    assert main(["peers", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
