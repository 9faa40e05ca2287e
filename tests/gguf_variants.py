"""The decoders that a GGUF file can hold, one for each thing that the mapping does, and their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from conftest import TINY, changed
from edge_qkv.config import ModelConfig
from edge_qkv.layer import biases
from edge_qkv.model import Decoder

LLAMA = changed(TINY, width=64, heads=4, head_dim=16, mlp_width=96, positions="rotary-on-read")
PLAIN = changed(LLAMA, positions="none")  # the one that is cached in one row
GPT = changed(LLAMA, mlp="gelu_tanh", norm="layernorm", norm_bias=True, positions="learned")
NEOX = changed(GPT, positions="rotary-on-read")
STABLE = changed(LLAMA, norm="layernorm", norm_bias=True)
BIASES = dict(biases=biases(True, True))

# name -> (config, llama.cpp's architecture)
VARIANTS: dict[str, tuple[ModelConfig, str]] = {
    "Q-MQA, rotary on read": (LLAMA, "llama"),
    "Q-K=V": (changed(LLAMA, kv_heads=4), "llama"),
    "Q=K=V": (changed(LLAMA, kv_heads=4, sharing="q=k=v"), "llama"),
    "Q=K-V": (changed(LLAMA, kv_heads=4, sharing="q=k-v"), "llama"),
    "GQA, rotary conjugate": (changed(LLAMA, kv_heads=2, sharing="qkv", positions="rotary-conjugate"), "llama"),
    "biases": (changed(LLAMA, kv_heads=2, **BIASES), "llama"),
    "identity query": (changed(LLAMA, query="identity", attention_scale=0.125), "llama"),
    "identity query, biases": (changed(LLAMA, query="identity", **BIASES), "llama"),
    "residual query": (changed(LLAMA, query="residual", attention_scale=0.1, **BIASES), "llama"),
    "partly rotated": (changed(LLAMA, rotary_dim=6, rotary_base=500.0), "llama"),
    "no positions": (changed(LLAMA, kv_heads=2, positions="none"), "llama"),
    "head of its own, wide heads": (changed(LLAMA, head_dim=20, tied_head=False), "llama"),
    "GeGLU": (changed(LLAMA, mlp="geglu"), "gemma"),
    "GeGLU, partly rotated": (changed(LLAMA, mlp="geglu", rotary_dim=6), "gemma"),
    "learned": (GPT, "mpt"),
    "learned, erf": (changed(GPT, mlp="gelu"), "mpt"),
    "learned, biases, residual query": (changed(GPT, query="residual", attention_scale=0.125, **BIASES), "mpt"),
    "learned, QKV, no norm biases": (changed(GPT, sharing="qkv", kv_heads=4, norm_bias=False), "mpt"),
    "GELU without positions, head of its own": (changed(GPT, positions="none", tied_head=False), "mpt"),
    "head_dim 62": (changed(GPT, width=124, heads=2, head_dim=62), "mpt"),
    "GELU, rotary": (changed(NEOX, **BIASES), "gptneox"),
    "GELU, partly rotated, no biases": (changed(NEOX, rotary_dim=6, norm_bias=False, tied_head=False), "gptneox"),
    "LayerNorm, SwiGLU": (STABLE, "stablelm"),
    "LayerNorm, SwiGLU, partly rotated": (changed(STABLE, rotary_dim=6, norm_bias=False, kv_heads=2), "stablelm"),
    "one row": (PLAIN, "deepseek2"),
    "one row, identity query": (changed(PLAIN, query="identity", attention_scale=0.2, tied_head=False), "deepseek2"),
    "one row, small eps": (changed(PLAIN, norm_eps=1e-12, query="residual"), "deepseek2"),
}


def write(folder: Path, config: ModelConfig, tokenizer=None) -> Path:
    """A checkpoint in which nothing is zero or one, and logits differ clearly."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    model = Decoder(config)
    model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in model.weight_names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder
