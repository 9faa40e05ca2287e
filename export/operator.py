"""The attention operator as every exported file names it: inputs, outputs and attributes in their order.

What it computes is `edge_qkv.attention.attend`; the native kernel is `runtime/attention/attention.h`.
"""

from __future__ import annotations

from typing import Any

from edge_qkv.config import ModelConfig

VERSION = 1
INPUTS = (
    *("query", "kv", "cache", "past", "cos", "sin", "value", "value_cache"),
    *("cache_scale", "value_cache_scale"),
)
ATTRIBUTES = ("num_heads", "kv_heads", "scale", "rotary", "rotary_dim", "window", "sinks")
_ROTARY = {"rotary-conjugate": "conjugate", "rotary-on-read": "on_read"}  # other positions: "none"


def attributes(config: ModelConfig) -> dict[str, int | float | str]:
    """The values of `ATTRIBUTES`, in their order."""
    rotary = _ROTARY.get(config.positions, "none")
    values = (config.heads, config.kv_heads, config.scale, rotary, config.rotated, config.window, config.sinks)
    return dict(zip(ATTRIBUTES, values, strict=True))


def inputs(
    config: ModelConfig, query: Any, key: Any, value: Any, caches: tuple, past: Any, tables: tuple | None
) -> dict[str, Any]:
    """The arguments of `edge_qkv.attention.attend` by their names in `INPUTS`, in that order; None: absent."""
    rows, scales = caches[: config.caches], caches[config.caches :]
    given = {"query": query, "kv": key, "past": past, "value": value}
    given |= dict(zip(("cache", "value_cache"), rows, strict=False))
    given |= dict(zip(("cache_scale", "value_cache_scale"), scales, strict=False))
    if tables is not None:
        given["cos"], given["sin"] = tables
    return {name: given.get(name) for name in INPUTS}


def cache_kinds(config: ModelConfig, cache: str) -> tuple[str, ...]:
    """What a layer caches, in the order of `Decoder.new_caches`: rows, and after int8 ones their scales."""
    kinds = ("kv",) if config.unified else ("key", "value")
    return kinds + tuple(f"{kind}_scale" for kind in kinds) if cache == "int8" else kinds


def description(config: ModelConfig, cache: str) -> dict[str, str]:
    """What a model file says of its model, for a runtime that has nothing but the file."""
    facts = {
        "format": 2,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "caches": config.caches,
        "cache_type": cache,
        "window": config.window,
        "sinks": config.sinks,
        "positions": config.positions,
        "rotary_dim": config.rotated,
        "rotary_base": float(config.rotary_base),
        "mlp_width": config.mlp_width,
        "mlp_matrices": 3 if config.gated_mlp else 2,
    }
    return {name: str(value) for name, value in facts.items()}
