"""The attention operator as every exported file names it: inputs, outputs and attributes in their order.

What it computes is `edge_qkv.attention.attend`; the native kernel is `runtime/attention/attention.h`.
"""

from __future__ import annotations

from typing import Any

from edge_qkv.layer import LayerSpec

INPUTS = (
    *("query", "kv", "cache", "past", "cos", "sin", "value", "value_cache"),
    *("cache_scale", "value_cache_scale", "key_weight"),
)
ATTRIBUTES = (
    *("num_heads", "kv_heads", "scale", "rotary", "rotary_dim", "rotary_offset", "value_dim", "window", "sinks"),
)
_ROTARY = {"rotary-conjugate": "conjugate", "rotary-on-read": "on_read"}  # other positions: "none"


def attributes(spec: LayerSpec) -> dict[str, int | float | str]:
    """The values of `ATTRIBUTES` for a kind of layer, in their order."""
    rotary = _ROTARY.get(spec.positions, "none")
    offset = spec.rotary_offset if spec.rotary else 0
    values = (spec.heads, spec.kv_heads, spec.scale, rotary, spec.rotated, offset, spec.values, spec.window, spec.sinks)
    return dict(zip(ATTRIBUTES, values, strict=True))


def inputs(
    spec: LayerSpec,
    query: Any,
    key: Any,
    value: Any,
    caches: tuple,
    past: Any,
    tables: tuple | None,
    key_weight: Any = None,
) -> dict[str, Any]:
    """The arguments of `edge_qkv.attention.attend` by their names in `INPUTS`, in that order; None: absent."""
    rows, scales = caches[: spec.caches], caches[spec.caches :]
    given = {"query": query, "kv": key, "past": past, "value": value, "key_weight": key_weight}
    given |= dict(zip(("cache", "value_cache"), rows, strict=False))
    given |= dict(zip(("cache_scale", "value_cache_scale"), scales, strict=False))
    if tables is not None:
        given["cos"], given["sin"] = tables
    return {name: given.get(name) for name in INPUTS}
