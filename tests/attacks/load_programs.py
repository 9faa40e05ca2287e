"""Loads and evaluates programs one after the other, in a process of its own that a crash may end:

    load_programs.py PACKAGE NAME=FILE...

PACKAGE is a good one, of which each program takes the model's place. Prints a line of JSON for each: its name and what
two attempts to load and evaluate it ended in, a sentence or null. Last comes the good program itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_qkv import EdgeQKVError, Model, Session
from edge_qkv.package import MANIFEST

TOKENS = [5, 200, 17, 3]


def evaluate(package: Path) -> np.ndarray:
    """The logits after a chunk and after a token more."""
    with Model(package, threads=1, verify=False, packed=False) as model, Session(model, context=96) as session:
        session.evaluate(TOKENS[:-1])
        first = session.logits()
        session.evaluate(TOKENS[-1:])
        return np.stack([first, session.logits()])


def attempt(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except EdgeQKVError as error:
        return str(error)
    return None


def replace(package: Path, program: Path) -> None:
    """Puts a program into the model's place."""
    manifest = json.loads((package / MANIFEST).read_text())
    shutil.copyfile(program, package / "new")
    os.replace(package / "new", package / "model.pte")
    manifest["files"]["model.pte"]["bytes"] = program.stat().st_size
    (package / MANIFEST).write_text(json.dumps(manifest))


def main(good: Path, programs: dict[str, Path]) -> None:
    before = evaluate(good)
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(good, Path(folder) / "package")
        for name, path in programs.items():
            replace(package, path)
            print(json.dumps([name, *(attempt(lambda: evaluate(package)) for _ in range(2))]), flush=True)
    np.testing.assert_array_equal(evaluate(good), before)
    print(json.dumps(["the good one", None, None]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), {name: Path(path) for name, path in (pair.split("=", 1) for pair in sys.argv[2:])})
