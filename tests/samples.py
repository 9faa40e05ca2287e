"""Small checkpoints laid out as the papers' published code writes them, and a forward pass of that code's own form.

Nothing here uses edge-qkv: the layouts and the arithmetic are written from the formats' conventions (fused
matrices, split and attended over as there) in float64 numpy, so that a reader and the decoder behind it are compared
with something that shares none of their code.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

VARIANTS_2606 = ("QKV", "Q=K-V", "Q-K=V", "Q=K=V", "GQA", "MQA", "Q-GQA", "Q-MQA")
QUERY_MODES_2510 = ("original", "identity", "residual", "residual_gelu")


class _Weights:
    """Random weights, large enough that a matrix in the wrong place shows in the logits."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.state: dict[str, torch.Tensor] = {}

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.state[name] = tensor.to(self.dtype)

    def matrix(self, name: str, rows: int, columns: int, std: float | None = None) -> None:
        std = 1 / math.sqrt(columns) if std is None else std
        self._add(name, torch.randn(rows, columns, generator=self.generator) * std)

    def linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        self.matrix(f"{name}.weight", rows, columns)
        if bias:
            self._add(f"{name}.bias", torch.randn(rows, generator=self.generator) * 0.2)

    def norm(self, name: str, width: int, bias: bool) -> None:
        self._add(f"{name}.weight", 1 + 0.2 * torch.randn(width, generator=self.generator))
        if bias:
            self._add(f"{name}.bias", 0.2 * torch.randn(width, generator=self.generator))


def write_2606(
    path: str | Path,
    variant: str,
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    groups: int = 2,
    vocab: int = 97,
    positions: int = 64,
    inner: int = 80,
    bias: bool = False,
    norm_bias: bool = True,
    tied: bool = True,
    stored_head: bool = False,
    prefix: str = "",
    mask_buffers: bool = True,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    legacy: bool = False,
) -> None:
    """Writes one of `VARIANTS_2606`. groups: kv heads of GQA and Q-GQA; stored_head: a tied file holds lm_head too."""
    weights, dim = _Weights(seed, dtype), width // heads
    weights.matrix("wte.weight", vocab, width, 3 / math.sqrt(width))
    weights.matrix("wpe.weight", positions, width, 3 / math.sqrt(width))
    matrices = {
        "QKV": {"c_attn": 3 * width},
        "Q=K-V": {"c_kv": 2 * width},
        "Q-K=V": {"c_q": width, "c_k": width},
        "Q=K=V": {"c_k": width},
        "GQA": {"c_q": width, "c_kv": 2 * groups * dim},
        "MQA": {"c_q": width, "c_kv": 2 * dim},
        "Q-GQA": {"c_q": width, "c_k": groups * dim},
        "Q-MQA": {"c_q": width, "c_kv": dim},
    }[variant]
    for i in range(layers):
        weights.norm(f"h.{i}.ln_1", width, norm_bias)
        for name, rows in matrices.items():
            weights.linear(f"h.{i}.attn.{name}", rows, width, bias)
        weights.linear(f"h.{i}.attn.c_proj", width, width, bias)
        if mask_buffers:
            weights.state[f"h.{i}.attn.bias"] = torch.ones(positions, positions).tril()[None, None]
            weights.state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        weights.norm(f"h.{i}.ln_2", width, norm_bias)
        weights.linear(f"h.{i}.mlp.c_fc", inner, width, bias)
        weights.linear(f"h.{i}.mlp.c_proj", width, inner, bias)
    weights.norm("ln_f", width, norm_bias)
    if not tied:
        weights.matrix("lm_head.weight", vocab, width)
    elif stored_head:
        weights.state["lm_head.weight"] = weights.state["wte.weight"]
    config = {
        "vocab_size": vocab,
        "n_positions": positions,
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_inner": inner,
        "layer_norm_epsilon": eps,
        "use_bias": bias,
        "tie_word_embeddings": tied,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    }
    if variant in ("GQA", "Q-GQA"):
        config["n_kv_groups"] = groups
    content = {
        "model_config": config,
        "model_state_dict": {prefix + name: tensor for name, tensor in weights.state.items()},
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
        "step": 1000,
        "variant": variant,  # read by `reference_logits` alone
    }
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)


def write_2510(
    path: str | Path,
    query_mode: str,
    *,
    layers: int = 2,
    heads: int = 4,
    head_size: int = 6,
    width: int | None = None,
    vocab: int = 97,
    positions: int = 64,
    hidden: int = 56,
    bias: bool = False,
    tied: bool = True,
    stored_head: bool = True,
    scale: float | None = None,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    legacy: bool = False,
) -> None:
    """Writes one of `QUERY_MODES_2510`. width: heads * head_size unless query_mode is original; scale: the paper's."""
    weights, inner = _Weights(seed, dtype), heads * head_size
    width = width or inner
    scale = 1 / (2 * math.sqrt(head_size)) if scale is None else scale
    weights.matrix("transformer.wte.weight", vocab, width, 3 / math.sqrt(width))
    weights.matrix("transformer.wpe.weight", positions, width, 3 / math.sqrt(width))
    for i in range(layers):
        layer = f"transformer.h.{i}"
        weights.norm(f"{layer}.ln_1", width, bias)
        weights.linear(f"{layer}.attn.c_attn", (2 if query_mode == "identity" else 3) * inner, width, bias)
        weights.linear(f"{layer}.attn.c_proj", width, inner, bias)
        weights.norm(f"{layer}.ln_2", width, bias)
        weights.linear(f"{layer}.mlp.c_fc", hidden, width, bias)
        weights.linear(f"{layer}.mlp.c_proj", width, hidden, bias)
    weights.norm("transformer.ln_f", width, bias)
    if not tied:
        weights.matrix("lm_head.weight", vocab, width)
    elif stored_head:
        weights.state["lm_head.weight"] = weights.state["transformer.wte.weight"]
    content = {
        "model": {prefix + name: tensor for name, tensor in weights.state.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": {
            "block_size": positions,
            "vocab_size": vocab,
            "n_layer": layers,
            "num_heads": heads,
            "n_embd": width,
            "head_size": head_size,
            "tie_weights": tied,
            "bias": bias,
            "scale": scale,
            "query_mode": query_mode,
            "mlp_hidden_size": hidden,
            "dropout": 0.0,
        },
        "iter_num": 1000,
        "best_val_loss": 3.0,
        "config": {"dataset": "words", "learning_rate": 1e-3},
    }
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)


def reference_logits(path: str | Path, ids: list[int]) -> np.ndarray:
    """Logits [T, V] float64 of a file that `write_2606` or `write_2510` wrote, for the token ids [T]."""
    content = torch.load(path, weights_only=True)
    state = content["model_state_dict"] if "model_config" in content else content["model"]
    tensors = {name: tensor.double().numpy() for name, tensor in state.items()}
    for prefix in ("module.", "_orig_mod.", "module."):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if "model_config" in content:
        return _logits_2606(tensors, content["model_config"], content["variant"], ids)
    return _logits_2510(tensors, content["model_args"], ids)


def _logits_2606(w: dict[str, np.ndarray], config: dict, variant: str, ids: list[int]) -> np.ndarray:
    n, heads, eps = config["n_embd"], config["n_head"], config["layer_norm_epsilon"]
    dim = n // heads
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]  # [T, N]
    for i in range(config["n_layer"]):
        attn = f"h.{i}.attn"
        y = _layer_norm(w, f"h.{i}.ln_1", x, eps)
        if variant == "QKV":
            q, k, v = np.split(_linear(w, f"{attn}.c_attn", y), 3, axis=-1)
        elif variant == "Q=K-V":
            k, v = np.split(_linear(w, f"{attn}.c_kv", y), 2, axis=-1)
            q = k
        elif variant == "Q=K=V":
            q = k = v = _linear(w, f"{attn}.c_k", y)
        else:
            q = _linear(w, f"{attn}.c_q", y)
            if variant in ("GQA", "MQA"):
                k, v = np.split(_linear(w, f"{attn}.c_kv", y), 2, axis=-1)
            else:
                k = v = _linear(w, f"{attn}.c_kv" if variant == "Q-MQA" else f"{attn}.c_k", y)
        x = x + _linear(w, f"{attn}.c_proj", _attention(q, k, v, heads, dim, 1 / math.sqrt(dim)))
        y = _layer_norm(w, f"h.{i}.ln_2", x, eps)
        x = x + _linear(w, f"h.{i}.mlp.c_proj", _gelu(_linear(w, f"h.{i}.mlp.c_fc", y)))
    x = _layer_norm(w, "ln_f", x, eps)
    return x @ (w["wte.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]).T


def _logits_2510(w: dict[str, np.ndarray], args: dict, ids: list[int]) -> np.ndarray:
    mode, heads, dim = args["query_mode"], args["num_heads"], args["head_size"]
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]  # [T, N]
    for i in range(args["n_layer"]):
        layer = f"transformer.h.{i}"
        y = _layer_norm(w, f"{layer}.ln_1", x, 1e-5)
        fused = _linear(w, f"{layer}.attn.c_attn", y)
        if mode == "identity":
            k, v = np.split(fused, 2, axis=-1)
            q = y
        else:
            q, k, v = np.split(fused, 3, axis=-1)
            if mode == "residual":
                q = y + q
            elif mode == "residual_gelu":
                q = y + _gelu(q)
        x = x + _linear(w, f"{layer}.attn.c_proj", _attention(q, k, v, heads, dim, args["scale"]))
        y = _layer_norm(w, f"{layer}.ln_2", x, 1e-5)
        x = x + _linear(w, f"{layer}.mlp.c_proj", _gelu(_linear(w, f"{layer}.mlp.c_fc", y)))
    x = _layer_norm(w, "transformer.ln_f", x, 1e-5)
    return x @ (w["transformer.wte.weight"] if args["tie_weights"] else w["lm_head.weight"]).T


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, dim: int, scale: float) -> np.ndarray:
    """Causal attention, one head and one position at a time; q [T, H*D], k and v [T, G*D]."""
    tokens, groups = len(q), k.shape[-1] // dim
    out = np.zeros((tokens, heads * dim))
    for head in range(heads):
        mine = slice(head * dim, (head + 1) * dim)
        group = head // (heads // groups)
        shared = slice(group * dim, (group + 1) * dim)
        for t in range(tokens):
            scores = k[: t + 1, shared] @ q[t, mine] * scale  # [t + 1]
            p = np.exp(scores - scores.max())
            out[t, mine] = (p / p.sum()) @ v[: t + 1, shared]
    return out


def _linear(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _layer_norm(w: dict[str, np.ndarray], name: str, x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return normed * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
