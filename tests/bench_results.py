"""Results of `edge-qkv bench` as tests read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_qkv.bench import results

_ELSEWHERE = {"config", "parity", "recipe"}  # whose fields are described elsewhere


def fields(part: Any) -> Iterator[str]:
    """The names of all fields of a result."""
    for name, value in part.items() if isinstance(part, dict) else ():
        yield name
        if name not in _ELSEWHERE:
            yield from fields(value)
    for value in part if isinstance(part, list) else ():
        yield from fields(value)


def read(directory: Path, kind: str) -> dict[str, Any]:
    """The result in a directory; each of its fields must be described in schema.md."""
    content = json.loads((directory / results.FILE).read_text())
    assert (content["schema"], content["kind"]) == (results.SCHEMA, kind)
    schema = (Path(results.__file__).parent / "schema.md").read_text()
    described = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", schema))))
    assert set(fields(content)) <= described
    return content
