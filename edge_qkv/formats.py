"""How a matrix is stored: as floats, or as codes of a few bits with a scale a block."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SHORTEST_BLOCK = 16  # of those that Format.divides makes: 5 bits a weight with an fp16 scale
CHOSEN = -1  # stands for the block size that --block-size gives


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: as floats, or codes of 4 or 8 bits and the scales of their blocks."""

    bits: int = 32
    scale_bytes: int = 0  # 0: floats
    block: int = 0  # columns that share a scale; 0: all of a row
    whole: bool = False  # float32 instead where the columns are no whole blocks; else the last block is padded
    divides: bool = False  # a shorter block instead, so that all are whole; where that is too short, rows of 8 bits

    def of(self, columns: int) -> Format:
        """How a matrix of so many columns is stored."""
        if self.whole and columns % self.block:
            return Format()
        if self.divides:
            block = math.gcd(columns, self.block)
            return replace(self, block=block) if block >= SHORTEST_BLOCK else Format(8, self.scale_bytes)
        return self

    def is_float(self, columns: int) -> bool:
        """Whether a matrix of so many columns is stored as floats."""
        return not self.of(columns).scale_bytes

    def sizes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Bytes of the tensors that hold a matrix [rows, columns]."""
        how = self.of(columns)
        if not how.scale_bytes:
            return (rows * columns * how.bits // 8,)
        block = how.block or columns
        blocks = -(-columns // block)
        return -(-rows * blocks * block * how.bits // 8), rows * blocks * how.scale_bytes

    def chosen(self, block: int) -> Format:
        """With the block size that --block-size gives, where this format takes it."""
        return replace(self, block=block) if self.block == CHOSEN else self


@dataclass(frozen=True)
class Weights:
    """How a weight type of a target stores each kind of matrix."""

    layers: Format
    head: Format
    embedding: Format
    positions: Format  # learned ones
    default_block: int = 0  # 0: takes no block size
    also: str = ""  # the name for it that all targets know, such as int8 or int4

    def chosen(self, block: int) -> Weights:
        """With the block size that --block-size gives."""
        return Weights(*(f.chosen(block) for f in (self.layers, self.head, self.embedding, self.positions)))
