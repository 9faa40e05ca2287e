"""A save that is killed at any of its calls leaves the last snapshot whole, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("kill_at.c")


def _run(*command: object, **environment: object) -> subprocess.CompletedProcess:
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=60)


@pytest.fixture(scope="module")
def killer(tmp_path_factory) -> Path:
    """The library that kills, to be preloaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("killer") / "kill_at.so"
    built = _run(compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", SOURCE, "-o", library, "-ldl")
    assert built.returncode == 0, built.stderr
    return library


@pytest.fixture
def program(tests) -> Callable[..., str]:
    """program(*words) -> what snapshot_program prints."""

    def run(*words: object) -> str:
        done = _run(tests / "snapshot_program", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("left", [False, True], ids=["alone", "after_another"])
@pytest.mark.parametrize("torn", [False, True], ids=["between", "within"])
def test_a_killed_save_leaves_a_whole_snapshot(torn, left, killer, tests, program, tmp_path):
    path, log = tmp_path / "snapshot", tmp_path / "log"
    environment = {"LD_PRELOAD": killer, "KILL_LOG": log} | ({"KILL_TORN": 1} if torn else {})
    previous = 1
    program("save", path, previous)
    killed: list[str] = []
    for call in range(1, 1000):
        log.unlink(missing_ok=True)
        if left:  # by a save that was killed before
            (tmp_path / ".snapshot.partial").write_bytes(b"x" * 5000)
        seed = previous + 1
        done = _run(tests / "snapshot_program", "save", path, seed, KILL_AT=call, **environment)
        before = log.read_text().split() if log.exists() else []
        if done.returncode == 0:
            assert len(before) < call
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(before) == call - 1
        killed.append(before[-1] if before else "")
        assert program("check", path) == program("show", seed if "rename" in before else previous)
        # The next save clears away what the killed one left behind.
        previous = seed + 1
        program("save", path, previous)
        assert program("check", path) == program("show", previous)
        assert [file.name for file in tmp_path.iterdir() if file != log] == [path.name]
    # It was killed behind every kind of call, and the save that was left alone did all of them.
    assert {"", "write", "fsync", "rename"} | ({"unlink"} if left else set()) < set(killed)
    assert killed.count("write") > 10
    assert program("check", path) == program("show", seed)
