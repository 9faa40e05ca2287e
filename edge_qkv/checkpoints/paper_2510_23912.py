"""Files of the code published with "Key and Value Weights Are Probably All You Need" (arXiv 2510.23912).

`{"model": state dict, "model_args": {...}, "optimizer": ..., ...}`: the nanoGPT family, matrices stored [out, in].
With n = num_heads * head_size, c_attn is [2n] in the order k,v when query_mode is identity, else [3n] in the order
q,k,v. `scale` is the attention scale as it stands (the paper: 1/(2*sqrt(head_size))).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_qkv.checkpoints import torch_file
from edge_qkv.checkpoints.checkpoint import Checkpoint, assemble, beside, config_of
from edge_qkv.layer import biases

NAME = "arXiv 2510.23912"
SUMMARY = "a file with model_args and model"

_CONFIG, _STATE = "model_args", "model"
_BUFFERS = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"  # the causal mask
_QUERY = {"original": "projected", "identity": "identity", "residual": "residual", "residual_gelu": "residual_gelu"}


def matches(content: dict[Any, Any]) -> bool:
    return _CONFIG in content and _STATE in content


def read(content: dict[Any, Any], path: Path) -> Checkpoint:
    """content: what `torch_file.read` found in `path`."""
    fields = torch_file.Fields(content[_CONFIG], path, _CONFIG)
    tensors = torch_file.Renaming(torch_file.sources(content[_STATE], path, _STATE), path, _BUFFERS)
    width, heads, layers = fields.size("n_embd"), fields.size("num_heads"), fields.size("n_layer")
    head_dim = fields.size("head_size")
    query = _QUERY[fields.choice("query_mode", tuple(_QUERY))]
    attention_bias = fields.flag("bias", "transformer.h.0.attn.c_proj.bias" in tensors)
    mlp_bias = fields.flag("bias", "transformer.h.0.mlp.c_fc.bias" in tensors)
    norm_bias = fields.flag("bias", "transformer.ln_f.bias" in tensors)
    tied = torch_file.is_tied(tensors, fields, "tie_weights", "transformer.wte.weight", "lm_head.weight", path)
    config = config_of(
        path,
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("block_size"),
        layers=layers,
        width=width,
        heads=heads,
        head_dim=head_dim,
        kv_heads=heads,
        mlp_width=fields.size("mlp_hidden_size", 4 * width),
        query=query,
        attention_scale=fields.number("scale", head_dim**-0.5),
        biases=biases(attention_bias, mlp_bias),
        norm_bias=norm_bias,
        tied_head=tied,
    )

    parts = config.only.projections
    tensors.move("transformer.wte", "embedding", bias=False)
    tensors.move("transformer.wpe", "positions", bias=False)
    for i in range(layers):
        old, new = f"transformer.h.{i}", f"layers.{i}"
        names = [f"{new}.attention.{part}" for part in parts]
        tensors.move(f"{old}.ln_1", f"{new}.attention_norm", norm_bias)
        tensors.split(f"{old}.attn.c_attn", names, width, [heads * head_dim] * len(parts), attention_bias)
        tensors.move(f"{old}.attn.c_proj", f"{new}.attention.output", attention_bias)
        tensors.move(f"{old}.ln_2", f"{new}.mlp_norm", norm_bias)
        tensors.move(f"{old}.mlp.c_fc", f"{new}.mlp.up", mlp_bias)
        tensors.move(f"{old}.mlp.c_proj", f"{new}.mlp.down", mlp_bias)
    tensors.move("transformer.ln_f", "norm", norm_bias)
    if not tied:
        tensors.move("lm_head", "head", bias=False)
    return assemble(config, tensors.done(), NAME, path, str(path), beside(path))
