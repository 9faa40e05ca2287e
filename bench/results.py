"""Results of `edge-qkv bench` as files: written whole, and read back only when they are what they say.

`schema.md` describes them; `SCHEMA` grows when a field changes its meaning or goes, not when one is added.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from edge_qkv import files
from edge_qkv.bench.common import say
from edge_qkv.bench.shapes import ALWAYS, SHAPES
from edge_qkv.errors import InputError

SCHEMA = 1
FILE = "bench.json"


class Result:
    """A result that grows; with a directory it is in `bench.json` there after each part, never half written."""

    def __init__(self, kind: str, output: Path | None, **parts: Any) -> None:
        self.output = output
        self.content: dict[str, Any] = {"schema": SCHEMA, "kind": kind, "complete": False} | parts
        self._write()

    def add(self, name: str, part: Any) -> None:
        self.content[name] = part
        self._write()

    def finish(self) -> dict[str, Any]:
        self.content["complete"] = True
        self._write()
        return self.content

    def _write(self) -> None:
        if self.output is None:
            return
        path = self.output / FILE
        try:
            files.write_json(path, self.content)
        except OSError as error:
            raise InputError(f"--output {self.output}: {FILE} cannot be written ({error.strerror})") from None

    @contextlib.contextmanager
    def kept(self):
        """Whatever ends the block: says where the parts that were measured are, when it ends early."""
        try:
            yield self
        except BaseException:
            if self.output is not None:
                say(f"\nwhat was measured so far is in {self.output / FILE}")
            raise


def read(path: Path, kind: str) -> dict[str, Any]:
    """A result of `kind` from a file, or from the `bench.json` of a directory; raises `InputError`."""
    path = path / FILE if path.is_dir() else path
    try:
        content = json.loads(files.read_text(path, "result"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON; give a bench.json that edge-qkv bench has written") from None
    if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
        raise InputError(f"{path}: is no result of edge-qkv bench; give a bench.json that it has written")
    if content["schema"] != SCHEMA:
        raise InputError(
            f"{path}: has schema {content['schema']}, this edge-qkv reads {SCHEMA}; measure again with this version"
        )
    if content.get("kind") != kind:
        raise InputError(f"{path}: is a result of another kind ({str(content.get('kind'))[:20]!r}, not {kind!r})")
    if wrong := _wrong(content, SHAPES[kind]):
        raise InputError(f"{path}: is damaged ({wrong}); copy it again or measure again")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON, and no figures


def _wrong(content: dict[str, Any], shape: dict[str, Any]) -> str:
    """What of a result is not of its shape; "" where all is."""
    for name, part in shape.items():
        if name in content and (wrong := _mismatch(content[name], part, name)):
            return wrong
        if name not in content and name in ALWAYS:
            return f"it has no {name}"
    return ""


def _mismatch(value: Any, shape: Any, where: str) -> str:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        missing = next((name for name in shape if name not in value), None)
        if missing:
            return f"{where} has no {missing}"
        return next(filter(None, (_mismatch(value[name], part, f"{where}.{name}") for name, part in shape.items())), "")
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        return next(filter(None, (_mismatch(row, shape[0], f"{where}[{i}]") for i, row in enumerate(value))), "")
    sound = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    return "" if sound else f"{where} is {json.dumps(value)[:30]}"
