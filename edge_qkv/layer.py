"""One kind of layer: its attention, its MLP, and whose rows it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_qkv.errors import InputError

# sharing -> the projections a layer has; the key projection always exists. Names follow arXiv 2606.04032:
# "=" joins what is one tensor, "-" separates.
SHARING = {
    "qkv": ("query", "key", "value"),
    "q=k-v": ("key", "value"),
    "q-k=v": ("query", "key"),
    "q=k=v": ("key",),
}
# query -> whether it has a matrix. identity: q = x; residual: x + xW; residual_gelu: x + gelu(xW)
# (arXiv 2510.23912).
QUERY = {"projected": True, "identity": False, "residual": True, "residual_gelu": True}
MLP = ("gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh")
GATED = ("swiglu", "geglu", "geglu_tanh")
LAYER_POSITIONS = ("none", "rotary-conjugate", "rotary-on-read")
# RMSNorm of queries and keys with a weight: of each head, or of all heads of a token together.
QK_NORM = ("none", "head", "all")
ATTENTION_MATRICES, MLP_MATRICES = ("query", "key", "value", "output"), ("gate", "up", "down")
# Norms before and after the sub-layers, by what they stand at.
NORMS = ("attention", "attention_out", "mlp", "mlp_out")

_SIZE_LIMIT = 1 << 28


@dataclass(frozen=True)
class LayerSpec:
    """A kind of layer. Field names are those of `config.json`.

    D is head_dim, V value_dim. A query and a cached key row have D values, a value and what a head gives have V: where
    keys and values are one row the value is its first V values. Raises `InputError`, naming the field, when a value is
    unknown or two values contradict each other.
    """

    heads: int
    head_dim: int
    kv_heads: int
    mlp_width: int
    value_dim: int = 0  # 0: head_dim
    sharing: str = "qkv"
    query: str = "projected"
    rows_of: str = ""  # the kind whose rows it reads (the last such layer before it), writing none; "": its own
    positions: str = "none"
    rotary_dim: int = 0  # values of a row that are rotated; 0: all from rotary_offset on
    rotary_offset: int = 0  # the first of them
    rotary_base: float = 10000.0
    rotary_frequencies: tuple[float, ...] = ()  # radians a position for each pair; empty: base ** (-2i / rotary_dim)
    qk_norm: str = "none"
    value_norm: bool = False  # RMSNorm without weight of each head's value; of a unified row, its first V values
    key_weight: bool = False  # keys are a weight [D] times the row, values are the row: K = RoPE(w * V)
    window: int = 0  # tokens a query sees, itself included; 0: all
    sinks: int = 0  # first tokens that every query sees besides its window (arXiv 2309.17453)
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    biases: tuple[str, ...] = ()  # matrices that have one
    norms: tuple[str, ...] = ("attention", "mlp")
    mlp: str = "gelu"

    def __post_init__(self) -> None:
        for name in ("biases", "norms", "rotary_frequencies"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        size = (1, _SIZE_LIMIT - 1)
        check_fields(
            self,
            whole={
                **dict.fromkeys(("heads", "head_dim", "kv_heads", "mlp_width"), size),
                **dict.fromkeys(("value_dim", "rotary_dim", "rotary_offset", "window", "sinks"), (0, size[1])),
            },
            numbers=("rotary_base", "attention_scale"),
            flags=("value_norm", "key_weight"),
            choices={
                "sharing": tuple(SHARING),
                "query": tuple(QUERY),
                "positions": LAYER_POSITIONS,
                "qk_norm": QK_NORM,
                "mlp": MLP,
            },
            names={"biases": (*ATTENTION_MATRICES, *MLP_MATRICES), "norms": NORMS},
        )
        check = self._check
        check(isinstance(self.rows_of, str), "rows_of", "must be the name of a kind")
        check(self.rotary_base > 1, "rotary_base", "must be above 1")
        check(self.attention_scale >= 0, "attention_scale", "must be positive, or 0 for 1/sqrt(head_dim)")
        check(self.heads % self.kv_heads == 0, "kv_heads", f"must divide heads ({self.heads})")
        check(self.window > 0 or self.sinks == 0, "sinks", "needs a window")
        room = self.head_dim - self.rotary_offset
        even = self.rotary_dim % 2 == 0 and self.rotary_dim <= room
        check(even, "rotary_dim", f"must be even and with rotary_offset at most head_dim ({self.head_dim})")
        self._check_rows()
        if self.rotary:
            self._check_rotation()
        if self.query_shares_key:
            check(self.query == "projected", "query", f"must be projected when sharing is {self.sharing}")
            check(self.kv_heads == self.heads, "kv_heads", f"must equal heads when sharing is {self.sharing}")
            check(not self.rows_of, "rows_of", f"needs a query of its own, which sharing {self.sharing} has not")

    def _check_rows(self) -> None:
        check = self._check
        if self.unified:
            check(self.value_dim <= self.head_dim, "value_dim", f"must be at most head_dim ({self.head_dim}), whose "
                  "first values it is where keys and values are one row")  # fmt: skip
        check(not self.query_shares_key or self.values == self.head_dim, "value_dim", "must be head_dim when Q = K")
        if self.key_weight:
            check(self.unified, "key_weight", "needs keys and values in one row (sharing q-k=v or q=k=v)")
            check(self.positions != "rotary-conjugate", "key_weight", "needs positions rotary-on-read or none")

    def _check_rotation(self) -> None:
        check, end = self._check, self.rotary_offset + self.rotated
        check(self.rotated > 0, "rotary_offset", f"must be below head_dim ({self.head_dim})")
        check(self.rotated % 2 == 0, "rotary_dim", "must be set when head_dim is odd")
        apart = self.rotary_offset >= self.values or end <= self.values
        conjugate_row = self.unified and self.positions == "rotary-conjugate"
        check(
            apart or not conjugate_row,
            "rotary_offset",
            f"the rotated values must all be among the first value_dim ({self.values}), or none of them",
        )
        given = self.rotary_frequencies
        sound = all(isinstance(f, (int, float)) and not isinstance(f, bool) and math.isfinite(f) for f in given)
        check(
            not given or (sound and len(given) == self.rotated // 2),
            "rotary_frequencies",
            f"must be {self.rotated // 2} numbers, one for each pair of rotated values",
        )

    def _check(self, sound: bool, name: str, rule: str) -> None:
        if not sound:
            raise InputError(f"config field {name} = {getattr(self, name)!r}: {rule}")

    # ---- derived ----

    @property
    def query_shares_key(self) -> bool:
        """The query is the key projection (Q=K)."""
        return "query" not in SHARING[self.sharing]

    @property
    def unified(self) -> bool:
        """Keys and values are one tensor: the cache keeps one row a token and kv head."""
        return "value" not in SHARING[self.sharing]

    @property
    def projections(self) -> tuple[str, ...]:
        """The attention matrices a layer holds besides its output, in order."""
        own = SHARING[self.sharing] if not self.rows_of else ("query",)
        return tuple(p for p in own if p != "query" or QUERY[self.query])

    @property
    def values(self) -> int:
        """V: of a value and of what a head gives."""
        return self.value_dim or self.head_dim

    @property
    def rotary(self) -> bool:
        return self.positions.startswith("rotary")

    @property
    def rotated(self) -> int:
        """R: values of a row that are rotated (0 without rotary positions)."""
        return (self.rotary_dim or self.head_dim - self.rotary_offset) if self.rotary else 0

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians a position of each of the R/2 pairs."""
        half = self.rotated // 2
        return self.rotary_frequencies or tuple(float(self.rotary_base) ** (-i / half) for i in range(half))

    @property
    def rotation(self) -> tuple:
        """Equal where rows are rotated alike."""
        return self.positions, self.rotary_offset if self.rotary else 0, self.frequencies

    @property
    def output_rotated(self) -> bool:
        """Whether what a head gives was rotated with the rows, and is to be turned back."""
        inside = self.rotary_offset + self.rotated <= self.values
        return self.unified and self.positions == "rotary-conjugate" and inside

    @property
    def scale(self) -> float:
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def gated_mlp(self) -> bool:
        return self.mlp in GATED

    @property
    def caches(self) -> int:
        """Tensors of rows that attention reads: 1 when unified, else 2."""
        return 1 if self.unified else 2

    @property
    def norms_keys(self) -> bool:
        """Whether keys have a norm of their own; a key weight takes its place."""
        return self.qk_norm != "none" and not self.key_weight and not self.rows_of and not self.query_shares_key

    @property
    def head_norms(self) -> tuple[int, ...]:
        """Values of the weights of the norms of queries and keys."""
        if self.qk_norm == "none":
            return ()
        heads = (self.heads, self.kv_heads) if self.qk_norm == "all" else (1, 1)
        return tuple(self.head_dim * count for count in heads[: 2 if self.norms_keys else 1])

    @property
    def variant(self) -> str:
        """Short name in the notation of arXiv 2606.04032, e.g. 'Q-MQA', 'GQA-4', 'Q-K=V'."""
        if self.kv_heads == self.heads:
            name = {"qkv": "QKV"}.get(self.sharing, self.sharing.upper())
        else:
            group = "MQA" if self.kv_heads == 1 else f"GQA-{self.kv_heads}"
            name = f"Q-{group}" if self.unified else group
        return name if self.query == "projected" else f"{name} ({self.query} query)"

    def matrices(self, width: int) -> list[tuple[str, int, int, bool]]:
        """(name, outputs, inputs, bias) of the layer's matrices in a stream of `width`."""
        outputs = {
            "query": self.heads * self.head_dim,
            "key": self.kv_heads * self.head_dim,
            "value": self.kv_heads * self.values,
        }
        gate = [("gate", self.mlp_width, width)] if self.gated_mlp else []
        shapes = [
            *((name, outputs[name], width) for name in self.projections),
            ("output", width, self.heads * self.values),
            ("up", self.mlp_width, width),
            *gate,
            ("down", width, self.mlp_width),
        ]
        return [(name, o, i, name in self.biases) for name, o, i in shapes]


LAYER_FIELDS = tuple(f.name for f in dataclasses.fields(LayerSpec) if f.name != "positions")


def biases(attention: bool, mlp: bool) -> tuple[str, ...]:
    """`LayerSpec.biases` where all matrices of a sub-layer have one, or none has."""
    return (ATTENTION_MATRICES if attention else ()) + (MLP_MATRICES if mlp else ())


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_fields(
    record: Any,
    *,
    whole: Mapping[str, tuple[int, int]],
    numbers: Sequence[str],
    flags: Sequence[str],
    choices: Mapping[str, Sequence[str]],
    names: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Checks the fields of a config record one by one: whole numbers by bounds, numbers that float32 holds, flags,
    words of a list, and tuples of such words. Raises `InputError`."""

    def check(sound: bool, name: str, rule: str) -> None:
        if not sound:
            raise InputError(f"config field {name} = {getattr(record, name)!r}: {rule}")

    for name, (least, most) in whole.items():
        value = getattr(record, name)
        check(is_whole(value), name, "must be a whole number")
        check(least <= value <= most, name, f"must be in {least}..{most}")
    for name in numbers:
        value = getattr(record, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        check(number and -1e38 < value < 1e38, name, "must be a number that float32 holds")
    for name in flags:
        check(isinstance(getattr(record, name), bool), name, "must be true or false")
    for name, allowed in choices.items():
        value = getattr(record, name)
        check(isinstance(value, str) and value in allowed, name, f"must be one of {', '.join(allowed)}")
    for name, allowed in (names or {}).items():
        value = getattr(record, name)
        sound = isinstance(value, tuple) and len(set(map(str, value))) == len(value)
        check(sound and all(v in allowed for v in value), name, f"must list some of {', '.join(allowed)}")
