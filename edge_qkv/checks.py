"""Numbers are checked before ctypes sees them: it would cut off what does not fit, without a word."""

from __future__ import annotations

import operator

from edge_qkv.errors import InputError

MOST = 2**31 - 1  # of counts and sizes: what 32 bits hold
MOST_THREADS = 256
MOST_CHUNK = 1 << 20


def whole(value: object, name: str, least: int = 0, most: int = MOST, note: str = "") -> int:
    """`value` as an int if it is a whole number from `least` to `most`, numpy's included; raises `InputError`.

    `name` and `note`, where the bound comes from, are for the message.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InputError(f"{name} = {repr(value)[:40]}: must be a whole number between {least} and {most}{note}")
    return number


def thread_count(value: object) -> int:
    return whole(value, "threads", 0, MOST_THREADS, "; 0: one for each core")


def chunk_size(value: object) -> int:
    return whole(value, "prefill_chunk", 0, MOST_CHUNK, "; 0: the default")
