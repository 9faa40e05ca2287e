"""Sizes as people write them: "512MB", "1.5GiB", "800000000", and numbers of tokens."""

from __future__ import annotations

import re

from edge_qkv.errors import InputError

UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", 1)
    for kind, base in (("", 1000), ("B", 1000), ("iB", 1024))
}
_LIMIT = 1 << 60


def parse_size(value: int | str, name: str = "memory") -> int:
    """Bytes of a size: a number, with kB, MB, GB (powers of 1,000) or KiB, MiB, GiB (powers of 1,024) after it.

    `name` is for the message. Raises `InputError`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value if isinstance(value, str) else "", re.ASCII)
        units = {unit.lower(): factor for unit, factor in UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise InputError(f"{name} = {str(value)[:40]!r}: is no size; write 512MB, 1.5GiB or a number of bytes")
        digits, _, fraction = match[1].partition(".")
        factor = units[match[2].lower()]
        count = int(digits[:20]) * factor + int(fraction[:12] or 0) * factor // 10 ** len(fraction[:12])
    if not 0 < count < _LIMIT:
        raise InputError(f"{name} = {str(value)[:40]!r}: must be above 0 and below 2^60 bytes")
    return count


def parse_tokens(text: str, name: str) -> int | str:
    """A number of tokens as people write it, "32768" or "32,768", or "max"; raises `InputError`."""
    if text == "max":
        return text
    digits = text.replace(",", "")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 12 and int(digits) > 0):
        raise InputError(f"{name} {text[:40]}: must be a number of tokens, or max")
    return int(digits)
