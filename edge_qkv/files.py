"""Reading text, and writing files so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
    with written_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path`, renamed into place when all of it is on the disk."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, to_json(value))


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def directory_written_whole(path: Path, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends without an error.

    An existing `path` is replaced only when it is an empty directory or `replaceable` says that it is an earlier
    output and nothing else, so that a mistyped option cannot delete someone's files.
    """
    named, path = path, path.resolve()
    try:
        if path == Path.cwd():
            raise InputError(f"--output {named}: is the current directory; name a new one, which is written as a whole")
        if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or replaceable(path))):
            raise InputError(
                f"--output {named}: exists and is not an earlier output, or holds other files; choose another place"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", dir=path.parent))
    except OSError as error:
        raise InputError(f"--output {named}: cannot be written ({error.strerror})") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        _replace_directory(temporary, path)
    except OSError as error:
        raise InputError(
            f"--output {named}: cannot be written ({error.strerror}); nothing there was changed"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_directory(new: Path, path: Path) -> None:
    if not path.exists():
        os.replace(new, path)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", dir=path.parent))
    try:
        os.replace(path, retired / "old")
        try:
            os.replace(new, path)
        except BaseException:
            os.replace(retired / "old", path)
            raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)
