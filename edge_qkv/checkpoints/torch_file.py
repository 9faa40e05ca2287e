"""Opening a file that `torch.save` wrote, without running anything in it."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_qkv.checkpoints.checkpoint import Source, check_shape, missing, plain_name, quoted, unexpected
from edge_qkv.errors import InputError, one_line

_ZIP = b"PK\x03\x04"


def read(path: Path, known: str) -> dict[Any, Any]:
    """The dictionary in a file; its tensors are mapped, not read, unless the file has PyTorch's old layout.

    known: the known formats, for errors. Raises `InputError` for anything else than a dictionary of tensors and
    plain values.
    """
    import torch

    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not start:
        raise InputError(f"{path}: the file is empty; copy or save it again")
    zipped = start == _ZIP
    if zipped:
        _check_zip(path, known)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's remarks on what it is about to refuse anyway
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a damaged pickle can raise anything
        if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise InputError(
                f"{path}: holds the Python object {refused[1]!r}, which is never loaded because it could run code; "
                "save the checkpoint again with tensors and plain values only"
            ) from None
        if not zipped and start[:1] != b"\x80":
            raise InputError(f"{path}: not a checkpoint of a known format; {known}") from None
        raise InputError(f"{path}: damaged or not written by torch.save; copy or save it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a PyTorch file, but not a checkpoint of a known format; {known}")
    return content


def _check_zip(path: Path, known: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path}: truncated or damaged ({one_line(error)}); copy or save it again") from None
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        raise InputError(f"{path}: a zip archive, but not written by torch.save; {known}")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path}: a compressed zip archive, not written by torch.save; save it again")


def sources(state: Any, path: Path, field: str) -> dict[str, Source]:
    """The tensors of a state dict by name, without the prefixes that wrappers add."""
    import torch

    if not isinstance(state, Mapping):
        raise InputError(f"{path}: {field} is not a dictionary of tensors; save the model's state_dict() there")
    found: dict[str, Source] = {}
    for key, tensor in state.items():
        if not isinstance(key, str):
            raise InputError(f"{path}: {field} has a key that is no text; save the model's state_dict() there")
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{path}: {quoted(key)} in {field} is no tensor; save the model's state_dict() there")
        name = plain_name(key, found, str(path))
        # What a crafted file could hold besides plain memory: other layouts, or few bytes spread over a large shape.
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise InputError(f"{path}: tensor {quoted(name)} is not a plain dense tensor; save plain weights")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise InputError(f"{path}: tensor {quoted(name)} is larger than its data; copy or save the file again")
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = Source(key, tuple(tensor.shape), dtype, lambda tensor=tensor: tensor)
    return found


class Fields:
    """The configuration stored in a file: values come out with the type that is expected of them."""

    def __init__(self, values: Any, path: Path, field: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(f"{path}: {field} is not a dictionary; save the model's configuration there")
        self._values, self._where = values, f"{path}: {field} field"

    def _take(self, name: str, default: Any, sound: Any, rule: str) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise InputError(f"{self._where} {name} is missing; the file is incomplete or of another model")
        if not sound(value):
            raise InputError(f"{self._where} {name} {rule}; the file is damaged or of another model")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        return self._take(
            name,
            default,
            lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 28,
            f"must be a whole number in 1..{(1 << 28) - 1}",
        )

    def number(self, name: str, default: float) -> float:
        return float(
            self._take(
                name,
                default,
                lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e30,
                "must be a number above 0",
            )
        )

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._take(name, default, lambda v: isinstance(v, bool), "must be true or false")

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        return self._take(
            name, default, lambda v: isinstance(v, str) and v in allowed, f"must be one of {', '.join(allowed)}"
        )

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None


class Renaming:
    """Moves a file's tensors to the decoder's names, keeping account of what is left over."""

    def __init__(self, found: dict[str, Source], path: Path, ignored: str) -> None:
        self._where = str(path)
        self._left = {name: source for name, source in found.items() if not re.fullmatch(ignored, name)}
        self.result: dict[str, Source] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a matrix that the variant is told by."""
        source = self._left[name]
        if len(source.shape) != 2:
            raise InputError(f"{self._where}: tensor {quoted(name)} must be a matrix, not {list(source.shape)}")
        return source.shape

    def peek(self, name: str) -> Source:
        return self._left[name]

    def take(self, name: str) -> Source:
        if name not in self._left:
            raise missing(self._where, name)
        return self._left.pop(name)

    def move(self, old: str, new: str, bias: bool) -> None:
        for part in ("weight", "bias") if bias else ("weight",):
            self.result[f"{new}.{part}"] = self.take(f"{old}.{part}")

    def split(self, old: str, new: list[str], inputs: int, rows: list[int], bias: bool) -> None:
        """A fused matrix [sum(rows), inputs], and its bias, to one tensor a name."""
        for part in ("weight", "bias") if bias else ("weight",):
            source = self.take(f"{old}.{part}")
            check_shape(source, (sum(rows), inputs) if part == "weight" else (sum(rows),), self._where)
            start = 0
            for name, count in zip(new, rows, strict=True):
                self.result[f"{name}.{part}"] = source.rows(start, start + count)
                start += count

    def done(self) -> dict[str, Source]:
        for name in self._left:
            raise unexpected(self._where, name)
        return self.result


def is_tied(tensors: Renaming, fields: Fields, field: str, embedding: str, head: str, path: Path) -> bool:
    """Whether the head is the embedding; takes a stored copy of a tied head away.

    A file that does not say is told by its tensors. Raises `InputError` when the file says tied but holds a head
    of other values: which of the two was trained cannot be known.
    """
    if head not in tensors:
        if not fields.flag(field, True):
            raise missing(str(path), head)
        return True
    equal = embedding in tensors and _same(tensors.peek(embedding), tensors.peek(head))
    tied = fields.flag(field, equal)
    if tied and not equal:
        raise InputError(
            f"{path}: {field} is true but {quoted(head)} differs from {quoted(embedding)}; "
            f"save it with {field} false, or without {quoted(head)}"
        )
    if tied:
        tensors.take(head)
    return tied


def _same(a: Source, b: Source) -> bool:
    """Whether two tensors hold the same values; tied weights are usually stored once and cost nothing to compare."""
    import torch

    first, second = a.load(), b.load()
    if (first.data_ptr(), first.stride(), first.shape) == (second.data_ptr(), second.stride(), second.shape):
        return first.dtype == second.dtype
    return first.dtype == second.dtype and torch.equal(first, second)
