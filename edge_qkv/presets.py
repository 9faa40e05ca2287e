"""Published configurations by name, and the variants they come in."""

from __future__ import annotations

import re

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError

# The eight variants of arXiv 2606.04032: name -> (sharing, kv heads: "all", "some" or 1).
# A grouped variant takes its number of kv heads after a dash: GQA-4, Q-GQA-8.
VARIANTS = {
    "QKV": ("qkv", "all"),
    "Q=K-V": ("q=k-v", "all"),
    "Q-K=V": ("q-k=v", "all"),
    "Q=K=V": ("q=k=v", "all"),
    "GQA": ("qkv", "some"),
    "MQA": ("qkv", 1),
    "Q-GQA": ("q-k=v", "some"),
    "Q-MQA": ("q-k=v", 1),
}

_PAPER = dict(
    vocab_size=50304,
    max_positions=32768,
    norm_bias=True,
    positions="learned",
)
# arXiv 2606.04032, at a context of 32,768 tokens (its deployment tables).
PRESETS = {
    "300M": ModelConfig.uniform(layers=20, width=1024, heads=16, kv_heads=16, head_dim=64, mlp_width=4096, **_PAPER),
    "1.2B": ModelConfig.uniform(layers=22, width=2048, heads=32, kv_heads=32, head_dim=64, mlp_width=8192, **_PAPER),
}


def apply_variant(config: ModelConfig, variant: str) -> ModelConfig:
    """Returns `config` with the key-value sharing of a variant name such as 'Q-MQA' or 'GQA-4'."""
    name, groups = variant, None
    if match := re.fullmatch(r"(Q-GQA|GQA)-(\d+)", variant):
        name, groups = match[1], int(match[2])
    if name not in VARIANTS or (VARIANTS[name][1] == "some") != (groups is not None):
        known = ", ".join(f"{n}-N" if heads == "some" else n for n, (_, heads) in VARIANTS.items())
        raise InputError(f"variant {variant!r} is not known; choose one of {known} (N: kv heads)")
    sharing, heads = VARIANTS[name]
    kv_heads = {"some": groups, "all": config.only.heads}.get(heads, heads)
    return config.with_layers(sharing=sharing, kv_heads=kv_heads)


def preset(name: str) -> ModelConfig:
    """The configuration of a name like '1.2B' or '1.2B/Q-MQA' (model, then variant; default QKV)."""
    model, _, variant = name.partition("/")
    if model not in PRESETS:
        raise InputError(f"preset {model!r} is not known; choose one of {', '.join(PRESETS)}")
    return apply_variant(PRESETS[model], variant or "QKV")
