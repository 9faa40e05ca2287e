"""What llama.cpp's graphs know of a model: one kind of layer, told by a flat list of facts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.layer import ATTENTION_MATRICES, MLP_MATRICES, LayerSpec

# Fields that none of the graphs has a place for, unless they have their default.
_PLAIN_LAYER = ("qk_norm", "value_norm", "key_weight", "norms", "rotary_offset", "rotary_frequencies", "rows_of")
_PLAIN_STREAM = ("embedding_scale", "residual", "residual_scale", "layer_scalars", "input_embeddings")
_PLAIN_HEAD = ("logit_scale", "logit_softcap")


@dataclass(frozen=True)
class Plain:
    """A decoder whose layers are alike, by the names of `ModelConfig` and `LayerSpec`."""

    vocab_size: int
    max_positions: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    query: str
    mlp: str
    gated_mlp: bool
    norm: str
    norm_eps: float
    norm_bias: bool
    tied_head: bool
    positions: str
    rotated: int
    rotary_base: float
    scale: float
    window: int
    unified: bool
    query_shares_key: bool
    attention_bias: bool
    mlp_bias: bool


def plain(config: ModelConfig) -> Plain:
    """The flat facts of a model; raises `InputError` naming what llama.cpp's graphs have no place for."""
    if not config.uniform_layers:
        raise _refusal(f"layers that differ ({', '.join(config.kinds)})")
    spec = config.only
    defaults = {f.name: f.default for record in (LayerSpec, ModelConfig) for f in fields(record)}
    for record, names in ((spec, _PLAIN_LAYER), (config, _PLAIN_STREAM + _PLAIN_HEAD)):
        for name in names:
            if getattr(record, name) != defaults[name]:
                raise _refusal(f"{name} = {getattr(record, name)!r}")
    if spec.values != spec.head_dim:
        raise _refusal(f"value_dim = {spec.value_dim}")
    own = {name for name, _, _, bias in spec.matrices(config.width) if bias}
    biased = {}
    for what, matrices in (("attention_bias", ATTENTION_MATRICES), ("mlp_bias", MLP_MATRICES)):
        there = {name for name, *_ in spec.matrices(config.width)} & set(matrices)
        if own & there not in (set(), there):
            raise _refusal(f"biases of {', '.join(sorted(own & there))} alone")
        biased[what] = bool(own & there)
    given = {**biased, "layers": len(config.layers), "positions": config.positions}
    given |= {f.name: _first(f.name, spec, config) for f in fields(Plain) if f.name not in given}
    return Plain(**given)


def _first(name: str, *records: object) -> object:
    return next(getattr(record, name) for record in records if hasattr(record, name))


def _refusal(what: str) -> InputError:
    return InputError(
        f"--target gguf: no graph of llama.cpp that is used here has {what}; export to onnx or executorch"
    )
