"""The oldest releases of the libraries that running a package needs are those that pyproject.toml names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
from edge_qkv import Sampling, Session

for package in sys.argv[1:]:
    with Session(package, packed=False) as session:
        if session.model.package.tokenizer_file is None:
            print(*session.generate_tokens([1, 2, 3], 8, Sampling(temperature=0)))
        else:
            print("".join(session.generate("KING HENRY.\\n", 8, Sampling(temperature=0), stop="zzz")).strip())
"""


@pytest.mark.slow
def test_packages_run_on_the_oldest_libraries(bundled_package, random_package, tmp_path):
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = [re.sub(">=", "==", requirement) for requirement in requirements]
    assert all(re.fullmatch(r"[a-z]+==[0-9.]+", floor) for floor in floors), floors
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    options = ["--quiet", "--config-settings", f"build-dir={tmp_path / 'build'}"]
    subprocess.run([python, "-m", "pip", "install", *options, ROOT, *floors], check=True)
    packages = [bundled_package(weights)[0] for weights in ("int4", "int8")]
    packages += [random_package("onnx", cache=cache)[1] for cache in ("fp32", "fp16", "int8")]
    done = subprocess.run([python, "-c", SCRIPT, *packages], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= len(packages)
