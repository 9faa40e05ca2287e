"""Small models whose layers differ, in the ways of models that people run; windows end within the tests' contexts."""

from __future__ import annotations

from dataclasses import replace

from edge_qkv.config import ModelConfig
from edge_qkv.layer import LayerSpec

WINDOW = 6
_STREAM = dict(vocab_size=260, max_positions=96, width=32, norm="rmsnorm")
_LOCAL = LayerSpec(
    heads=4, head_dim=8, kv_heads=1, mlp_width=48, window=WINDOW, positions="rotary-conjugate", mlp="swiglu"
)
_GLOBAL = replace(_LOCAL, window=0, head_dim=16, rotary_base=1e6)
_FOUR_NORMS = dict(norms=("attention", "attention_out", "mlp", "mlp_out"), qk_norm="head", mlp="geglu_tanh")
_K_EQ_V = replace(
    _GLOBAL,
    kv_heads=2,
    sharing="q-k=v",
    positions="rotary-on-read",
    rotary_frequencies=(1.0, 0.3, 0, 0, 0, 0, 0, 0),  # proportional: the other pairs do not turn
    value_norm=True,
    key_weight=True,
    attention_scale=1.0,
    **_FOUR_NORMS,
)

MIXED = {
    # Unified rows, local and global, of other sizes, bases and windows.
    "local and global": ModelConfig(
        kinds={"local": replace(_LOCAL, sharing="q-k=v"), "global": replace(_GLOBAL, sharing="q-k=v")},
        pattern=("local", "local", "global", "local"),
        **_STREAM,
    ),
    # Gemma 3: separate keys and values, four norms a layer, norms of queries and keys.
    "gemma 3": ModelConfig(
        kinds={"local": replace(_LOCAL, **_FOUR_NORMS), "global": replace(_GLOBAL, **_FOUR_NORMS)},
        pattern=("local", "local", "global"),
        embedding_scale=32**0.5,
        **_STREAM,
    ),
    # Gemma 4: one row in the global layers, of which keys are a weight times the row.
    "gemma 4": ModelConfig(
        kinds={"local": replace(_LOCAL, value_norm=True, **_FOUR_NORMS), "global": _K_EQ_V},
        pattern=("local", "global", "local", "global"),
        layer_scalars=True,
        logit_softcap=30.0,
        **_STREAM,
    ),
    # Gemma 4 E2B: late layers read the rows of earlier ones; each layer has an embedding of its own for a token.
    "rows of an earlier layer": ModelConfig(
        kinds={
            "local": _LOCAL,
            "global": _GLOBAL,
            "late_local": replace(_LOCAL, rows_of="local", mlp_width=96),
            "late_global": replace(_GLOBAL, rows_of="global", mlp_width=96),
        },
        pattern=("local", "global", "local", "late_local", "late_global"),
        input_embeddings=8,
        **_STREAM,
    ),
    # MiniCPM3, absorbed: a latent part that is the value, and a rotated tail.
    "mla": ModelConfig(
        kinds={
            "layer": LayerSpec(
                heads=4,
                head_dim=20,
                value_dim=16,
                kv_heads=1,
                mlp_width=48,
                sharing="q-k=v",
                positions="rotary-conjugate",
                rotary_offset=16,
                value_norm=True,
                mlp="swiglu",
            )
        },
        pattern=("layer", "layer"),
        residual_scale=0.7,
        logit_scale=0.5,
        **_STREAM,
    ),
    # SmolLM3: every fourth layer without positions.
    "nope": ModelConfig(
        kinds={
            "rope": replace(_LOCAL, kv_heads=2, window=0, qk_norm="all"),
            "nope": replace(_LOCAL, kv_heads=2, window=0, positions="none", biases=("query", "key", "value")),
        },
        pattern=("rope", "rope", "rope", "nope"),
        residual="parallel",
        **_STREAM,
    ),
}
