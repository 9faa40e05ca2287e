"""The description of a decoder: every size and choice, validated, and what follows from them alone.

A `ModelConfig` is all that is needed to count parameters and cache bytes, so that a model can be judged
before a single weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_qkv import files
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
MLP = ("gelu", "gelu_tanh", "swiglu", "geglu")
NORM = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary-conjugate", "rotary-on-read", "none")
# Cache type -> bytes of a value, and bytes that a row of a kv head has besides: int8 rows have an fp16 scale.
CACHE_BYTES = {"fp32": (4, 0), "fp16": (2, 0), "int8": (1, 2)}

_SIZES = ("vocab_size", "max_positions", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width")
_SIZE_LIMIT = 1 << 28  # above any real model; keeps every product of two sizes inside 64 bits


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Field names are those of `config.json`.

    Raises `InputError`, naming the field, when a value is unknown or two values contradict each other.
    """

    vocab_size: int
    max_positions: int
    layers: int
    width: int
    heads: int
    head_dim: int
    kv_heads: int
    mlp_width: int
    sharing: str = "qkv"
    query: str = "projected"
    mlp: str = "gelu"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    positions: str = "learned"
    rotary_dim: int = 0  # values of a row that are rotated; 0: all of head_dim
    rotary_base: float = 10000.0
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    window: int = 0  # tokens a query sees, itself included; 0: all
    sinks: int = 0  # first tokens that every query sees besides its window (arXiv 2309.17453)
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    tied_head: bool = True
    trained_context: int = 0  # tokens the model was trained on at once; 0: max_positions

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._check(_is_int(getattr(self, name)), name, "must be a whole number")
            self._check(0 < getattr(self, name) < _SIZE_LIMIT, name, f"must be in 1..{_SIZE_LIMIT - 1}")
        for name, allowed in (
            ("sharing", tuple(SHARING)),
            ("query", tuple(QUERY)),
            ("mlp", MLP),
            ("norm", NORM),
            ("positions", POSITIONS),
        ):
            self._check(getattr(self, name) in allowed, name, f"must be one of {', '.join(allowed)}")
        for name in ("attention_bias", "mlp_bias", "norm_bias", "tied_head"):
            self._check(isinstance(getattr(self, name), bool), name, "must be true or false")
        for name in ("norm_eps", "rotary_base", "attention_scale"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            self._check(number and -1e38 < value < 1e38, name, "must be a number that float32 holds")
        self._check(self.norm_eps > 0, "norm_eps", "must be above 0")
        self._check(self.rotary_base > 1, "rotary_base", "must be above 1")
        self._check(self.attention_scale >= 0, "attention_scale", "must be positive, or 0 for 1/sqrt(head_dim)")
        self._check(self.heads % self.kv_heads == 0, "kv_heads", f"must divide heads ({self.heads})")
        self._check(_is_int(self.rotary_dim), "rotary_dim", "must be a whole number")
        self._check(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "rotary_dim",
            f"must be even and at most head_dim ({self.head_dim})",
        )
        if self.rotary and self.rotary_dim == 0:
            self._check(self.head_dim % 2 == 0, "rotary_dim", "must be set when head_dim is odd")
        for name in ("window", "sinks"):
            self._check(_is_int(getattr(self, name)), name, "must be a whole number")
            self._check(
                0 <= getattr(self, name) <= self.max_positions,
                name,
                f"must be from 0 to max_positions ({self.max_positions})",
            )
        self._check(self.window > 0 or self.sinks == 0, "sinks", "needs a window")
        self._check(_is_int(self.trained_context), "trained_context", "must be a whole number")
        self._check(
            0 <= self.trained_context <= self.max_positions,
            "trained_context",
            f"must be at most max_positions ({self.max_positions})",
        )
        if self.query_shares_key:
            self._check(self.query == "projected", "query", f"must be projected when sharing is {self.sharing}")
            self._check(self.kv_heads == self.heads, "kv_heads", f"must equal heads when sharing is {self.sharing}")
        if self.query != "projected":
            self._check(
                self.width == self.heads * self.head_dim,
                "query",
                f"{self.query} needs width = heads * head_dim ({self.heads * self.head_dim}), not {self.width}",
            )

    def _check(self, sound: bool, field: str, rule: str) -> None:
        if not sound:
            raise InputError(f"config field {field} = {getattr(self, field)!r}: {rule}")

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
        return tuple(p for p in SHARING[self.sharing] if p != "query" or QUERY[self.query])

    @property
    def rotary(self) -> bool:
        return self.positions.startswith("rotary")

    @property
    def rotated(self) -> int:
        """Values of a row that are rotated (0 without rotary positions)."""
        return (self.rotary_dim or self.head_dim) if self.rotary else 0

    @property
    def scale(self) -> float:
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def gated_mlp(self) -> bool:
        return self.mlp in ("swiglu", "geglu")

    @property
    def caches(self) -> int:
        """Cached tensors a layer: 1 when unified, else 2."""
        return 1 if self.unified else 2

    @property
    def variant(self) -> str:
        """Short name in the notation of arXiv 2606.04032, e.g. 'Q-MQA', 'GQA-4', 'Q-K=V'."""
        if self.kv_heads == self.heads:
            name = {"qkv": "QKV"}.get(self.sharing, self.sharing.upper())
        else:
            group = "MQA" if self.kv_heads == 1 else f"GQA-{self.kv_heads}"
            name = f"Q-{group}" if self.unified else group
        return name if self.query == "projected" else f"{name} ({self.query} query)"

    def cache_bytes_per_token(self, cache: str = "fp16") -> int:
        """Bytes one token adds to the cache over all layers."""
        value, row = CACHE_BYTES[cache]
        return self.layers * self.caches * self.kv_heads * (self.head_dim * value + row)

    def cache_bytes(self, tokens: int, cache: str = "fp16") -> int:
        """Bytes of a cache that holds `tokens` tokens (the tables of arXiv 2606.04032, exactly)."""
        return tokens * self.cache_bytes_per_token(cache)

    def parameters(self) -> int:
        """Number of trained values; a tied head counts once."""
        norm = self.width * (2 if self.norm_bias else 1)
        outs = {"query": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        attention = sum(_linear(self.width, outs[p] * self.head_dim, self.attention_bias) for p in self.projections)
        attention += _linear(self.heads * self.head_dim, self.width, self.attention_bias)
        up = _linear(self.width, self.mlp_width, self.mlp_bias) * (2 if self.gated_mlp else 1)
        mlp = up + _linear(self.mlp_width, self.width, self.mlp_bias)
        embedding = self.vocab_size * self.width
        return (
            embedding * (1 if self.tied_head else 2)
            + (self.max_positions * self.width if self.positions == "learned" else 0)
            + self.layers * (2 * norm + attention + mlp)
            + norm
        )

    # ---- files ----

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Any, source: str) -> ModelConfig:
        """Builds a config from parsed JSON; `source` names the file in errors."""
        if not isinstance(fields, dict):
            raise InputError(f"{source}: expected an object with the fields of a model config")
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise InputError(f"{source}: unknown config field {unknown[0]!r}; known: {', '.join(known)}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise InputError(f"{source}: config field {missing[0]} is missing")
        try:
            return cls(**fields)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a `config.json`."""
        return cls.from_dict(files.read_json(Path(path), "config.json"), str(path))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)
