"""The native tests, built from source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native-tests"


def _tool(name: str) -> str:
    """cmake and ninja come with the test extra, beside the interpreter."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or name


@pytest.fixture(scope="session")
def tests() -> Path:
    """Directory of the built test programs; a rebuild compiles only what changed."""
    options = ["-DEDGE_QKV_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"]
    for command in (
        [_tool("cmake"), "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options],
        [_tool("cmake"), "--build", str(BUILD)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    return BUILD
