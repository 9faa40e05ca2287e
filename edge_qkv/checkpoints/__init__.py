"""Trained models of every format that can be read, behind one function.

    checkpoint = read_checkpoint("model.pt")
    for name, load in checkpoint.tensors.items():
        tensor = load()

Reading never runs code from a file: pickles are opened by PyTorch's weights-only reader, and anything besides
tensors and plain values is refused.
"""

from __future__ import annotations

from pathlib import Path

from edge_qkv.checkpoints import native, paper_2510_23912, paper_2606_04032, random, torch_file
from edge_qkv.checkpoints.checkpoint import Checkpoint, quoted, require_torch
from edge_qkv.errors import InputError

__all__ = ["Checkpoint", "read_checkpoint"]

_FORMATS = (native, paper_2606_04032, paper_2510_23912, random)
_KNOWN = "known formats: " + "; ".join(f"{f.NAME} ({f.SUMMARY})" for f in _FORMATS)


def read_checkpoint(path: str) -> Checkpoint:
    """Finds out what `path` is, checks it and returns it unread.

    path: a directory, a file, or `random:...`. Raises `InputError`, one sentence that names the file and the
    remedy, for anything that is not a sound checkpoint of a known format.
    """
    if str(path).startswith(random.PREFIX):
        return random.read(str(path).removeprefix(random.PREFIX))
    file = Path(path)
    try:
        if file.is_dir():
            return _read_directory(file)
        if not file.exists():
            raise InputError(f"{file}: no such file or directory; {_KNOWN}")
        if not file.is_file():
            raise InputError(f"{file}: not a regular file; {_KNOWN}")
    except (OSError, ValueError) as error:  # e.g. a name that is too long, or holds a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{quoted(str(file))}: cannot be read ({reason})") from None
    if file.name == native.CONFIG or file.suffix == ".safetensors":
        raise InputError(f"{file}: part of a checkpoint; give its directory, {str(file.parent)!r}")
    require_torch(file)
    content = torch_file.read(file, _KNOWN)
    for format in (paper_2606_04032, paper_2510_23912):
        if format.matches(content):
            return format.read(content, file)
    raise InputError(f"{file}: a PyTorch file, but not a checkpoint of a known format; {_KNOWN}")


def _read_directory(directory: Path) -> Checkpoint:
    for name in (native.CONFIG, native.WEIGHTS):
        if not (directory / name).is_file():
            raise InputError(f"{directory}: a directory without {name}; {_KNOWN}")
    return native.read(directory)
