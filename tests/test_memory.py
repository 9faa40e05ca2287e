"""What the plan says against what the kernel counts, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_qkv.export import TARGETS

PROBE = Path(__file__).with_name("memory_probe.py")


def measure(package: Path, context: int, packed: Path | None) -> dict:
    command = [sys.executable, PROBE, package, context, *([packed] if packed else [])]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict) -> None:
    """Within 10 % of the prediction, and inside the budget that the plan calls the least."""
    planned = found["plan"]
    assert found["peak"] == pytest.approx(planned["expected"], rel=0.1)
    assert found["peak"] <= planned["total"]
    assert found["anonymous"] == pytest.approx(planned["anonymous"] - planned["margin"], rel=0.1)
    assert found["anonymous"] <= planned["anonymous"]


@pytest.fixture(scope="module")
def package(bundled_checkpoint, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("memory") / "package"
    TARGETS["onnx"](str(bundled_checkpoint), output, weights="int4", parity=False)
    return output


@pytest.fixture(scope="module")
def packed(package, tmp_path_factory) -> Path:
    from test_packed import pack

    folder = tmp_path_factory.mktemp("packed")
    pack(package, folder)
    return folder


@pytest.mark.parametrize("context", [1024, 8192, 32768])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_plan_is_what_is_measured(package, packed, context, is_packed):
    found = measure(package, context, packed if is_packed else None)
    assert found["packed"] == is_packed
    check(found)


def test_packed_weights_are_no_anonymous_memory(package, packed):
    plain, mapped = measure(package, 1024, None), measure(package, 1024, packed)
    saved = plain["steady_anonymous"] - mapped["steady_anonymous"]
    assert saved > plain["plan"]["weights_anonymous"] / 2
