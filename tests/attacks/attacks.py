"""A directory of attacks: what a hostile or damaged file may look like, made from good ones.

Each attack is a function from the bytes of a good file to those of a bad one. Checksums are made right again where an
attack is on what lies behind them, with the xxHash of `runtime/core/snapshot.md`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

Attack = Callable[[bytes], bytes]

_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & _MASK


def _round(acc: int, lane: int) -> int:
    return _rotl((acc + lane * _P2) & _MASK, 31) * _P1 & _MASK


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, of the xxHash specification."""
    at, size = 0, len(data)
    if size >= 32:
        v = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        for at in range(0, size - 31, 32):
            v = [_round(a, lane) for a, lane in zip(v, struct.unpack_from("<4Q", data, at), strict=True)]
        at += 32
        h = sum(_rotl(a, r) for a, r in zip(v, (1, 7, 12, 18), strict=True)) & _MASK
        for a in v:
            h = ((h ^ _round(0, a)) * _P1 + _P4) & _MASK
    else:
        h = _P5
    h = (h + size) & _MASK
    while at + 8 <= size:
        h = (_rotl(h ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= size:
        h = (_rotl(h ^ struct.unpack_from("<I", data, at)[0] * _P1 & _MASK, 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        h = _rotl(h ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
    for shift, factor in ((33, _P2), (29, _P3), (32, 1)):
        h = (h ^ h >> shift) * factor & _MASK
    return h


# ---- snapshots: offsets as in runtime/core/snapshot.md ----

HEADER, LINE = 256, 48
FIELDS = {
    "byte_order": (8, "<I"),
    "version": (12, "<I"),
    "file_bytes": (16, "<Q"),
    "alignment": (24, "<Q"),
    "tokens": (32, "<Q"),
    "vocab_size": (40, "<Q"),
    "cache_type": (48, "<I"),
    "flags": (52, "<I"),
    "tensors": (56, "<Q"),
    "tokens_offset": (128, "<Q"),
    "logits_offset": (136, "<Q"),
    "rows_offset": (144, "<Q"),
}
TABLE = {  # of its first line
    "layer": (HEADER, "<I"),
    "part": (HEADER + 4, "<I"),
    "scales": (HEADER + 8, "<I"),
    "slabs": (HEADER + 12, "<I"),
    "dim": (HEADER + 16, "<Q"),
    "window": (HEADER + 24, "<Q"),
    "sinks": (HEADER + 32, "<Q"),
    "first_live": (HEADER + 40, "<Q"),
}


def sealed(data: bytes, content: bool = True) -> bytes:
    """The snapshot with checksums that fit it: as a forger would write it."""
    out = bytearray(data)
    if content:
        (tensors,) = struct.unpack_from("<Q", out, 56)
        struct.pack_into("<Q", out, 152, xxh64(bytes(out[HEADER : HEADER + LINE * tensors])))
        struct.pack_into("<Q", out, 240, xxh64(bytes(out[HEADER:])))
    struct.pack_into("<Q", out, 248, xxh64(bytes(out[:248])))
    return bytes(out)


def _field(name: str, value: Callable[[int], int]) -> Attack:
    offset, kind = (FIELDS | TABLE)[name]

    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        (good,) = struct.unpack_from(kind, out, offset)
        mask = (1 << 8 * struct.calcsize(kind)) - 1
        struct.pack_into(kind, out, offset, value(good) & mask)
        return sealed(bytes(out), content=name in TABLE)

    return attack


def _flip(share: float, bit: int) -> Attack:
    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        out[min(int(len(out) * share), len(out) - 1)] ^= 1 << bit
        return bytes(out)

    return attack


def _byte_swapped(data: bytes) -> bytes:
    """As a big-endian machine would write the header."""
    out = bytearray(data)
    for offset, kind in FIELDS.values():
        struct.pack_into(kind.replace("<", ">"), out, offset, struct.unpack_from(kind, out, offset)[0])
    return sealed(bytes(out), content=False)


def _token(value: int) -> Attack:
    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into("<i", out, struct.unpack_from("<Q", out, 128)[0], value)
        return sealed(bytes(out))

    return attack


def _another_model(data: bytes) -> bytes:
    out = bytearray(data)
    out[64:128] = b"0" * 64
    return sealed(bytes(out), content=False)


SNAPSHOTS: dict[str, Attack] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "header only": lambda data: data[:HEADER],
    "half a header": lambda data: data[: HEADER // 2],
    "one byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "one byte long": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "other magic": lambda data: sealed(b"EQKVSNAQ" + data[8:], content=False),
    "byte swapped": _byte_swapped,
    "another model": _another_model,
    "negative token": _token(-1),
    "huge token": _token(2**31 - 1),
    **{f"flip at {share} bit {bit}": _flip(share, bit) for share in (0, 0.1, 0.3, 0.5, 0.9, 1) for bit in (0, 7)},
    **{f"{name} zero": _field(name, lambda good: 0) for name in FIELDS if name not in ("flags", "cache_type")},
    **{f"{name} all ones": _field(name, lambda good: -1) for name in FIELDS | TABLE},
    **{f"{name} plus one": _field(name, lambda good: good + 1) for name in FIELDS | TABLE},
    **{
        f"{name} huge": _field(name, lambda good: good + (1 << 40))
        for name, (_, kind) in (FIELDS | TABLE).items()
        if kind == "<Q"
    },
    **{
        f"{name} overflow": _field(name, lambda good: 1 << 62)
        for name, (_, kind) in (FIELDS | TABLE).items()
        if kind == "<Q"
    },
}


# ---- packages: model.onnx, a ModelProto whose metadata_props (field 14) describe the model ----

METADATA = 14


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def entry(key: str, value: str) -> bytes:
    """A metadata property as it lies in the file."""
    strings = [
        b"\x0a" + varint(len(k)) + k if i == 0 else b"\x12" + varint(len(k)) + k
        for i, k in enumerate((key.encode(), value.encode()))
    ]
    body = b"".join(strings)
    return varint(METADATA << 3 | 2) + varint(len(body)) + body


# ---- descriptions: the text that both kinds of model files hold ----

Change = Callable[[str], str]  # of a description


def _line(name: str, value: str) -> Change:
    """Another value on the first line of that name."""
    return lambda text: re.sub(rf"^{name} .*$", lambda _: f"{name} {value}", text, count=1, flags=re.MULTILINE)


def _no_line(name: str) -> Change:
    return lambda text: re.sub(rf"^{name} .*\n", "", text, count=1, flags=re.MULTILINE)


_SIZES = ("format", "vocab_size", "max_positions", "kv_heads", "head_dim", "value_dim", "heads", "operator")
_BOUNDED = (*_SIZES, "window", "sinks", "rotary_offset", "learned_positions")
_WORDS = (*_SIZES, "cache", "positions", "rows", "pattern", "frequencies", "kind")
DESCRIPTIONS: dict[str, Change] = {
    **{
        f"{name} missing": _no_line(name)
        for name in (*_BOUNDED, "cache", "positions", "rows", "pattern", "frequencies")
    },
    **{f"{name} zero": _line(name, "0") for name in _SIZES},
    **{f"{name} negative": _line(name, "-1") for name in _BOUNDED},
    **{f"{name} huge": _line(name, "9" * 30) for name in _BOUNDED},
    **{f"{name} text": _line(name, "many\x1b[31m") for name in _WORDS},
    "no text": lambda text: "",
    "a line twice": lambda text: text.replace("heads 4\n", "heads 4\nheads 4\n", 1),
    "no end": lambda text: text[:-1],
    "half": lambda text: text[: len(text) // 2],
    "a text of a megabyte": lambda text: text + "a" * (1 << 20),
    "a thousand kinds": lambda text: text.replace("pattern", "".join(f"kind k{i}\n" for i in range(1000)) + "pattern"),
    "a million layers": lambda text: text.rstrip("\n") + " layer" * 10_000 + "\n",
    "a layer of no kind": _line("pattern", "layer other"),
    "rows of nothing": _line("rows", "of other"),
    "rows of itself": _line("rows", "of layer"),
    "a rotation of nothing": _line("frequencies", "nan 1 1 1"),
    "an odd rotation": _line("frequencies", "1 1 1 1 1"),
    "a rotation beyond the row": _line("rotary_offset", "2"),
    "values wider than the row": _line("value_dim", "9"),
    "sinks without a window": _line("sinks", "1"),
    "a newer operator": _line("operator", "3"),
    "a zero in it": lambda text: text.replace("head_dim 8", "head_dim 8\0", 1),
}


# ---- ONNX files ----


def _with_texts(change: Callable[[dict[str, str]], dict[str, str]]) -> Attack:
    """Other metadata edge_qkv.*."""

    def attack(data: bytes) -> bytes:
        import onnx

        model = onnx.ModelProto.FromString(data)
        texts = {p.key.removeprefix("edge_qkv."): p.value for p in model.metadata_props}
        del model.metadata_props[:]
        written = b"".join(entry(f"edge_qkv.{key}", value) for key, value in change(texts).items())
        return model.SerializeToString() + written

    return attack


def _described(change: Change) -> Attack:
    return _with_texts(lambda texts: texts | {"description": change(texts["description"])})


MODELS: dict[str, Attack] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "text": lambda data: b"not a model at all\n" * 100,
    "a length beyond the file": lambda data: data + b"\x72" + varint(1 << 40),
    "a length of all ones": lambda data: data + b"\x72" + varint((1 << 64) - 1),
    "a varint without end": lambda data: data + b"\x72" + b"\xff" * 20,
    "an unknown wire type": lambda data: data + b"\x77\x01",
    **{f"description, {name}": _described(change) for name, change in DESCRIPTIONS.items()},
    "no description": _with_texts(lambda texts: {"fingerprint": texts["fingerprint"]}),
    "no fingerprint": _with_texts(lambda texts: {"description": texts["description"]}),
    "a short fingerprint": _with_texts(lambda texts: texts | {"fingerprint": "abc"}),
    "kv_heads of another model": _described(_line("kv_heads", "2")),
    "head_dim of another model": _described(lambda text: _line("value_dim", "10")(_line("head_dim", "10")(text))),
    "layers of another model": _described(_line("pattern", "layer layer layer")),
    "vocab_size of another model": _described(_line("vocab_size", "1000")),
    "cache of another model": _described(_line("cache", "fp16")),
}


# ---- ExecuTorch programs: model.pte, a flatbuffer whose methods edge_qkv.* each return a text ----

DESCRIPTION = """\
format 3
vocab_size 260
max_positions 96
width 32
cache fp16
learned_positions 0
weight_bits 32
block_size 0
matrix_bytes 1000
table_bytes 2000
prefill_chunk 64
cache_rows 96
operator 2
executorch 1.5.1
kind layer
heads 4
kv_heads 1
head_dim 8
value_dim 8
rows unified
window 0
sinks 0
positions rotary-conjugate
rotary_offset 0
frequencies 1.0 0.1 0.01 0.001
mlp_width 48
mlp_matrices 3
pattern layer layer
"""
TEXTS = {"description": DESCRIPTION, "fingerprint": "0123456789abcdef" * 4}

# Of the extended header, see exir/_serialize/_program.py of ExecuTorch.
HEADER_FIELDS = {"program_size": 16, "segment_base": 24, "segment_bytes": 32}
# Places of fields in the tables of program.fbs.
_PLANS, _NAME, _VALUES, _OUTPUTS, _TYPE, _VALUE, _TEXT = 1, 0, 2, 4, 0, 1, 0


def _word(data: bytes, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _follow(data: bytes, at: int) -> int:
    return at + _word(data, at)


def _place(data: bytes, table: int, field: int) -> int:
    """Where a field of a table lies that the table has."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    return table + struct.unpack_from("<H", data, vtable + 4 + 2 * field)[0]


def places(data: bytes, key: str) -> dict[str, int]:
    """Where the words lie through which a reader finds the text of `key`."""
    at = {"root offset": 0, "root table": _follow(data, 0)}
    at["methods offset"] = _place(data, at["root table"], _PLANS)
    at["methods count"] = _follow(data, at["methods offset"])
    for method in range(_word(data, at["methods count"])):
        at["method offset"] = at["methods count"] + 4 + 4 * method
        at["method table"] = _follow(data, at["method offset"])
        at["name offset"] = _place(data, at["method table"], _NAME)
        at["name length"] = _follow(data, at["name offset"])
        name = data[at["name length"] + 4 :][: _word(data, at["name length"])]
        if name == b"edge_qkv." + key.encode():
            break
    else:
        raise KeyError(key)
    for list_name, field in (("values", _VALUES), ("outputs", _OUTPUTS)):
        at[f"{list_name} offset"] = _place(data, at["method table"], field)
        at[f"{list_name} count"] = _follow(data, at[f"{list_name} offset"])
    at["output index"] = at["outputs count"] + 4
    at["value offset"] = at["values count"] + 4
    at["value table"] = _follow(data, at["value offset"])
    at["union offset"] = _place(data, at["value table"], _VALUE)
    at["string table"] = _follow(data, at["union offset"])
    at["text offset"] = _place(data, at["string table"], _TEXT)
    at["text length"] = _follow(data, at["text offset"])
    return at


def _header(name: str, value: Callable[[int], int]) -> Attack:
    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        (good,) = struct.unpack_from("<Q", out, HEADER_FIELDS[name])
        struct.pack_into("<Q", out, HEADER_FIELDS[name], value(good) & _MASK)
        return bytes(out)

    return attack


def _at(place: str, value: int) -> Attack:
    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into("<I", out, places(data, "description")[place], value)
        return bytes(out)

    return attack


def _layout(table: str, *sizes: int) -> Attack:
    """Other sizes, and perhaps first fields, in the vtable of a table."""

    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        at = places(data, "description")[f"{table} table"]
        vtable = at - struct.unpack_from("<i", data, at)[0]
        struct.pack_into(f"<{len(sizes)}H", out, vtable, *sizes)
        return bytes(out)

    return attack


def _no_type(data: bytes) -> bytes:
    """The text as a value of a type that is no text."""
    out = bytearray(data)
    out[_place(data, places(data, "description")["value table"], _TYPE)] = 2
    return bytes(out)


def _renamed(key: str, name: str) -> Attack:
    """The method of `key` under another name of the same length."""

    def attack(data: bytes) -> bytes:
        out = bytearray(data)
        at = places(data, key)["name length"]
        assert len(name) == _word(data, at), name
        out[at + 4 : at + 4 + len(name)] = name.encode()
        return bytes(out)

    return attack


def _absent(key: str) -> Attack:
    return _renamed(key, f"edge-qkv.{key}")


def _returned(key: str, value: str) -> Attack:
    """Another text for `key`, between the program and its segments, which move."""

    def attack(data: bytes) -> bytes:
        size, base, _ = (struct.unpack_from("<Q", data, at)[0] for at in HEADER_FIELDS.values())
        out = bytearray(data[:size])
        out += bytes(-len(out) % 4)
        struct.pack_into("<I", out, (place := places(data, key)["text offset"]), len(out) - place)
        text = value.encode()
        out += struct.pack("<I", len(text)) + text + b"\0"
        struct.pack_into("<Q", out, HEADER_FIELDS["program_size"], len(out))
        out += bytes(-len(out) % 64)
        struct.pack_into("<Q", out, HEADER_FIELDS["segment_base"], len(out))
        return bytes(out) + data[base:]

    return attack


def _no_forward(data: bytes) -> bytes:
    """Its name with another first letter."""
    return data.replace(b"\7\0\0\0forward\0", b"\7\0\0\0Forward\0")


_OFFSETS = ("root", "methods", "method", "name", "values", "outputs", "value", "union", "text")
_TABLES = ("root", "method", "value", "string")
_COUNTS = ("methods count", "values count", "outputs count", "name length", "text length")
PROGRAMS: dict[str, Attack] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "header only": lambda data: data[:40],
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "text": lambda data: b"not a model at all\n" * 100,
    "an ONNX file": lambda data: varint(7 << 3 | 2) + varint(300) + bytes(300),
    "no header": lambda data: data[:8] + bytes(32) + data[40:],
    "no forward": _no_forward,
    "a number for a text": _no_type,
    **{f"{name} zero": _header(name, lambda good: 0) for name in ("program_size", "segment_base")},
    **{f"{name} all ones": _header(name, lambda good: -1) for name in HEADER_FIELDS},
    **{f"{name} huge": _header(name, lambda good: good + (1 << 40)) for name in HEADER_FIELDS},
    **{f"{name} overflow": _header(name, lambda good: 1 << 63) for name in HEADER_FIELDS},
    **{
        f"{name} offset {value:#x}": _at(f"{name} offset", value)
        for name in _OFFSETS
        for value in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF)
    },
    **{
        f"{name} vtable {value:#x}": _at(f"{name} table", value)
        for name in _TABLES
        for value in (0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
    },
    **{
        f"{name} layout {sizes}": _layout(name, *sizes)
        for name in _TABLES
        for sizes in ((0, 8), (4, 0), (0xFFFE, 8), (4, 0xFFFF), (4, 8), (14, 24, *(3,) * 5), (14, 24, *(0xFFFF,) * 5))
    },
    **{f"{name} {value:#x}": _at(name, value) for name in _COUNTS for value in (0x40000000, 0x7FFFFFFF, 0xFFFFFFFF)},
    **{f"output index {value:#x}": _at("output index", value) for value in (1, 0x7FFFFFFF, 0xFFFFFFFF)},
    "a text that ends early": _at("text length", 0),
    **{f"{key} missing": _absent(key) for key in TEXTS},
    **{f"description, {name}": _returned("description", change(DESCRIPTION)) for name, change in DESCRIPTIONS.items()},
    **{
        f"{name} {value}": _returned("description", _line(name, value)(DESCRIPTION))
        for name in ("cache_rows", "prefill_chunk")
        for value in ("0", "-1", "9" * 30, "many\x1b[31m")
    },
    "fewer rows than positions": _returned("description", _line("cache_rows", "95")(DESCRIPTION)),
    "too long a chunk": _returned("description", _line("prefill_chunk", str((1 << 20) + 1))(DESCRIPTION)),
    "a fingerprint of a megabyte": _returned("fingerprint", "a" * (1 << 20)),
    "a short fingerprint": _returned("fingerprint", "abc"),
}
