"""Random weights of a given size, to measure a model before it is trained: `random:1.2B/Q-MQA`.

Each tensor is made when it is asked for and depends on its own name alone, so that the whole model is never held
and any part of it can be made again.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from edge_qkv.checkpoints.checkpoint import Checkpoint, NeedsTorch, Source, assemble, beside, has_torch
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.presets import PRESETS, preset

if TYPE_CHECKING:
    import torch

NAME = "random"
PREFIX = "random:"
SUMMARY = "random:MODEL/VARIANT (as random:1.2B/Q-MQA) or random:CONFIG.json, untrained weights"


def read(spec: str) -> Checkpoint:
    """spec: a preset's name, or the path of a config.json, without the prefix."""
    where, path, tokenizer = PREFIX + spec, None, None
    if spec.endswith(".json"):
        path = Path(spec)
        config = ModelConfig.from_file(path)
        tokenizer = beside(path)
    else:
        try:
            config = preset(spec)
        except InputError as error:
            hint = "" if spec.partition("/")[0] in PRESETS else "; or give the path of a config.json"
            raise InputError(f"{where}: {error}{hint}") from None
    if not has_torch():
        return Checkpoint(config, NeedsTorch(where), NAME, path, tokenizer)

    def source(name: str, shape: tuple[int, ...]) -> Source:
        return Source(name, shape, "float32", lambda: _make(name, shape, len(config.layers)))

    return assemble(config, source, NAME, path, where, tokenizer)


def _make(name: str, shape: tuple[int, ...], layers: int) -> torch.Tensor:
    """One tensor as `Decoder.init_weights` would draw it: normal(0.02), residual outputs scaled down."""
    import torch

    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
    std = 0.02 / math.sqrt(2 * layers) if residual else 0.02
    return torch.empty(shape).normal_(std=std, generator=torch.Generator().manual_seed(seed))
