"""The commands of `edge-qkv`, a file each: `SUMMARY`, `add_arguments(parser)`, and `run(arguments)`."""

from __future__ import annotations

import importlib.util

from edge_qkv.errors import InputError


def need(module: str, extra: str) -> None:
    """Raises `InputError` where a module of an extra is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"this needs {module}, which is not installed; run pip install 'edge-qkv[{extra}]'")
