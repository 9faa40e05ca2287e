"""The cache of a sequence as `llama_state_seq_get_data` gives it, and as `llama_state_seq_set_data` takes it back.

llama.cpp checks types and sizes in what it is given, but takes any positions, and a cell of position -1 is to it a
free one that holds a row. So none of its bytes are kept in a file: a state is taken apart into rows of numbers, and
written anew around them, so that nothing but numbers of the right shape ever comes from outside.

Little endian, all of uint32 unless noted: `magic`, sequence (int32), 1 stream, n cells; for each cell its
position (int32), 1 sequence, and that (int32); whether the values are transposed, L layers; for each layer the type
(int32), the bytes of a row (uint64), and n rows of keys; then the same for the values, unless the model reads them
from the keys. Transposed, a layer of values has the type (int32), the bytes of a number, the numbers of a row, and
then one row of n for each of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_qkv.errors import EdgeQKVError

_MAGIC = 0xAF143CD8
_HEADER = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_LAYERS = np.dtype([("transposed", "<u4"), ("layers", "<u4")])
_BLOCK = np.dtype([("type", "<i4"), ("size", "<u4"), ("more", "<u4")])
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # ggml's numbers


@dataclass(frozen=True)
class Layout:
    """What llama.cpp keeps of a token: `width` values a layer, once (`parts` is "keys") or twice ("keys", "values")."""

    layers: int
    width: int
    dtype: np.dtype
    parts: tuple[str, ...]
    transposed: bool  # the values, as without flash attention

    @property
    def bytes_per_token(self) -> int:
        return len(self.parts) * self.layers * self.width * self.dtype.itemsize

    def fits(self, rows: dict[str, np.ndarray], tokens: int) -> bool:
        shape = (self.layers, tokens, self.width)
        return set(rows) == set(self.parts) and all(r.shape == shape and r.dtype == self.dtype for r in rows.values())

    def empty(self) -> dict[str, np.ndarray]:
        return {part: np.empty((self.layers, 0, self.width), self.dtype) for part in self.parts}

    def join(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """The state [bytes] of the rows [layers, n, width] of positions 0 to n - 1; n is above 0."""
        tokens = rows["keys"].shape[1]
        made = [np.array((_MAGIC, 0, 1, tokens), _HEADER), _cells(tokens), self._layers()]
        for part in self.parts:
            blocks = np.empty(self.layers, self._block(part, tokens))
            blocks["head"] = self._head(part)
            blocks["rows"] = rows[part].swapaxes(1, 2) if self._turned(part) else rows[part]
            made.append(blocks)
        return np.concatenate([np.frombuffer(piece.tobytes(), np.uint8) for piece in made])

    def split(self, state: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
        """The rows [layers, tokens, width] of the first tokens of a state [bytes] that llama.cpp wrote.

        Raises `EdgeQKVError` where it is another than this module knows.
        """
        header, rest = _take(state, _HEADER, 1)
        count = int(header["cells"][0])
        cells, rest = _take(rest, _CELL, count)
        layers, rest = _take(rest, _LAYERS, 1)
        order = np.argsort(cells["position"])
        sound = (
            header[0] == np.array((_MAGIC, 0, 1, count), _HEADER)
            and layers[0] == self._layers()
            and (cells[order] == _cells(count)).all()
            and tokens <= count
        )
        rows = {}
        for part in self.parts:
            blocks, rest = _take(rest, self._block(part, count), self.layers)
            sound = sound and (blocks["head"] == self._head(part)).all()
            found = blocks["rows"].swapaxes(1, 2) if self._turned(part) else blocks["rows"]
            rows[part] = found[:, order[:tokens]]
        if not sound or len(rest):
            raise _foreign()
        return rows

    def _turned(self, part: str) -> bool:
        return part == "values" and self.transposed

    def _layers(self) -> np.ndarray:
        return np.array((self.transposed, self.layers), _LAYERS)

    def _head(self, part: str) -> np.ndarray:
        size = self.dtype.itemsize
        sizes = (size, self.width) if self._turned(part) else (self.width * size, 0)  # the latter are one of 64 bits
        return np.array((_TYPES[self.dtype], *sizes), _BLOCK)

    def _block(self, part: str, tokens: int) -> np.dtype:
        shape = (self.width, tokens) if self._turned(part) else (tokens, self.width)
        return np.dtype([("head", _BLOCK), ("rows", self.dtype.newbyteorder("<"), shape)])


def _cells(count: int) -> np.ndarray:
    cells = np.zeros(count, _CELL)
    cells["position"], cells["sequences"] = np.arange(count), 1
    return cells


def _take(state: np.ndarray, kind: np.dtype, count: int) -> tuple[np.ndarray, np.ndarray]:
    size = count * kind.itemsize
    if size > len(state):
        raise _foreign()
    return np.frombuffer(state[:size], kind, count), state[size:]


def _foreign() -> EdgeQKVError:
    return EdgeQKVError("this version of llama.cpp lays its cache out in another way; install llama-cpp-python 0.3.36")
