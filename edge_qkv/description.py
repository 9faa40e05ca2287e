"""The text by which a model file describes its model: the only list of its facts that the runtime and plans read.

Lines "name value"; after `kind NAME` come the facts of that kind of layer, and the last line, `pattern`, names the kind
of each layer. `runtime/core/description.h` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.layer import LayerSpec

FORMAT = 3
OPERATOR = 2  # version of the attention operator, see `edge_qkv.export.operator`
MOST_BYTES = 1 << 16  # of a description, as the runtime reads it
# What a model file calls its two texts.
DESCRIPTION, FINGERPRINT = "edge_qkv.description", "edge_qkv.fingerprint"


def describe(config: ModelConfig, cache: str, facts: Mapping[str, int | str]) -> str:
    """The description of a model with a cache of this type.

    facts: what an export adds, first of all weight_bits, block_size, matrix_bytes, table_bytes and prefill_chunk.
    """
    lines: dict[str, int | str] = {
        "format": FORMAT,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "width": config.width,
        "cache": cache,
        "learned_positions": int(config.learned_positions),
        **facts,
    }
    text = "".join(f"{name} {value}\n" for name, value in lines.items())
    for name, spec in config.kinds.items():
        text += "".join(f"{fact} {value}\n" for fact, value in _kind(name, spec))
    text += f"pattern {' '.join(config.pattern)}\n"
    if len(text) > MOST_BYTES:
        raise InputError(
            f"the model's description has {len(text):,} bytes and a model file holds {MOST_BYTES:,}; "
            "give fewer kinds of layers, or shorter names"
        )
    return text


def _kind(name: str, spec: LayerSpec) -> Iterator[tuple[str, int | str]]:
    own = "unified" if spec.unified else "separate"
    yield "kind", name
    yield "heads", spec.heads
    yield "kv_heads", spec.kv_heads
    yield "head_dim", spec.head_dim
    yield "value_dim", spec.values
    yield "rows", f"of {spec.rows_of}" if spec.rows_of else own
    yield "window", spec.window
    yield "sinks", spec.sinks
    yield "positions", spec.positions
    yield "rotary_offset", spec.rotary_offset if spec.rotary else 0
    if spec.rotary:
        yield "frequencies", " ".join(map(repr, map(float, spec.frequencies)))
    yield "mlp_width", spec.mlp_width
    yield "mlp_matrices", 3 if spec.gated_mlp else 2
