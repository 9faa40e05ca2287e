"""Plain tables and sizes for people."""

from __future__ import annotations

from collections.abc import Sequence

from edge_qkv.errors import printable


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Columns aligned by width: the first to the left, the others to the right; cells are `printable`."""
    cells = [[printable(str(c)) for c in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    if header:
        lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes in binary units, e.g. '88.0 MiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
