"""What llama.cpp's graphs compute, in numpy, from a file alone: written after its sources (src/models)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

_NEIGHBOURS = ("llama",)  # LLAMA_ROPE_TYPE_NORM; others with positions by rotation: NEOX


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_from_table(x: np.ndarray) -> np.ndarray:
    """As ggml computes it on a CPU: a table of fp16 values at fp16 arguments (ggml_vec_gelu_f32)."""
    rounded = gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
    return np.where(x <= -10, 0, np.where(x >= 10, x, rounded))


@dataclass(frozen=True)
class File:
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]  # float32, shaped as in PyTorch
    types: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> File:
        reader = GGUFReader(path)
        tensors = {
            t.name: dequantize(t.data, t.tensor_type).reshape(*reversed(t.shape.tolist())) for t in reader.tensors
        }
        types = {t.name: t.tensor_type.name for t in reader.tensors}
        return cls({name: field.contents() for name, field in reader.fields.items()}, tensors, types)

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def logits(self, ids: Sequence[int], gelu: Callable[[np.ndarray], np.ndarray] = gelu) -> np.ndarray:
        """[n, V] after each of the tokens."""
        x = self.tensors["token_embd.weight"][list(ids)].astype(np.float64)
        if self.architecture == "gemma":
            x = x * np.sqrt(x.shape[-1])
        if "position_embd.weight" in self.tensors:
            x = x + self.tensors["position_embd.weight"][: len(ids)]
        for i in range(self.get("block_count")):
            layer = f"blk.{i}."
            attend = self._latent if self.architecture == "deepseek2" else self._attention
            x = x + attend(layer, self._norm(f"{layer}attn_norm", x))
            x = x + self._mlp(layer, self._norm(f"{layer}ffn_norm", x), gelu)
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm("output_norm", x) @ head.T

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T.astype(np.float64) + self.tensors.get(f"{name}.bias", 0)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        eps = self.get("attention.layer_norm_rms_epsilon")
        if eps is None:
            eps, x = self.get("attention.layer_norm_epsilon"), x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", 0)

    def _mlp(self, layer: str, x: np.ndarray, gelu: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        up = self._linear(f"{layer}ffn_up", x)
        if f"{layer}ffn_gate.weight" in self.tensors:
            gate = self._linear(f"{layer}ffn_gate", x)
            up = up * (gelu(gate) if self.architecture == "gemma" else gate / (1 + np.exp(-gate)))
        else:
            up = gelu(up)
        return self._linear(f"{layer}ffn_down", up)

    def _attention(self, layer: str, x: np.ndarray) -> np.ndarray:
        heads, groups, dim = (self.get(f"attention.{n}") for n in ("head_count", "head_count_kv", "key_length"))
        if f"{layer}attn_qkv.weight" in self.tensors:
            rows = self._linear(f"{layer}attn_qkv", x)
            q, k, v = np.split(rows, [heads * dim, (heads + groups) * dim], axis=-1)
        else:
            q, k, v = (self._linear(f"{layer}attn_{name}", x) for name in "qkv")
        q, k, v = (a.reshape(len(x), -1, dim).swapaxes(0, 1) for a in (q, k, v))  # [H, n, D]
        if self.get("rope.dimension_count"):
            q, k = self._rotated(q), self._rotated(k)
        k, v = (a.repeat(heads // groups, axis=0) for a in (k, v))
        out = attend(q, k, v, dim**-0.5)
        return self._linear(f"{layer}attn_output", out.swapaxes(0, 1).reshape(len(x), -1))

    def _latent(self, layer: str, x: np.ndarray) -> np.ndarray:
        heads, dim = self.get("attention.head_count"), self.get("attention.key_length_mla")
        rank = self.get("attention.kv_lora_rank")
        assert self.get("rope.dimension_count") == 0 and self.get("attention.key_length") == rank
        q = self._linear(f"{layer}attn_q", x).reshape(len(x), heads, dim).swapaxes(0, 1)
        rows = self._norm(f"{layer}attn_kv_a_norm", self._linear(f"{layer}attn_kv_a_mqa", x))  # what is cached
        q = q @ self.tensors[f"{layer}attn_k_b.weight"].swapaxes(1, 2)
        out = attend(q, rows[None], rows[None], dim**-0.5) @ self.tensors[f"{layer}attn_v_b.weight"].swapaxes(1, 2)
        return self._linear(f"{layer}attn_output", out.swapaxes(0, 1).reshape(len(x), -1))

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        count = self.get("rope.dimension_count")
        frequency = self.get("rope.freq_base") ** (-np.arange(0, count, 2) / count)
        frequency = frequency / self.tensors.get("rope_freqs.weight", 1.0)
        turn = np.exp(1j * np.arange(x.shape[1])[:, None] * frequency)  # [n, R/2]
        out = x.copy()
        first, second = (
            (slice(0, count, 2), slice(1, count, 2))
            if self.architecture in _NEIGHBOURS
            else (slice(0, count // 2), slice(count // 2, count))
        )
        turned = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = turned.real, turned.imag
        return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention of [H, n, D]."""
    scores = q @ k.swapaxes(-1, -2) * scale
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
