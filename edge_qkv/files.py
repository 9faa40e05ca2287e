"""Reading files whole, up to a limit, and writing them so that a reader never sees half of one."""

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

from edge_qkv.errors import InputError, one_line
from edge_qkv.tables import size

# What is read whole, by its name or the option it is given for -> the most bytes of it. Real ones are far below, and
# what Python makes of that many fits into the memory of the machines that read them.
LIMITS = {
    "edge_qkv.json": 4 << 20,
    "config.json": 1 << 20,
    "tokenizer.json": 128 << 20,
    "--prompt-file": 64 << 20,
    "standard input": 64 << 20,
    "--parity-text": 64 << 20,
    "--data": 4 << 30,
    "report": 16 << 20,  # of a training
    "result": 64 << 20,  # of a benchmark
}


def read_bytes(path: Path, what: str) -> bytes:
    """All of a file; `what`: a key of `LIMITS`. Raises `InputError` that names the file, and an option with it."""
    where = _where(path, what)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > LIMITS[what]:
                raise _too_large(where, what)
            return read_stream(file, what, where)
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None


def read_stream(stream: BinaryIO, what: str, where: str) -> bytes:
    """All that a pipe or a file still holds; `where`: its name in errors."""
    blocks, left = [], LIMITS[what]
    while block := stream.read(1 << 20):
        left -= len(block)
        if left < 0:
            raise _too_large(where, what)
        blocks.append(block)
    return b"".join(blocks)


def read_text(path: Path, what: str) -> str:
    """The UTF-8 text of a file as it is, line ends included, without a byte-order mark; see `read_bytes`."""
    return decode(read_bytes(path, what), _where(path, what))


def decode(data: bytes, where: str) -> str:
    """UTF-8 text without a byte-order mark; `where`: its name in errors."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: must be UTF-8 text (byte {error.start} is not)") from None


def read_json(path: Path, what: str, remedy: str = "") -> Any:
    """The value in a JSON file; see `read_bytes`. `remedy`: what else the sentence of the `InputError` says."""
    data = read_bytes(path, what)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({one_line(error)}){remedy and f'; {remedy}'}") from None


def _where(path: Path, what: str) -> str:
    return f"{what} {path}" if what.startswith("--") else str(path)


def _too_large(where: str, what: str) -> InputError:
    return InputError(f"{where}: is larger than {size(LIMITS[what])}, the most that is read; give a smaller one")


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


def sha256(path: Path, read: Callable[[int], None] = lambda count: None) -> str:
    """Of a file's content; `read` is called with the bytes of each block, where Ctrl-C is heard as well."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            read(len(block))
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
