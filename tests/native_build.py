"""The native tests, built from source as pytest needs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]


def build(name: str, *options: str, targets: Sequence[str] = ("all",)) -> Path:
    """The directory of the built test programs; a rebuild compiles only what changed."""
    folder = ROOT / "build" / name
    always = ["-DEDGE_QKV_BUILD_TESTS=ON", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # one of several processes that run the tests
        for command in (
            [_tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *always, *options],
            [_tool("cmake"), "--build", str(folder), "--target", *targets],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _tool(name: str) -> str:
    """cmake and ninja come with the test extra, beside the interpreter."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or name
