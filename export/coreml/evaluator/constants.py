"""Constants of a saved ML program: read where they lie in the package, compressed ones expanded some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from coremltools.proto import MIL_pb2

from edge_qkv.errors import InputError

_HEADER = np.dtype([("count", "<u4"), ("version", "<u4"), ("reserved", "<u8", 7)])
_METADATA = np.dtype(
    [("sentinel", "<u4"), ("type", "<u4"), ("bytes", "<u8"), ("at", "<u8"), ("padding_bits", "<u8"), ("rest", "<u8", 4)]
)
_SENTINEL, _VERSION = 0xDEADBEEF, 2
_VALUES_AT_ONCE = 1 << 18
_ROOT = "@model_path/"  # how a program names the directory that its own file is in


@dataclass(frozen=True)
class Kind:
    """A data type of MIL: numpy's for its values (of parts of a byte: a byte), bits, and its number in blobs."""

    dtype: np.dtype
    bits: int
    blob: int | None = None


# fmt: off
_KINDS = {
    "BOOL": (np.bool_, 8, None), "STRING": (np.str_, 0, None),
    "FLOAT16": (np.float16, 16, 1), "FLOAT32": (np.float32, 32, 2),
    "INT4": (np.int8, 4, 8), "INT8": (np.int8, 8, 4), "INT16": (np.int16, 16, 6), "INT32": (np.int32, 32, 14),
    "UINT1": (np.uint8, 1, 9), "UINT2": (np.uint8, 2, 10), "UINT3": (np.uint8, 3, 12), "UINT4": (np.uint8, 4, 11),
    "UINT6": (np.uint8, 6, 13), "UINT8": (np.uint8, 8, 3), "UINT16": (np.uint16, 16, 7), "UINT32": (np.uint32, 32, 15),
}
# fmt: on
KINDS = {MIL_pb2.DataType.Value(name): Kind(np.dtype(dtype), *rest) for name, (dtype, *rest) in _KINDS.items()}


# ---- files of weights ----


class Blobs:
    """The files of weights beside a program, mapped into memory; each value in them is checked before it is used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, tuple[Path, np.ndarray]] = {}

    def read(self, name: str, offset: int, kind: Kind, count: int) -> np.ndarray:
        """The bytes of `count` values that the metadata at `offset` of a file is about. Raises `InputError`."""
        if name not in self._files:
            self._files[name] = self._open(name)
        path, data = self._files[name]
        if offset % 8 or offset + _METADATA.itemsize > data.size:
            raise InputError(f"{path} is damaged: it has no value at byte {offset}; export the model again")
        about = data[offset : offset + _METADATA.itemsize].view(_METADATA)[0]
        size, at = int(about["bytes"]), int(about["at"])
        if about["sentinel"] != _SENTINEL or about["type"] != kind.blob or size != (count * kind.bits + 7) // 8:
            raise InputError(f"{path} does not belong to the program: the value at byte {offset} is another's")
        if at % 8 or at + size > data.size:
            raise InputError(f"{path} is cut off: it has {data.size} of {at + size} bytes; copy or export it again")
        return data[at : at + size]

    def _open(self, name: str) -> tuple[Path, np.ndarray]:
        if not name.startswith(_ROOT) or ".." in Path(name).parts:
            raise InputError(f"{self.directory}: the program has its weights outside of the package, in {name!r}")
        path = self.directory / name.removeprefix(_ROOT)
        try:
            data = np.asarray(np.memmap(path, mode="c", dtype=np.uint8))  # PyTorch warns of what is read-only
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise InputError(f"{path} cannot be read: {error}; copy the whole package or export it again") from error
        if data.size < _HEADER.itemsize or data[: _HEADER.itemsize].view(_HEADER)[0]["version"] != _VERSION:
            raise InputError(f"{path} is no file of weights of Core ML; copy the whole package or export it again")
        return path, data


# ---- float16: as numpy converts it, to the bit, but PyTorch does it some ten times as fast ----


def widened(x: np.ndarray) -> np.ndarray:
    """float16 as float32, anything else as it is."""
    return torch.from_numpy(x).float().numpy() if x.dtype == np.float16 else x


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 in another type, for float16 to nearest even."""
    return torch.from_numpy(x).half().numpy() if dtype == np.float16 else x.astype(dtype, copy=False)


# ---- values ----


class Packed:
    """Values of less than a byte, first in the lowest bits."""

    def __init__(self, data: np.ndarray, kind: Kind, shape: tuple[int, ...]) -> None:
        self._data, self.bits, self.dtype, self.shape = data, kind.bits, kind.dtype, shape

    def codes(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis as bits are: unsigned, uint8."""
        row = math.prod(self.shape[1:])
        first, end = start * row * self.bits, stop * row * self.bits
        data = self._data[first // 8 : (end + 7) // 8]
        if 8 % self.bits:  # values lie across bytes
            bits = np.unpackbits(data, bitorder="little")[first % 8 :][: end - first]
            values = np.packbits(bits.reshape(-1, self.bits), axis=1, bitorder="little")
        else:
            values, mask = np.empty((len(data), 8 // self.bits), np.uint8), (1 << self.bits) - 1
            for i in range(8 // self.bits):  # each in one long pass
                np.bitwise_and(data >> (i * self.bits), mask, out=values[:, i])
            values = values.reshape(-1)[first % 8 // self.bits :][: (stop - start) * row]
        return values.reshape(stop - start, *self.shape[1:])

    def rows(self, start: int, stop: int) -> np.ndarray:
        codes = self.codes(start, stop)
        if self.dtype == np.uint8:
            return codes
        sign = np.uint8(1 << (self.bits - 1))
        return ((codes ^ sign) - sign).view(np.int8)


class Dequantised:
    """scale * (data - offset), each scale and offset for a block of the data; rounded once, to the scale's type."""

    def __init__(self, data: Value, scale: Value, offset: Value | None = None) -> None:
        self.shape, self.dtype = tuple(data.shape), scale.dtype
        self._data, self._scale, self._offset = data, scale, offset
        for each in (scale,) if offset is None else (scale, offset):
            _blocks(self.shape, each.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        values = _in_blocks(rows(self._data, start, stop).astype(np.float32, copy=False), self._scale.shape)
        if self._offset is not None:
            values = values - _spread(_of_rows(self._offset, start, stop, self.shape)).astype(np.float32, copy=False)
        values = values * _spread(_of_rows(self._scale, start, stop, self.shape))
        return widened(rounded(values, self.dtype)).reshape(stop - start, *self.shape[1:])


class Looked:
    """Values from tables, one for each block of the codes: lut [..., 2**bits, 1]."""

    def __init__(self, codes: Value, lut: Value, vector_axis: np.ndarray | None = None) -> None:
        if lut.shape[-1] != 1:
            raise NotImplementedError("a palette of vectors")
        _blocks(codes.shape, lut.shape[:-2])
        self.shape, self.dtype = tuple(codes.shape), lut.dtype
        self._codes, self._lut = codes, lut

    def rows(self, start: int, stop: int) -> np.ndarray:
        codes = self._codes.codes(start, stop) if isinstance(self._codes, Packed) else self._codes[start:stop]
        return _look_up(codes, _of_rows(self._lut, start, stop, self.shape)[..., 0])


Value = np.ndarray | str | Packed | Dequantised | Looked

CONSTEXPR: dict[
    str, tuple[type, dict[str, str]]
] = {  # operators that expand constants, and MIL's names of what they take
    "constexpr_blockwise_shift_scale": (Dequantised, {"data": "data", "scale": "scale", "offset": "offset"}),
    "constexpr_lut_to_dense": (Looked, {"indices": "codes", "lut": "lut", "vector_axis": "vector_axis"}),
}


def compressed(operator: str, arguments: Mapping[str, Value]) -> Value:
    """The constant that an operator of `CONSTEXPR` stands for."""
    make, names = CONSTEXPR[operator]
    return make(**{names[name]: value for name, value in arguments.items()})


def _blocks(shape: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The size of a block on each axis, where there are `counts` of them."""
    if len(shape) != len(counts) or any(size % count for size, count in zip(shape, counts, strict=True)):
        raise ValueError(f"{list(counts)} blocks of {list(shape)} values")
    return [size // count for size, count in zip(shape, counts, strict=True)]


def _in_blocks(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Rows [r, a, b, ...] as [r, A, a/A, B, b/B, ...] for counts [r, A, B, ...]."""
    split = [part for size, count in zip(values.shape[1:], counts[1:], strict=True) for part in (count, size // count)]
    return values.reshape(len(values), *split)


def _spread(each: np.ndarray) -> np.ndarray:
    """What there is once a block, [r, A, B, ...], beside the values in blocks: [r, A, 1, B, 1, ...]."""
    return each.reshape(*each.shape[:1], *(part for count in each.shape[1:] for part in (count, 1)))


def _of_rows(each: Value, start: int, stop: int, shape: Sequence[int]) -> np.ndarray:
    """What there is once a block, [., A, B, ...], for each of the rows [start, stop) of `shape`: [r, A, B, ...]."""
    block = shape[0] // each.shape[0]
    first = start // block
    return rows(each, first, (stop - 1) // block + 1)[np.arange(start, stop) // block - first]


def _look_up(codes: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """codes [r, a, b, ...] in tables [r, A, B, ..., entries] of their blocks."""
    *counts, entries = tables.shape
    begins = np.arange(math.prod(counts)).reshape(counts) * entries
    return tables.reshape(-1).take(_in_blocks(codes, counts) + _spread(begins)).reshape(codes.shape)


def rows(value: Value, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the first axis; of floats in float32."""
    return widened(value[start:stop] if isinstance(value, np.ndarray) else value.rows(start, stop))


def blocks_of_rows(shape: Sequence[int]) -> Iterator[slice]:
    """All rows, as many at a time as fit into a processor's cache."""
    step = max(1, _VALUES_AT_ONCE // math.prod(shape[1:]))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def expand(value: Value) -> np.ndarray | str:
    """The whole of it, in its own type."""
    if isinstance(value, np.ndarray | str):
        return value
    whole = np.empty(value.shape, value.dtype)
    for block in blocks_of_rows(value.shape):
        whole[block] = rounded(value.rows(block.start, block.stop), value.dtype)
    return whole


def read(value: MIL_pb2.Value, blobs: Blobs) -> Value:
    """A constant of a program. Raises `InputError`, for a type that is unknown here `NotImplementedError`."""
    tensor = value.type.tensorType
    kind = KINDS.get(tensor.dataType)
    if value.type.WhichOneof("type") != "tensorType" or kind is None:
        raise NotImplementedError("a constant of this type")
    shape = tuple(dimension.constant.size for dimension in tensor.dimensions)
    count = math.prod(shape)
    if value.WhichOneof("value") == "blobFileValue":
        stored = value.blobFileValue
        data = blobs.read(stored.fileName, stored.offset, kind, count)
    else:
        immediate = value.immediateValue.tensor
        field = immediate.WhichOneof("value")
        if field == "strings" and len(immediate.strings.values) == 1:
            return immediate.strings.values[0]
        if field != "bytes":
            values = np.array(getattr(immediate, field).values if field else [], kind.dtype)
            return _shaped(values, shape, blobs)
        data = np.frombuffer(bytearray(immediate.bytes.values), np.uint8)
    if kind.bits % 8 == 0:
        return _shaped(data.view(kind.dtype) if data.size % kind.dtype.itemsize == 0 else data[:0], shape, blobs)
    if data.size != (count * kind.bits + 7) // 8:
        _shaped(data[:0], shape, blobs)
    return Packed(data, kind, shape)


def _shaped(values: np.ndarray, shape: tuple[int, ...], blobs: Blobs) -> np.ndarray:
    if values.size != math.prod(shape):
        raise InputError(f"{blobs.directory} holds a damaged program: a constant has not its {list(shape)} values")
    return values.reshape(shape)
