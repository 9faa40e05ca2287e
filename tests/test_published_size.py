"""The 1.2B Q-MQA configuration with random int4 weights: exports, loads, and decodes at both ends of 32k.

A few minutes and about 1.5 GB of disk; each step runs in a process of its own, whose peak memory it prints.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from edge_qkv import ContextFull, Session

CONTEXT = 32768
CACHE_BYTES = 92_274_688  # 22 layers * 64 values * 2 bytes * 32,768 tokens: 88.0 MiB

EXPORT = """
import json, sys
from pathlib import Path
from edge_qkv.export import TARGETS
TARGETS["onnx"]("random:1.2B/Q-MQA", Path(sys.argv[1]), weights="int4", parity=False)
peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(json.dumps({"peak": int(peak.split()[1]) * 1024}))
"""


def _json(*command: object) -> dict:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "1.2B-Q-MQA"
    peak = _json("-c", EXPORT, folder)["peak"]
    print(f"\nexport: peak memory {peak:,} bytes")
    # The fp32 weights are 4.4 GB; one at a time, with the exporter's libraries, is a fraction of that.
    assert peak < 2.5e9
    yield folder
    shutil.rmtree(folder)


def test_decodes_at_depth_0_and_32767(package, capsys):
    figures = _json("-m", "edge_qkv.bench.depth", package, "--depths", 0, CONTEXT - 1, "--repeats", 3, "--json")
    loaded, (shallow, full) = figures["loaded"], figures["depths"]
    with capsys.disabled():
        times = f"decode {shallow['median_ms']:.0f} ms at depth 0, {full['median_ms']:.0f} ms at 32,767"
        loaded_text = f"loaded {loaded['resident']:,} (anonymous {loaded['anonymous']:,})"
        full_text = f"full {full['resident']:,} (anonymous {full['anonymous']:,}), peak {full['peak_resident']:,}"
        print(f"\n1.2B Q-MQA int4: {times}; cache {full['cache_used']:,} bytes; memory {loaded_text}, {full_text}")
    assert full["cache_used"] == full["cache_reserved"] == full["cache_committed"] == CACHE_BYTES
    assert loaded["cache_committed"] < CACHE_BYTES / 100
    # Filling the cache adds the cache and nothing else that grows with context.
    assert full["anonymous"] - loaded["anonymous"] < CACHE_BYTES + 64e6


def test_the_logits_at_full_depth_are_sound(package):
    with Session(package, context=CONTEXT) as session:
        session.fill(CONTEXT - 1)
        session.evaluate([11])
        logits = session.logits()
        assert np.isfinite(logits).all() and logits.std() > 0.01
        with pytest.raises(ContextFull):
            session.evaluate([11])
