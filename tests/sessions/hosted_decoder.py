"""The smallest engine that Python hosts: the eager decoder and its caches."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from edge_qkv import Cancelled, InputError
from edge_qkv.model import Decoder

AT_ONCE = 6  # tokens of a call: chunks are several, and the last one is shorter


class EagerCache:
    """Caches of the eager decoder, [1, G, C, D] a layer. It hears of a cancellation when the rows are written."""

    most_tokens = AT_ONCE

    def __init__(self, decoder: Decoder, context: int, cancelled: ctypes.c_int32) -> None:
        self._decoder, self._cancelled = decoder, cancelled
        self._caches = decoder.new_caches(context)
        self.bytes = context * decoder.config.cache_bytes_per_token("fp32")

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray, past: int, every: bool) -> np.ndarray:
        logits, self._caches = self._decoder(torch.from_numpy(tokens.astype(np.int64))[None], past, self._caches)
        if self._cancelled.value:
            raise Cancelled("The evaluation was cancelled.")
        return logits[0].numpy() if every else logits[0, -1:].numpy()

    def rewind(self, length: int) -> None:
        """Rows are overwritten when they are used again."""

    def read(self, length: int) -> dict[str, np.ndarray]:
        return {f"kv_{i}": kv[0, :, :length].numpy().copy() for i, (kv,) in enumerate(self._caches)}

    def write(self, parts: dict[str, np.ndarray], length: int) -> None:
        layers = self._decoder.config.layers
        shapes = {f"kv_{i}": (layer.kv_heads, length, layer.head_dim) for i, layer in enumerate(layers)}
        if parts.keys() != shapes.keys() or any(
            part.shape != shapes[name] or part.dtype != np.float32 for name, part in parts.items()
        ):
            raise InputError("its cache has another shape than this model's")
        for i, (kv,) in enumerate(self._caches):
            kv[0, :, :length] = torch.from_numpy(parts[f"kv_{i}"])

    def fill(self, past: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for (kv,) in self._caches:
            kv[0, :, past:length] = torch.randn(kv[0, :, past:length].shape, generator=generator)

    def close(self) -> None:
        self._caches = None
