"""The decoder with its weights as ExecuTorch stores them: quantised by torchao, one tensor of the checkpoint at a time.

8da4w and 8da8w (torchao's names): activations are rounded to int8 as they come, weights were rounded to 4 bits in
groups that share a bfloat16 scale, or to 8 bits with a scale a row. XNNPACK multiplies them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

from edge_qkv import attention
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress
from edge_qkv.model import Decoder

EMBEDDING_GROUP = 32  # weights of the 4-bit embedding that share a scale


@dataclass(frozen=True)
class Recipe:
    """What is stored in how many bits; 32 means float."""

    bits: int  # of the matrices inside the layers
    group_size: int  # weights of a 4-bit matrix that share a scale; 0: a row

    @property
    def quantized(self) -> bool:
        return self.bits < 32

    @property
    def step(self) -> int:
        """What the inputs of a matrix in the layers are a multiple of."""
        return self.group_size or 1


class PaddedLinear(nn.Linear):
    """A matrix whose inputs are padded with zeros to whole groups."""

    def __init__(self, linear: nn.Linear, step: int) -> None:
        super().__init__(-linear.in_features % step + linear.in_features, linear.out_features, linear.bias is not None)
        self.extra = self.in_features - linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.extra)))


def load(checkpoint: Checkpoint, attend: Callable, recipe: Recipe, progress: Progress) -> Decoder:
    """The checkpoint's decoder with quantised weights and `attend` as its operator.

    Matrices whose inputs are not whole groups are padded with zeros: the MLP's inner width for all its matrices at
    once, any other where it is read. Raises `InputError` for weights that cannot be read.
    """
    config = _padded(checkpoint.config, recipe)
    with torch.device("meta"):  # no memory, no random initialisation
        decoder = Decoder(config, attend)
        for layer in decoder.layers:
            for parent in (layer.attention, layer.mlp):
                for name, linear in list(parent.named_children()):
                    if isinstance(linear, nn.Linear) and linear.in_features % recipe.step:
                        setattr(parent, name, PaddedLinear(linear, recipe.step))
    if config.rotary:
        decoder.cos, decoder.sin = attention.rotary_tables(config)
    total, done = checkpoint.config.parameters() * 4, 0
    for path, module in decoder.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = _read(checkpoint, f"{path}.{name}")
            done += tensor.nbytes
            setattr(module, name, nn.Parameter(_fit(tensor, parameter.shape), requires_grad=False))
        if recipe.quantized and isinstance(module, (nn.Linear, nn.Embedding)):
            _quantize(path, module, recipe)
            progress("Reading weights", min(done, total), total)
    return decoder.eval()


def stored_bytes(decoder: Decoder, recipe: Recipe) -> tuple[int, int]:
    """Bytes in the file of the matrices that are multiplied by, and of all else."""
    matrices = tables = 0
    for path, module in decoder.named_modules():
        linear = isinstance(module, nn.Linear)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            size = _nbytes(path, tensor.shape, recipe) if name == "weight" and tensor.dim() == 2 else tensor.numel() * 4
            if linear and name == "weight":
                matrices += size
            else:
                tables += size
    return matrices, tables


def _padded(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    return replace(config, mlp_width=config.mlp_width + -config.mlp_width % recipe.step)


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    if name == "head.weight" and checkpoint.config.tied_head:  # stored again: a table and a matrix differ in form
        name = "embedding.weight"
    return checkpoint.tensors[name]().float()


def _fit(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The tensor, followed by zeros up to `shape`; memory of its own."""
    if tensor.shape == shape:
        return tensor.clone(memory_format=torch.contiguous_format)
    padded = torch.zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _embedding_bits(path: str, width: int) -> int:
    """The embedding has 4 bits, where its rows are whole groups; learned positions are added to it and keep 8."""
    return 8 if path == "positions" or width % EMBEDDING_GROUP else 4


def _quantize(path: str, module: nn.Linear | nn.Embedding, recipe: Recipe) -> None:
    if isinstance(module, nn.Embedding):
        bits = _embedding_bits(path, module.embedding_dim)
        granularity = PerGroup(EMBEDDING_GROUP) if bits == 4 else PerAxis(0)
        how = IntxWeightOnlyConfig(_dtype(bits), granularity)
    elif recipe.bits == 4 and path != "head":
        # XNNPACK keeps the scales of groups in bfloat16: codes are chosen for what it will multiply by.
        how = Int8DynamicActivationIntxWeightConfig(
            torch.int4, PerGroup(recipe.group_size), weight_scale_dtype=torch.bfloat16
        )
    else:
        how = Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0))
    if not torch.isfinite(module.weight).all():
        raise InputError(f"{path}.weight holds values that are not finite; the checkpoint is damaged")
    quantize_(module, how, lambda child, _: child is module)


def _dtype(bits: int) -> torch.dtype:
    return {4: torch.int4, 8: torch.int8}[bits]


def _nbytes(path: str, shape: torch.Size, recipe: Recipe) -> int:
    rows, columns = shape
    if not recipe.quantized:
        return rows * columns * 4
    table = path in ("embedding", "positions")
    if table and _embedding_bits(path, columns) == 4:
        return rows * (columns // 2 + columns // EMBEDDING_GROUP * 4)
    if table or path == "head" or recipe.bits == 8:
        return rows * (columns + 4)
    return rows * (columns // 2 + columns // recipe.group_size * 2)
