"""The native tests, run on every instruction set this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ISAS = ("baseline", "avx2", "avxvnni", "avx512", "armv8", "dotprod", "i8mm")


def _run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=os.environ | environment, timeout=600
    )


def _isa(**environment: str) -> str:
    """The instruction set that the library takes."""
    from edge_qkv._native import library_path

    script = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.eqkv_isa.restype = ctypes.c_char_p; "
        "print(lib.eqkv_isa().decode())"
    )
    return _run(sys.executable, "-c", script, library_path(), **environment).stdout.strip()


@pytest.mark.parametrize("isa", ISAS)
def test_attention_matches_float64_on(isa, tests):
    """All of the list on the best one, half a minute; the others do the shorter list."""
    if _isa(EDGE_QKV_ISA=isa) != isa:
        pytest.skip(f"this processor or build has no {isa}")
    done = _run(tests / "attention_test", *([] if isa == _isa() else ["--quick"]), EDGE_QKV_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr
    assert isa in done.stdout and ", 0 failed" in done.stdout


@pytest.mark.parametrize("build", ["tests", pytest.param("sanitized_tests", marks=pytest.mark.slow)])
def test_core_matches_its_description(build, request):
    done = _run(request.getfixturevalue(build) / "core_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.slow
def test_attention_is_clean_under_sanitizers(sanitized_tests):
    """On the best instruction set, over the shorter list: each access is checked, which makes it slow."""
    done = _run(sanitized_tests / "attention_test", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_the_interface_is_exported():
    from edge_qkv._native import library_path

    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listed = _run("nm", "-D", "--defined-only", library_path()).stdout.split("\n")
    names = {line.split()[-1].split("@")[0] for line in listed if line.strip()}
    header = (ROOT / "runtime/include/edge_qkv.h").read_text()
    declared = set(re.findall(r"^EQKV_API .*?(eqkv_\w+)\(", header, re.MULTILINE))
    assert names == declared | {"RegisterCustomOps"} and len(declared) > 15
