"""llama.cpp is built without AMX where it does not work, whatever the processor says of itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "bench/peers"
AGAINST_AMX = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def flags(compiler: str) -> list[str]:
    done = subprocess.run(
        ["sh", PEERS / "llama_flags.sh"], env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def compiler(path: Path, of_probe: str, knows_flags: bool = True) -> str:
    """A compiler that makes the program `of_probe`, a line of shell, of the probe."""
    path.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'*amx.c) printf \'#!/bin/sh\\n{of_probe}\\n\' > "$3"; chmod +x "$3" ;;\n'
        f"*) exit {0 if knows_flags else 1} ;;\nesac\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("ended", ["kill -ILL $$", "kill -SEGV $$", "exit 1", "exit 2"])
def test_a_probe_that_fails_turns_amx_off(ended, tmp_path):
    assert flags(compiler(tmp_path / "cc", ended)) == AGAINST_AMX
    assert flags(compiler(tmp_path / "old", ended, knows_flags=False)) == []


def test_a_probe_that_works_leaves_amx_on(tmp_path):
    assert flags(compiler(tmp_path / "cc", "exit 0")) == []


def test_this_processors_build_has_amx_only_where_the_instruction_runs(tmp_path):
    made = subprocess.run(["cc", "-O1", "-o", tmp_path / "amx", PEERS / "amx.c"], capture_output=True)
    works = made.returncode == 0 and subprocess.run([tmp_path / "amx"]).returncode == 0
    command = ["cc", "-march=native", *flags("cc"), "-dM", "-E", "-x", "c", "-"]
    macros = subprocess.run(command, input="", capture_output=True, text=True).stdout
    assert works or "__AMX_TILE__" not in macros
