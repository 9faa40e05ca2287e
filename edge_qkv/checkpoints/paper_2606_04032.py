"""Files of the training code published with "Do Transformers Need Three Projections?" (arXiv 2606.04032).

`{"model_config": {...}, "model_state_dict": {...}, ...}`. GPT-2's architecture with erf GELU and matrices stored
[out, in]. The attention matrices tell the variant (n = width, d = head_dim, g = kv heads; rows in brackets):

    QKV    c_attn [3n] q,k,v          GQA    c_q [n], c_kv [2gd] k,v
    Q=K-V  c_kv [2n] k,v              MQA    c_q [n], c_kv [2d] k,v
    Q-K=V  c_q [n], c_k [n]           Q-GQA  c_q [n], c_k [gd]
    Q=K=V  c_k [n]                    Q-MQA  c_q [n], c_kv [d]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_qkv.checkpoints import torch_file
from edge_qkv.checkpoints.checkpoint import Checkpoint, assemble, beside, config_of
from edge_qkv.errors import InputError
from edge_qkv.layer import biases

NAME = "arXiv 2606.04032"
SUMMARY = "a file with model_config and model_state_dict"

_CONFIG, _STATE = "model_config", "model_state_dict"
_BUFFERS = r"h\.\d+\.attn\.(bias|masked_bias)"  # the causal mask; c_attn.bias and its like are the real biases


def matches(content: dict[Any, Any]) -> bool:
    return _CONFIG in content and _STATE in content


def read(content: dict[Any, Any], path: Path) -> Checkpoint:
    """content: what `torch_file.read` found in `path`."""
    fields = torch_file.Fields(content[_CONFIG], path, _CONFIG)
    tensors = torch_file.Renaming(torch_file.sources(content[_STATE], path, _STATE), path, _BUFFERS)
    width, heads, layers = fields.size("n_embd"), fields.size("n_head"), fields.size("n_layer")
    if width % heads:
        raise InputError(f"{path}: {_CONFIG} field n_embd = {width} must be a multiple of n_head = {heads}")
    head_dim = width // heads
    sharing, kv_heads, matrices = _variant(tensors, width, heads, head_dim, path)
    if 1 < kv_heads < heads and fields.has("n_kv_groups") and fields.size("n_kv_groups") != kv_heads:
        raise InputError(
            f"{path}: {_CONFIG} field n_kv_groups = {fields.size('n_kv_groups')} but the attention tensors have "
            f"{kv_heads} kv heads; check that config and weights belong together"
        )
    attention_bias = fields.flag("use_bias", "h.0.attn.c_proj.bias" in tensors)
    mlp_bias = fields.flag("use_bias", "h.0.mlp.c_fc.bias" in tensors)
    norm_bias = "ln_f.bias" in tensors
    tied = torch_file.is_tied(tensors, fields, "tie_word_embeddings", "wte.weight", "lm_head.weight", path)
    config = config_of(
        path,
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("n_positions"),
        layers=layers,
        width=width,
        heads=heads,
        head_dim=head_dim,
        kv_heads=kv_heads,
        mlp_width=fields.size("n_inner", 4 * width),
        sharing=sharing,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        biases=biases(attention_bias, mlp_bias),
        norm_bias=norm_bias,
        tied_head=tied,
    )

    rows = {"query": heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
    tensors.move("wte", "embedding", bias=False)
    tensors.move("wpe", "positions", bias=False)
    for i in range(layers):
        old, new = f"h.{i}", f"layers.{i}"
        tensors.move(f"{old}.ln_1", f"{new}.attention_norm", norm_bias)
        for matrix, parts in matrices.items():
            names = [f"{new}.attention.{part}" for part in parts]
            tensors.split(f"{old}.attn.{matrix}", names, width, [rows[part] for part in parts], attention_bias)
        tensors.move(f"{old}.attn.c_proj", f"{new}.attention.output", attention_bias)
        tensors.move(f"{old}.ln_2", f"{new}.mlp_norm", norm_bias)
        tensors.move(f"{old}.mlp.c_fc", f"{new}.mlp.up", mlp_bias)
        tensors.move(f"{old}.mlp.c_proj", f"{new}.mlp.down", mlp_bias)
    tensors.move("ln_f", "norm", norm_bias)
    if not tied:
        tensors.move("lm_head", "head", bias=False)
    return assemble(config, tensors.done(), NAME, path, str(path), beside(path))


def _variant(
    tensors: torch_file.Renaming, width: int, heads: int, head_dim: int, path: Path
) -> tuple[str, int, dict[str, tuple[str, ...]]]:
    """Sharing, kv heads, and which projections each matrix of the first layer's attention holds."""
    present = {m: f"h.0.attn.{m}.weight" for m in ("c_attn", "c_q", "c_k", "c_kv") if f"h.0.attn.{m}.weight" in tensors}
    found = tuple(present)
    if found == ("c_attn",):
        return "qkv", heads, {"c_attn": ("query", "key", "value")}
    if found == ("c_kv",):
        return "q=k-v", heads, {"c_kv": ("key", "value")}
    if found == ("c_k",):
        return "q=k=v", heads, {"c_k": ("key",)}
    if found == ("c_q", "c_k"):
        groups = _groups(tensors.shape(present["c_k"])[0], head_dim, heads, "c_k", path)
        return "q-k=v", groups, {"c_q": ("query",), "c_k": ("key",)}
    if found == ("c_q", "c_kv"):
        rows = tensors.shape(present["c_kv"])[0]
        if rows == head_dim:  # too few for a key and a value: one row that is both
            return "q-k=v", 1, {"c_q": ("query",), "c_kv": ("key",)}
        groups = _groups(rows, 2 * head_dim, heads, "c_kv", path)
        return "qkv", groups, {"c_q": ("query",), "c_kv": ("key", "value")}
    raise InputError(
        f"{path}: the attention matrices of layer 0 ({', '.join(found) or 'none'}) are of none of the paper's eight "
        "variants; the file is incomplete or of another model"
    )


def _groups(rows: int, rows_a_group: int, heads: int, matrix: str, path: Path) -> int:
    groups = rows // rows_a_group
    if groups == 0 or rows % rows_a_group or heads % groups:
        raise InputError(
            f"{path}: tensor 'h.0.attn.{matrix}.weight' has {rows} rows, which fit no number of kv heads that divides "
            f"n_head = {heads}; check that config and weights belong together"
        )
    return groups
