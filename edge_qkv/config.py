"""The description of a decoder: every size and choice, validated, and what follows from them alone.

A model is a stream of width N and a list of layers of a few kinds. A `ModelConfig` is all that is needed to count
parameters and cache bytes, so that a model can be judged before a single weight is read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_qkv import files
from edge_qkv.errors import InputError
from edge_qkv.layer import LAYER_FIELDS, LayerSpec, check_fields, is_whole

NORM = ("layernorm", "rmsnorm")
RESIDUAL = ("sequential", "parallel")
# What --positions takes: learned positions are the stream's, the others a layer's.
POSITIONS = ("learned", "rotary-conjugate", "rotary-on-read", "none")
# Cache type -> bytes of a value, and bytes that a row of a kv head has besides: int8 rows have an fp16 scale.
CACHE_BYTES = {"fp32": (4, 0), "fp16": (2, 0), "int8": (1, 2)}

ONLY_KIND = "layer"  # the name of the kind where a model has one
_SIZE_LIMIT = 1 << 28  # above any real model; keeps every product of two sizes inside 64 bits
_MOST_LAYERS = 1 << 10  # far above published models; more would take minutes just to lay out
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
_REPEATED = re.compile(r"([a-z][a-z0-9_]*)(?:\*([0-9]{1,4}))?\Z")


@dataclass(frozen=True)
class CacheTensor:
    """A tensor that a cache holds: rows [B, kv_heads, C, dim], or the scales of int8 rows, [B, kv_heads, C]."""

    layer: int
    part: str  # kv: rows that are keys and values; key; value
    kv_heads: int
    dim: int  # values of a row
    window: int  # tokens a query sees of it; 0: all
    sinks: int
    row_bytes: int  # of one kv head
    scales: bool = False

    @property
    def kind(self) -> str:
        """kv, key, value, kv_scale, key_scale or value_scale."""
        return f"{self.part}_scale" if self.scales else self.part

    @property
    def name(self) -> str:
        """The graph's name of it, such as kv.3."""
        return f"{self.kind}.{self.layer}"

    def live_rows(self, tokens: int, margin: int = 0) -> int:
        """Rows that are kept after `tokens` tokens: all, or the window, its margin (0: another window) and sinks."""
        if not self.window:
            return tokens
        return min(tokens, self.sinks + self.window + (margin or self.window))


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Field names are those of `config.json`.

    Raises `InputError`, naming the field, when a value is unknown or two values contradict each other.
    """

    vocab_size: int
    max_positions: int
    width: int  # N, of the stream
    kinds: Mapping[str, LayerSpec]
    pattern: tuple[str, ...]  # the kind of each layer
    learned_positions: bool = False
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    tied_head: bool = True
    trained_context: int = 0  # tokens the model was trained on at once; 0: max_positions
    embedding_scale: float = 1.0
    residual: str = "sequential"  # parallel: attention and MLP read the same stream
    residual_scale: float = 1.0  # of what a sub-layer adds to the stream
    layer_scalars: bool = False  # a weight a layer that multiplies the stream after it
    input_embeddings: int = 0  # width of an embedding that each layer has of its own for a token; 0: none
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # c: logits become c * tanh(logits / c); 0: they stay

    def __post_init__(self) -> None:
        check_fields(
            self,
            whole={
                "vocab_size": (1, _SIZE_LIMIT - 1),
                "max_positions": (1, _SIZE_LIMIT - 1),
                "width": (1, _SIZE_LIMIT - 1),
                "trained_context": (0, _SIZE_LIMIT - 1),
                "input_embeddings": (0, _SIZE_LIMIT - 1),
            },
            numbers=("norm_eps", "embedding_scale", "residual_scale", "logit_scale", "logit_softcap"),
            flags=("learned_positions", "norm_bias", "tied_head", "layer_scalars"),
            choices={"norm": NORM, "residual": RESIDUAL},
        )
        self._check(self.norm_eps > 0, "norm_eps", "must be above 0")
        self._check(self.logit_softcap >= 0, "logit_softcap", "must be positive, or 0 for none")
        self._check(
            self.trained_context <= self.max_positions,
            "trained_context",
            f"must be at most max_positions ({self.max_positions})",
        )
        kinds = self.kinds
        self._check(isinstance(kinds, Mapping) and 0 < len(kinds) <= 64, "kinds", "must name 1 to 64 kinds of layers")
        for name, spec in kinds.items():
            sound = isinstance(name, str) and _NAME.match(name) and isinstance(spec, LayerSpec)
            self._check(bool(sound), "kinds", "names have small letters, digits and _, each with the fields of a layer")
            try:
                self._check_kind(spec)
            except InputError as error:
                raise InputError(str(error) if len(kinds) == 1 else f"layers of kind {name}: {error}") from None
        object.__setattr__(self, "pattern", tuple(self.pattern))
        self._check(0 < len(self.pattern) <= _MOST_LAYERS, "pattern", f"must have 1 to {_MOST_LAYERS} layers")
        missing = next((name for name in self.pattern if name not in kinds), None)
        self._check(missing is None, "pattern", f"{missing!r} is none of the kinds ({', '.join(map(str, kinds))})")
        unused = next((name for name in kinds if name not in self.pattern), None)
        self._check(unused is None, "kinds", f"no layer of the pattern is of kind {unused!r}")
        _ = self.rows_from  # checks what layers read

    def __hash__(self) -> int:
        return hash((self.vocab_size, self.max_positions, self.width, tuple(self.kinds.items()), self.pattern))

    def _check_kind(self, spec: LayerSpec) -> None:
        for name in ("window", "sinks"):
            if getattr(spec, name) > self.max_positions:
                rule = f"must be from 0 to max_positions ({self.max_positions})"
                raise InputError(f"config field {name} = {getattr(spec, name)!r}: {rule}")
        if spec.query != "projected" and self.width != spec.heads * spec.head_dim:
            raise InputError(
                f"config field query = {spec.query!r}: {spec.query} needs width = heads * head_dim "
                f"({spec.heads * spec.head_dim}), not {self.width}"
            )

    def _check(self, sound: bool, name: str, rule: str) -> None:
        if not sound:
            value = repr(getattr(self, name))
            raise InputError(f"config field {name} = {value if len(value) < 80 else value[:77] + '...'}: {rule}")

    @classmethod
    def uniform(cls, *, layers: int, positions: str = "none", **fields: Any) -> ModelConfig:
        """A model whose layers are all alike: the fields of `ModelConfig` and of its one `LayerSpec` together.

        positions: one of `POSITIONS`.
        """
        if positions not in POSITIONS:
            raise InputError(f"config field positions = {positions!r}: must be one of {', '.join(POSITIONS)}")
        if not (is_whole(layers) and 0 < layers <= _MOST_LAYERS):
            raise InputError(f"config field layers = {layers!r}: must be a whole number in 1..{_MOST_LAYERS}")
        learned = positions == "learned"
        own = {name: fields.pop(name) for name in LAYER_FIELDS if name in fields}
        spec = LayerSpec(positions="none" if learned else positions, **own)
        return cls(kinds={ONLY_KIND: spec}, pattern=(ONLY_KIND,) * layers, learned_positions=learned, **fields)

    def with_layers(self, **changes: Any) -> ModelConfig:
        """The model with these fields of every kind changed."""
        kinds = {name: dataclasses.replace(spec, **changes) for name, spec in self.kinds.items()}
        return dataclasses.replace(self, kinds=kinds)

    # ---- derived ----

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The kind of each layer, looked up."""
        return tuple(self.kinds[name] for name in self.pattern)

    @functools.cached_property
    def rows_from(self) -> tuple[int, ...]:
        """For each layer the one whose rows it reads: itself, or an earlier one."""
        found, last = [], {}
        for i, name in enumerate(self.pattern):
            spec = self.kinds[name]
            if not spec.rows_of:
                last[name] = i
                found.append(i)
                continue
            source = self.kinds.get(spec.rows_of)
            rule = f"layer {i} of kind {name} reads rows of kind {spec.rows_of!r}, "
            self._check(source is not None and not source.rows_of, "kinds", f"{rule}which is no kind with own rows")
            self._check(spec.rows_of in last, "pattern", f"{rule}of which none comes before it")
            same = all(getattr(spec, n) == getattr(source, n) for n in ("kv_heads", "head_dim", "values", "unified"))
            self._check(same, "kinds", f"{rule}whose rows have another shape")
            self._check(spec.rotation == source.rotation, "kinds", f"{rule}which have other positions")
            seen = not source.window or (0 < spec.window <= source.window and spec.sinks <= source.sinks)
            self._check(seen, "kinds", f"{rule}which are kept for a shorter window or fewer sinks")
            found.append(last[spec.rows_of])
        return tuple(found)

    @property
    def only(self) -> LayerSpec:
        """The one kind of a model whose layers are alike; raises `InputError` where they differ."""
        if len(self.kinds) > 1:
            raise InputError(f"the model has layers that differ ({', '.join(self.kinds)}), which is not supported here")
        return next(iter(self.kinds.values()))

    @property
    def uniform_layers(self) -> bool:
        return len(self.kinds) == 1

    @property
    def rotary(self) -> bool:
        """Whether any layer rotates."""
        return any(spec.rotary for spec in self.kinds.values())

    @property
    def positions(self) -> str:
        """How positions enter, for a person: one of `POSITIONS`, or several of them."""
        names = dict.fromkeys(spec.positions for spec in self.kinds.values())
        if self.learned_positions:
            names = {"learned": None} | {name: None for name in names if name != "none"}
        return ", ".join(names)

    @property
    def variant(self) -> str:
        """Short name in the notation of arXiv 2606.04032, e.g. 'Q-MQA', 'GQA-4', 'Q-K=V'; of each kind where there
        are several."""
        if self.uniform_layers:
            return self.only.variant
        return ", ".join(f"{self.pattern.count(name)} {name} {spec.variant}" for name, spec in self.kinds.items())

    def cache_tensors(self, cache: str = "fp16") -> tuple[CacheTensor, ...]:
        """What a cache of this type holds: layer by layer rows, and after int8 rows their scales."""
        value, scale = CACHE_BYTES[cache]
        tensors = []
        for i, spec in enumerate(self.layers):
            if spec.rows_of:
                continue
            parts = {"kv": spec.head_dim} if spec.unified else {"key": spec.head_dim, "value": spec.values}
            own = [
                CacheTensor(i, part, spec.kv_heads, dim, spec.window, spec.sinks, dim * value)
                for part, dim in parts.items()
            ]
            tensors += own
            if scale:
                tensors += [dataclasses.replace(tensor, scales=True, row_bytes=scale) for tensor in own]
        return tuple(tensors)

    def cache_bytes_per_token(self, cache: str = "fp16") -> int:
        """Bytes one token adds to the cache over all layers."""
        return sum(tensor.kv_heads * tensor.row_bytes for tensor in self.cache_tensors(cache))

    def cache_bytes(self, tokens: int, cache: str = "fp16", margin: int = 0) -> int:
        """Bytes of the rows that are kept after `tokens` tokens (the tables of arXiv 2606.04032, exactly).

        margin: rows of windowed layers that are kept behind their window; 0: as many as the window.
        """
        return sum(t.kv_heads * t.row_bytes * t.live_rows(tokens, margin) for t in self.cache_tensors(cache))

    def parameters(self) -> int:
        """Number of trained values; a tied head counts once."""
        norm = self.width * (2 if self.norm_bias else 1)
        embedding = self.vocab_size * self.width
        count = embedding * (1 if self.tied_head else 2) + norm
        count += self.max_positions * self.width if self.learned_positions else 0
        for spec in self.layers:
            count += sum(o * i + (o if bias else 0) for _, o, i, bias in spec.matrices(self.width))
            count += len(spec.norms) * norm + sum(spec.head_norms) + (spec.head_dim if spec.key_weight else 0)
        count += len(self.layers) if self.layer_scalars else 0
        if inner := self.input_embeddings:
            every = len(self.layers) * inner
            count += self.vocab_size * every + self.width * every + inner
            count += len(self.layers) * (2 * self.width * inner + norm)
        return count

    @property
    def multi_head(self) -> ModelConfig:
        """The same model with a key and a value for each head and all tokens, the yardstick of cache sizes."""
        plain = dict(sharing="qkv", query="projected", rows_of="", key_weight=False, window=0, sinks=0)
        kinds = {n: dataclasses.replace(spec, kv_heads=spec.heads, **plain) for n, spec in self.kinds.items()}
        return dataclasses.replace(self, kinds=kinds)

    # ---- files ----

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json`: what has its default is left out, repeated layers are counted."""
        fields = {n: v for n, v in _given(self).items() if n not in ("kinds", "pattern")}
        fields["kinds"] = {name: _given(spec) for name, spec in self.kinds.items()}
        return fields | {"pattern": write_pattern(self.pattern)}

    @classmethod
    def from_dict(cls, fields: Any, source: str) -> ModelConfig:
        """Builds a config from parsed JSON; `source` names the file in errors."""
        _check_names(fields, cls, source, "an object with the fields of a model config")
        kinds = fields["kinds"]
        if not isinstance(kinds, dict):
            raise InputError(f"{source}: config field kinds: must be an object of kinds of layers by name")
        for name, spec in kinds.items():
            _check_names(spec, LayerSpec, source, f"kind {name!r} to be an object with the fields of a layer")
        try:
            specs = {name: LayerSpec(**_tuples(spec)) for name, spec in kinds.items()}
            return cls(**{**_tuples(fields), "kinds": specs, "pattern": read_pattern(fields["pattern"])})
        except InputError as error:
            raise InputError(f"{source}: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a `config.json`."""
        return cls.from_dict(files.read_json(Path(path), "config.json"), str(path))


def read_pattern(text: Any) -> tuple[str, ...]:
    """'local*5 global' -> the kind of each layer."""
    words = text.split() if isinstance(text, str) else []
    found = [_REPEATED.match(word) for word in words]
    if not words or not all(found):
        raise InputError(f"config field pattern = {str(text)[:40]!r}: must be names of kinds such as 'local*5 global'")
    pattern = []
    for match in found:
        pattern += [match[1]] * int(match[2] or 1)
        if len(pattern) > _MOST_LAYERS:
            raise InputError(f"config field pattern: must have 1 to {_MOST_LAYERS} layers")
    return tuple(pattern)


def write_pattern(pattern: Iterable[str]) -> str:
    """The inverse of `read_pattern`."""
    runs: list[list] = []
    for name in pattern:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _given(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that have not their default, as JSON has them."""
    values = {f.name: (getattr(record, f.name), f.default) for f in dataclasses.fields(record)}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, (v, default) in values.items() if v != default}
    return plain


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _check_names(fields: Any, record: type, source: str, what: str) -> None:
    if not isinstance(fields, dict):
        raise InputError(f"{source}: expected {what}")
    known = {f.name: f for f in dataclasses.fields(record)}
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise InputError(f"{source}: unknown config field {str(unknown[0])[:40]!r}; known: {', '.join(known)}")
    missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
    if missing:
        raise InputError(f"{source}: config field {missing[0]} is missing")
