"""The command line as a user meets it, most of all when something is wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import hears_ctrl_c
from edge_qkv import Session
from edge_qkv.cli import main
from edge_qkv.commands.inspect import _PARITY_NUMBERS
from samples import write_2606


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> the one sentence a command ends with; asserts exit code 2 and nothing else."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        sentences = [line for line in captured.err.splitlines() if line.startswith("edge-qkv: ")]
        assert len(sentences) == 1 and captured.err.rstrip().endswith(sentences[0]), captured.err
        assert "Traceback" not in captured.err and captured.out == ""
        return sentences[0]

    return run


@pytest.fixture(scope="module")
def bare_package(tmp_path_factory) -> Path:
    """A package without a tokenizer, from a published file."""
    folder = tmp_path_factory.mktemp("bare")
    write_2606(folder / "model.pt", "Q-MQA")
    assert main(["export", str(folder / "model.pt"), "--output", str(folder / "package"), "--weights", "int8"]) == 0
    return folder / "package"


def _output(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


# ---- what works ----


def test_export_reports_parity_and_how_to_run(tmp_path, capsys):
    write_2606(tmp_path / "model.pt", "MQA")
    text = _output(capsys, "export", tmp_path / "model.pt", "--output", tmp_path / "out", "--weights", "fp32")
    assert "top-1 agreement 100.0%" in text and "run it: edge-qkv run" in text and "MQA" in text
    manifest = json.loads((tmp_path / "out/edge_qkv.json").read_text())
    assert manifest["parity"]["max_logit_error"] < 0.05  # fp16 cache: rows rounded to 11 bits, logits of order 10
    assert manifest["cache"] == "fp16" and manifest["cache_bytes_per_token"] == 2 * 2 * 8 * 2


def test_run_streams_text_after_the_prompt(tiny_package, capsys):
    options = ["run", tiny_package, "--prompt", "abc", "--max-tokens", 20, "--context", 64]
    first = _output(capsys, *options, "--seed", 5)
    assert first.startswith("abc") and len(first) > 4
    assert first == _output(capsys, *options, "--seed", 5)
    assert first != _output(capsys, *options, "--seed", 6)


def test_run_json_and_stats(tiny_package, tmp_path, capsys):
    stats = tmp_path / "stats.json"
    arguments = ["--prompt", "abc", "--max-tokens", 9, "--temperature", 0, "--json", "--stats", stats]
    result = json.loads(_output(capsys, "run", tiny_package, *arguments))
    figures = result["figures"]
    assert figures == json.loads(stats.read_text())
    assert figures["timing"]["prefill_tokens"] == 3 and figures["decode_tokens_per_second"] > 0
    assert figures["memory"]["cache_used"] > 0


def test_prompt_from_a_file_and_from_a_pipe(tiny_package, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("abc")
    options = ["--max-tokens", "12", "--temperature", "0", "--quiet"]
    by_option = _output(capsys, "run", tiny_package, "--prompt", "abc", *options)
    assert by_option == _output(capsys, "run", tiny_package, "--prompt-file", tmp_path / "prompt.txt", *options)
    command = [sys.executable, "-m", "edge_qkv", "run", str(tiny_package), *options]
    piped = subprocess.run(command, input=b"abc", capture_output=True, check=True)
    assert piped.stdout.decode() == by_option and piped.stderr == b""


def test_a_package_without_a_tokenizer_runs_on_ids(bare_package, capsys, refused):
    ids = _output(capsys, "run", bare_package, "--tokens", "1,2,3", "--max-tokens", 5, "--temperature", 0).split()
    assert len(ids) == 5 and all(0 <= int(i) < 97 for i in ids)
    assert "has no tokenizer" in refused("run", bare_package, "--prompt", "abc")


def test_inspect_package_checkpoint_and_preset(tiny_package, tiny_checkpoint, capsys):
    for path in (tiny_package, tiny_checkpoint):
        facts = json.loads(_output(capsys, "inspect", path, "--json"))
        assert facts["variant"] == "Q-MQA" and facts["tokenizer"]
    assert "onnx package" in _output(capsys, "inspect", tiny_package)
    text = _output(capsys, "inspect", "random:1.2B/Q-MQA")
    assert "92,274,688 (88.0 MiB)" in text and "64x" in text


def test_inspect_shows_what_only_some_targets_have(bare_package, tmp_path, capsys):
    text = _output(capsys, "inspect", bare_package)
    assert "block size" in text and "tokens of a call" not in text
    shutil.copytree(bare_package, tmp_path / "package")
    manifest = json.loads((bare_package / "edge_qkv.json").read_text()) | {"prefill_chunk": 77, "cache_rows": 4096}
    (tmp_path / "package/edge_qkv.json").write_text(json.dumps(manifest))
    text = _output(capsys, "inspect", tmp_path / "package")
    assert any(line.split() == ["tokens", "of", "a", "call", "77"] for line in text.splitlines())
    assert any(line.split() == ["cache", "rows", "4096"] for line in text.splitlines())
    facts = json.loads(_output(capsys, "inspect", tmp_path / "package", "--json"))
    assert facts["prefill_chunk"] == 77 and facts["cache_rows"] == 4096


def test_a_shorter_package(tiny_checkpoint, tmp_path, capsys):
    _output(capsys, "export", tiny_checkpoint, "--output", tmp_path / "out", "--capacity", 50, "--no-parity")
    assert json.loads((tmp_path / "out/edge_qkv.json").read_text())["config"]["max_positions"] == 50
    result = _output(
        capsys, "run", tmp_path / "out", "--prompt", "abc", "--context", "max", "--max-tokens", 3, "--json"
    )
    assert json.loads(result)["figures"]["context"] == 50


# ---- what is wrong ----


def test_bad_checkpoints(tmp_path, refused):
    write_2606(tmp_path / "good.pt", "QKV")
    whole = (tmp_path / "good.pt").read_bytes()
    target = tmp_path / "created-by-a-pickle"

    class Malicious:
        def __reduce__(self):
            return (open, (str(target), "w"))

    for name, content in (
        ("truncated.pt", whole[: len(whole) // 2]),
        ("garbage.pt", os.urandom(4096)),
        ("empty.pt", b""),
        ("malicious.pt", pickle.dumps({"model_config": {}, "model_state_dict": Malicious()})),
    ):
        (tmp_path / name).write_bytes(content)
        assert name in refused("export", tmp_path / name, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists() and not target.exists()
    assert "known formats" in refused("export", tmp_path / "absent.pt", "--output", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["good.pt", "truncated.pt", "garbage.pt", "empty.pt", "malicious.pt"]
    )


def test_bad_packages(tiny_package, tmp_path, refused):
    package = tmp_path / "package"
    for break_it, words in (
        (lambda: _flip(package / "model.onnx.data"), "model.onnx.data: is damaged"),
        (lambda: _flip(package / "model.onnx"), "model.onnx: is damaged"),
        (lambda: (package / "model.onnx.data").unlink(), "model.onnx.data: is missing"),
        (lambda: (package / "tokenizer.json").write_text("{}"), "tokenizer.json: has 2 bytes"),
        (lambda: (package / "edge_qkv.json").unlink(), "not a model package"),
    ):
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(tiny_package, package)
        break_it()
        assert words in refused("run", package, "--prompt", "abc")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_damage_that_nobody_checked_for_does_not_crash(name, tiny_package, tmp_path):
    """With --no-verify the engine meets the damage: an answer or one sentence, never a crash."""
    package = tmp_path / "package"
    shutil.copytree(tiny_package, package)
    size = (package / name).stat().st_size
    for place in range(size // 14, size, size // 7):
        shutil.copy(tiny_package / name, package / name)
        _flip(package / name, place)
        command = [sys.executable, "-m", "edge_qkv", "run", str(package), "--prompt", "abc", "--max-tokens", "3"]
        done = subprocess.run([*command, "--no-verify"], capture_output=True, text=True)
        assert done.returncode in (0, 2), (done.returncode, done.stderr)
        assert "Traceback" not in done.stderr
        if done.returncode:
            assert done.stderr.count("edge-qkv: ") == 1


def _flip(file: Path, place: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 0x10
    file.write_bytes(data)


def test_a_full_context_keeps_what_was_written(tiny_package, tmp_path, capsys):
    arguments = ["run", str(tiny_package), "--prompt", "abc", "--context", "20", "--temperature", "0", "--json"]
    assert main([*arguments, "--stats", str(tmp_path / "stats.json")]) == 2
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert len(result["tokens"]) == 18 and result["figures"]["finish"] == "context"
    assert json.loads((tmp_path / "stats.json").read_text()) == result["figures"]
    assert captured.err.startswith("edge-qkv: 1 more token does not fit")


def test_a_drawn_seed_is_told_and_repeats_the_text(tiny_package, capsys):
    options = ["run", tiny_package, "--prompt", "abc", "--max-tokens", 20, "--temperature", 1.5, "--json"]
    first = json.loads(_output(capsys, *options))
    again = json.loads(_output(capsys, *options, "--seed", first["figures"]["seed"]))
    assert again["tokens"] == first["tokens"]


def test_stats_go_where_they_can_or_are_refused_before_the_work(tiny_package, tmp_path, capsys, refused):
    run = ("run", tiny_package, "--prompt", "abc", "--max-tokens", 3)
    for place in (tmp_path, tmp_path / "absent/stats.json"):
        assert "--stats" in refused(*run, "--stats", place)
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE)
    _output(capsys, *run, "--stats", fifo)
    assert json.loads(reader.communicate(timeout=30)[0])["finish"] == "max_tokens"
    assert fifo.is_fifo()


def test_a_conversation_is_not_saved_in_place_of_a_device(tiny_package, tmp_path, refused):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    assert "--save" in refused("run", tiny_package, "--prompt", "abc", "--save", fifo)
    assert fifo.is_fifo()


def test_an_export_prints_nothing_but_its_manifest_as_json(tiny_checkpoint, tmp_path, capsys):
    printed = _output(capsys, "export", tiny_checkpoint, "--output", tmp_path / "package", "--json")
    assert json.loads(printed)["target"] == "onnx"


@pytest.mark.parametrize(
    "changed",
    [{"neural_engine_misfits": [1, None]}, {"parity": dict.fromkeys(_PARITY_NUMBERS, 10**400)}],
    ids=lambda changed: next(iter(changed)),
)
def test_facts_of_the_wrong_type_do_not_stop_inspect(changed, tiny_package, tmp_path, capsys):
    package = shutil.copytree(tiny_package, tmp_path / "package")
    manifest = json.loads((package / "edge_qkv.json").read_text()) | changed
    (package / "edge_qkv.json").write_text(json.dumps(manifest))
    assert "onnx package" in _output(capsys, "inspect", package)


def test_a_package_with_someones_files_in_it_is_not_replaced(tiny_package, tiny_checkpoint, tmp_path, refused):
    package = tmp_path / "package"
    shutil.copytree(tiny_package, package)
    (package / "notes.txt").write_text("mine")
    assert "holds other files" in refused("export", tiny_checkpoint, "--output", package)
    assert (package / "notes.txt").read_text() == "mine"


def test_an_unknown_instruction_set_is_an_error(tiny_package):
    command = [sys.executable, "-m", "edge_qkv", "run", str(tiny_package), "--prompt", "abc", "--max-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"EDGE_QKV_ISA": "bogus"})
    assert done.returncode == 2 and "EDGE_QKV_ISA" in done.stderr


def test_wrong_tokenizers(tiny_checkpoint, tmp_path, refused):
    write_2606(tmp_path / "model.pt", "QKV")  # 97 tokens
    export = ("export", tmp_path / "model.pt", "--output", tmp_path / "out", "--tokenizer")
    assert "belongs to another model" in refused(*export, tiny_checkpoint / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "is not a tokenizer.json" in refused(*export, tmp_path / "tokenizer.json")
    assert "cannot be read" in refused(*export, tmp_path / "absent.json")
    assert not (tmp_path / "out").exists()


def test_bad_prompts(tiny_package, bare_package, tmp_path, refused):
    assert "no tokens" in refused("run", tiny_package, "--prompt", "")
    assert "no tokens" in refused("run", bare_package, "--tokens", " ")
    assert "11 more tokens do not fit: 0 of the context of 10" in refused(
        "run", tiny_package, "--prompt", "abcdefghijk", "--context", 10
    )
    assert "token = 97" in refused("run", bare_package, "--tokens", "1,97")
    assert "whole numbers" in refused("run", bare_package, "--tokens", "1,x")
    assert "whole numbers" in refused("run", bare_package, "--tokens", "1_0")
    assert "UTF-8" in refused("run", tiny_package, "--prompt", "caf\udce9")
    assert "cannot be read" in refused("run", tiny_package, "--prompt-file", tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "UTF-8" in refused("run", tiny_package, "--prompt-file", tmp_path / "latin.txt")


def test_bad_options(tiny_package, tiny_checkpoint, tmp_path, refused, monkeypatch):
    run = ("run", tiny_package, "--prompt", "abc")
    assert "context = 97" in refused(*run, "--context", 97)
    assert "top_p = 2.0" in refused(*run, "--top-p", 2)
    assert "max_tokens = 0" in refused(*run, "--max-tokens", 0)
    assert "threads = -1" in refused(*run, "--threads", -1)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/photo.jpg").write_text("mine")
    assert "not an earlier output" in refused("export", tiny_checkpoint, "--output", tmp_path / "taken")
    assert (tmp_path / "taken/photo.jpg").read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    assert "current directory" in refused("export", tiny_checkpoint, "--output", ".")
    (tmp_path / "file").write_text("")
    assert "not an earlier output" in refused("export", tiny_checkpoint, "--output", tmp_path / "file")
    assert "cannot be written" in refused("export", tiny_checkpoint, "--output", tmp_path / "file/out")
    assert "--block-size" in refused(
        "export", tiny_checkpoint, "--output", tmp_path / "out", "--weights", "fp32", "--block-size", 32
    )
    export = ("export", tiny_checkpoint, "--output", tmp_path / "out")
    assert "--capacity = 97" in refused(*export, "--capacity", 97)
    assert "--prefill-chunk 64: a package for onnx takes any number" in refused(*export, "--prefill-chunk", 64)
    assert "--weights 8da8w: must be one of fp32, int8, int4" in refused(*export, "--weights", "8da8w")
    with pytest.raises(SystemExit) as unknown:
        main(["run", str(tiny_package), "--nonsense"])
    assert unknown.value.code == 2


def test_a_failed_export_keeps_the_package_that_was_there(tiny_package, tmp_path, refused):
    package = tmp_path / "package"
    shutil.copytree(tiny_package, package)
    before = {p.name: p.read_bytes() for p in package.iterdir()}
    (tmp_path / "bad.json").write_text("{}")
    refused("export", "random:300M/Q-MQA", "--output", package, "--tokenizer", tmp_path / "bad.json")
    assert {p.name: p.read_bytes() for p in package.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.json", "package"]


def test_ctrl_c_stops_cleanly_and_saves(bundled_package, tmp_path):
    package, _ = bundled_package("int8")
    saved = tmp_path / "saved"
    command = [sys.executable, "-m", "edge_qkv", "run", str(package), "--prompt", "KING.", "--context", "32768"]
    command += ["--max-tokens", "30000", "--save", str(saved)]  # a minute's work at least
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c)
    begun = process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.strip() == b"edge-qkv: stopped"
    with Session(package) as session:
        session.restore(saved)
        text = session.model.package.tokenizer().decode(session.tokens)
        assert text.startswith((begun + rest[:-1]).decode()) and rest.endswith(b"\n")
        assert np.isfinite(session.logits()).all()


def test_a_reader_that_goes_away_is_no_error(bare_package):
    command = f"{sys.executable} -m edge_qkv run {bare_package} --tokens 1 --max-tokens 60 --quiet | head -c 3"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert len(done.stdout) == 3 and "Traceback" not in done.stderr


def test_the_command_line_starts_without_torch(tiny_package):
    """The runtime's install has no torch: running and inspecting packages must not need it."""
    script = (
        "import sys; sys.modules['torch'] = None; from edge_qkv.cli import main; "
        "sys.exit(main(['run', sys.argv[1], '--prompt', 'abc', '--max-tokens', '3']) "
        "or main(['inspect', sys.argv[1]]) or main(['export', 'x', '--output', 'y']))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_package)], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'edge-qkv[export]'" in done.stderr, done.stderr
    assert "onnx package" in done.stdout
