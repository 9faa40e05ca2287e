"""What was aimed at, beside what was measured.

A target is a ratio of two contestants of one run, once a round, so that what else the machine does meets both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from edge_qkv.bench.figures import Figure, figure, written

KINDS = "at least", "at most"
HEAD = "target", "wanted", "measured", "met"


@dataclass(frozen=True)
class Target:
    """A ratio that is wanted, and the rounds' own; without those it was not measured, and `note` says why."""

    what: str
    wanted: float
    kind: str  # of KINDS
    ratios: list[float] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.what}: a target is {' or '.join(KINDS)}, not {self.kind!r}")

    @property
    def figure(self) -> Figure | None:
        """Of the rounds' ratios; None: not measured."""
        return figure(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the median of the ratios is what is wanted; None: not measured."""
        return None if not self.ratios else self._shortfall() <= 0

    def _shortfall(self) -> float:
        """What the median lacks, as a part of what is wanted."""
        middle = median(self.ratios)
        return (self.wanted - middle if self.kind == "at least" else middle - self.wanted) / self.wanted

    def row(self) -> tuple[str, str, str, str]:
        """The cells of `HEAD`."""
        note = f" ({self.note})" if self.note else ""
        if not self.ratios:
            return self.what, f"{self.kind} {self.wanted:g}x", "", f"not measured{note}"
        verdict = "met" if self.met else f"missed by {_percent(self._shortfall())}"
        return self.what, f"{self.kind} {self.wanted:g}x", f"{written(self.figure)}x", verdict + note

    def as_json(self) -> dict[str, Any]:
        """Plain data; `ratio` (a figure) and `met` are null where it was not measured."""
        plain = {"what": self.what, "wanted": self.wanted, "kind": self.kind, "ratios": self.ratios}
        return plain | {"ratio": self.figure, "met": self.met, "note": self.note}


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else f"{100 * part:.2g} %"


def as_table(targets: Sequence[Target]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """(cells, head) for `edge_qkv.tables.table`."""
    return [target.row() for target in targets], HEAD
