"""The tiny model as an ExecuTorch package, which attacks are made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_qkv.export import TARGETS


@pytest.fixture(scope="session")
def tiny_program(tmp_path_factory, tiny_checkpoint) -> Path:
    pytest.importorskip("executorch.exir", reason="executorch is not installed")
    output = tmp_path_factory.mktemp("program") / "tiny"
    TARGETS["executorch"](str(tiny_checkpoint), output, weights="fp32", cache="fp16", parity=False)
    return output
