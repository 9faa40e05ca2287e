"""Results of `edge-qkv bench` as files: written whole; those of packages, which are compared, are also read.

`schema.md` describes them; `SCHEMA` grows when a field changes its meaning or goes, not when one is added.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from edge_qkv import files
from edge_qkv.bench.common import say
from edge_qkv.errors import InputError

SCHEMA = 1
FILE = "bench.json"

_NUMBER, _COUNT, _TEXT = (int, float), int, str
_FIGURE = {"median": _NUMBER, "least": _NUMBER, "most": _NUMBER, "repeats": _COUNT}
_LOAD = {"open_ms": _FIGURE, "first_token_ms": _FIGURE}
_MEMORY = {"resident": _COUNT, "anonymous": _COUNT, "cache_used": _COUNT}
# What is read of a result of a package: objects have these fields, lists these rows; (None, ...): or null. A section
# that is not there was not measured.
_ALWAYS: dict[str, Any] = {
    "complete": bool,
    "machine": {
        "date": _TEXT,
        "board": (None, _TEXT),
        "processor": _TEXT,
        "cores": _COUNT,
        "instruction_set": _TEXT,
        "system": _TEXT,
    },
    "options": {"threads": _COUNT},
    "package": {
        "name": _TEXT,
        "engine": _TEXT,
        "version": (None, _TEXT),
        "weights": _TEXT,
        "cache": _TEXT,
        "variant": _TEXT,
        "file_bytes": _COUNT,
        "packed": bool,
    },
}
_SECTIONS: dict[str, Any] = {
    "load": {"cold": _LOAD, "warm": _LOAD},
    "decode": {"depths": [{"depth": _COUNT, "tokens": [_COUNT], "ms_per_token": _FIGURE, "memory": _MEMORY}]},
    "prefill": [{"depth": _COUNT, "tokens_per_second": _FIGURE}],
    "first_token": [{"tokens": _COUNT, "milliseconds": (None, _FIGURE)}],
    "restore": {"restore_ms": _FIGURE},
}


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


def read(path: Path) -> dict[str, Any]:
    """The result of a package from a file, or from the `bench.json` of a directory; raises `InputError`."""
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
    if content.get("kind") != "package":
        raise InputError(f"{path}: is a result of another kind ({str(content.get('kind'))[:20]!r}, not 'package')")
    if wrong := _wrong(content):
        raise InputError(f"{path}: is damaged ({wrong}); copy it again or measure again")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON, and no figures


def _wrong(content: dict[str, Any]) -> str:
    """What of a result is not of its shape; "" where all is."""
    if missing := [name for name in _ALWAYS if name not in content]:
        return f"it has no {missing[0]}"
    shapes = (_ALWAYS | _SECTIONS).items()
    return next(filter(None, (_mismatch(content[name], part, name) for name, part in shapes if name in content)), "")


def _mismatch(value: Any, shape: Any, where: str) -> str:
    if isinstance(shape, tuple) and shape[0] is None:
        return "" if value is None else _mismatch(value, shape[1], where)
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
    sound = sound and (shape is _TEXT or abs(value) < 1 << 62)  # what floats and tables have room for
    return "" if sound else f"{where} is {json.dumps(value)[:30]}"
