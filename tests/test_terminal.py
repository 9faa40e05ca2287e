"""What reaches a terminal: text that it can show, nothing out of a file that would command it, and progress."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import unicodedata

import pytest

from conftest import TINY, write_checkpoint
from edge_qkv import InputError, Package
from edge_qkv.cli import main
from edge_qkv.commands import terminal
from edge_qkv.export.progress import Bar
from edge_qkv.package import MANIFEST

ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def _edge_qkv(*arguments: object, script: str = "", **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    start = ["-c", f"{script}; from edge_qkv.cli import main; sys.exit(main())"] if script else ["-m", "edge_qkv"]
    command = [sys.executable, *start, *map(os.fsencode, map(str, arguments))]
    return subprocess.run(command, capture_output=True, env=environment | variables)


# ---- characters that it cannot show ----


def test_text_that_a_terminal_cannot_show_is_replaced(tiny_package, tiny_checkpoint, tmp_path, monkeypatch):
    package = shutil.copytree(tiny_package, tmp_path / "é日")
    commands = (
        (["run", package, "--prompt", "é日", "--max-tokens", "3"], 0),
        (["run", package, "--prompt", "caf\udce9"], 2),
        (["run", tmp_path / "ü"], 2),
        (["inspect", package], 0),
        (["inspect", tmp_path / "ü"], 2),
        (["plan", package], 0),
        (["plan", tmp_path / "ü"], 2),
        (["pack", package, "--output", tmp_path / "päcked"], 0),
        (["export", tiny_checkpoint, "--output", tmp_path / "ä", "--no-parity"], 0),
        (["export", tmp_path / "ü", "--output", tmp_path / "ä"], 2),
        (["train", "--data", tmp_path / "ü", "--output", tmp_path / "ö"], 2),
        (["bench", tmp_path / "ü"], 2),
    )
    for arguments, code in commands:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        assert main([str(word) for word in arguments]) == code, arguments
        for stream in streams:
            stream.flush()
        assert any(stream.buffer.getvalue() for stream in streams)
    done = _edge_qkv(*commands[0][0], **ASCII)  # where options are not what the locale expects either
    assert done.returncode == 0 and b"Traceback" not in done.stderr and done.stdout.startswith(b"??"), done.stderr


# ---- what comes from a file ----

EVIL = "\x1b[31m\x07\x9b2J\u202e\r\n\x00\u2028"


def _evil_copies(value):
    """Copies of a JSON value, each with a text, or the name of a field, replaced by one full of control characters."""
    if isinstance(value, str):
        yield value + EVIL
    elif isinstance(value, list):
        for i, item in enumerate(value):
            for other in _evil_copies(item):
                yield [*value[:i], other, *value[i + 1 :]]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {(key + EVIL if name == key else name): part for name, part in value.items()}
            for other in _evil_copies(item):
                yield value | {key: other}


def _check_output(capsys, most_lines: int = 1) -> None:
    captured = capsys.readouterr()
    for c in (captured.out + captured.err).replace("\n", ""):
        assert unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp"), captured
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") <= most_lines, captured.err


def test_no_text_of_a_manifest_commands_the_terminal(tiny_package, tmp_path, capsys):
    package = shutil.copytree(tiny_package, tmp_path / "package")
    manifest = json.loads((package / MANIFEST).read_text())
    extra = {"architecture": "llama", "neural_engine_misfits": ["a layer"], "cache_rows": "many"}
    seen = 0
    for evil in _evil_copies(manifest | extra):
        (package / MANIFEST).write_text(json.dumps(evil))
        for command in (
            ["inspect", package],
            ["plan", package],
            ["plan", package, "--json"],
            ["run", package, "--tokens", "1", "--max-tokens", "1", "--quiet"],
            ["pack", package, "--output", tmp_path / "packed"],
        ):
            assert main([str(word) for word in command]) in (0, 2)
            _check_output(capsys, 2 if command[0] == "pack" else 1)  # "packing ...", and the error
            seen += 1
    assert seen > 200


def test_no_text_of_a_checkpoint_commands_the_terminal(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    checkpoint = write_checkpoint(tmp_path / "checkpoint", TINY)
    config, weights = TINY.to_dict(), load_file(checkpoint / "model.safetensors")

    def check() -> None:
        for command in ("inspect",), ("plan",), ("export", "--output", str(tmp_path / "out")):
            assert main([*command, str(checkpoint)]) == 2
            _check_output(capsys)

    for evil in _evil_copies(config):
        (checkpoint / "config.json").write_text(json.dumps(evil))
        check()
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file(weights | {EVIL.replace("\0", ""): weights["norm.weight"].clone()}, checkpoint / "model.safetensors")
    check()


def test_errors_of_the_library_are_one_line_whatever_they_name():
    assert str(InputError(f"{EVIL}: bad")).isprintable()
    assert str(InputError("é 日 👩: bad")) == "é 日 👩: bad"


# ---- a process that is nobody's ----

NOBODY = "import pwd, sys; pwd.getpwuid = {}.__getitem__"  # no entry for any user: a KeyError


def test_a_process_without_a_home_directory(tiny_package, tmp_path):
    for command in ("inspect", "plan"):
        assert _edge_qkv(command, tiny_package, script=NOBODY).returncode == 0
    run = "run", tiny_package, "--prompt", "abc", "--max-tokens", 2
    for more in ((), ("--memory", "1GB")):
        done = _edge_qkv(*run, *more, script=NOBODY)
        assert done.returncode == 0, done.stderr
    done = _edge_qkv("pack", tiny_package, script=NOBODY)
    assert done.returncode == 2 and b"there is no home directory" in done.stderr and b"--output" in done.stderr
    assert done.stderr.count(b"edge-qkv: ") == 1 and b"Traceback" not in done.stderr
    assert _edge_qkv("pack", tiny_package, "--output", tmp_path / "packed", script=NOBODY).returncode == 0
    assert _edge_qkv("pack", tiny_package, script=NOBODY, XDG_CACHE_HOME=str(tmp_path)).returncode == 0


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_checking_says_how_far_it_is_and_can_be_interrupted(tiny_package, tmp_path):
    package = Package.open(tiny_package, verify=False)
    total = sum(facts["bytes"] for facts in package.manifest["files"].values())
    seen = []
    package.verify(lambda *progress: seen.append(progress))
    assert len(seen) > 1 and seen == sorted(seen) and seen[-1] == (total, total)
    assert all(done < total for done, _ in seen[:-1])
    ended = []

    def interrupt(done: int, total: int) -> None:
        ended.append(done == total)
        if done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package.verify(interrupt)
    assert ended == [False, True]  # so that the line is cleared
    damaged = shutil.copytree(tiny_package, tmp_path / "package")
    (damaged / "model.onnx").write_bytes(bytes((damaged / "model.onnx").stat().st_size))
    seen.clear()
    with pytest.raises(InputError, match="is damaged"):
        Package.open(damaged, progress=lambda *progress: seen.append(progress))
    assert seen[-1] == (total, total)


def test_a_counter_is_for_terminals_and_leaves_nothing_behind(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = terminal.counter("prefill, tokens:", "{:,}".format, 512)
    progress(1, 511)
    assert screen.getvalue() == ""
    progress(1000, 2000)
    assert screen.getvalue().endswith("prefill, tokens: 1,000 of 2,000")
    progress(2000, 2000)
    assert screen.getvalue().endswith("\r\033[K")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal.counter("prefill, tokens:", "{:,}".format, 512) is None and terminal.hashing() is None


def _steps(stream, monkeypatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    bar = Bar()
    bar("Tracing", 0, 0)
    for done in range(0, 100_001, 10):
        bar("Writing", done, 100_000)
    bar.close()
    return stream.getvalue()


def test_an_export_writes_a_line_a_step_into_a_file_and_bars_on_a_terminal(monkeypatch):
    assert _steps(io.StringIO(), monkeypatch) == "Tracing\nWriting\n"
    shown = _steps(Terminal(), monkeypatch)
    assert shown.startswith("Tracing\n") and "100%" in shown
