"""Reading text, and writing files so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_qkv.errors import InputError


def read_text(path: Path, option: str) -> str:
    """The UTF-8 text of the file that was given for `option`, or an `InputError` that names both."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {path}: must be UTF-8 text (byte {error.start} is not)") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` beside `path`, then renames it into place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def directory_written_whole(path: Path, replaceable: str) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends without an error.

    An existing `path` is replaced only when it is empty or holds a file named `replaceable` (an earlier
    output of the same kind), so that a mistyped option cannot delete someone's folder.
    """
    named, path = path, path.resolve()
    if path == Path.cwd():
        raise InputError(f"--output {named}: is the current directory; name a new one, which is written as a whole")
    if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or (path / replaceable).exists())):
        raise InputError(f"--output {named}: exists and is not an earlier output; choose another place")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise InputError(f"--output {named}: cannot be written ({error.strerror})") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            os.replace(path, retired / "old")
            os.replace(temporary, path)
            shutil.rmtree(retired)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
