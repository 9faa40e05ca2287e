"""The decoder with its weights as ExecuTorch stores them: quantised by torchao, one tensor of the checkpoint at a time.

8da4w and 8da8w (torchao's names): activations are rounded to int8 as they come, weights were rounded to 4 bits in
groups that share a bfloat16 scale, or to 8 bits with a scale a row. XNNPACK multiplies them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup

from edge_qkv.checkpoints import Checkpoint
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress
from edge_qkv.formats import Format, Weights
from edge_qkv.model import Decoder

_STORED = (nn.Linear, nn.Embedding)  # whose weights have a format of their own


class PaddedLinear(nn.Linear):
    """A matrix whose inputs are padded with zeros to whole groups."""

    def __init__(self, linear: nn.Linear, step: int) -> None:
        super().__init__(-linear.in_features % step + linear.in_features, linear.out_features, linear.bias is not None)
        self.extra = self.in_features - linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.extra)))


def load(checkpoint: Checkpoint, attend: Callable, how: Weights, progress: Progress) -> Decoder:
    """The checkpoint's decoder with its weights stored as `how` says, and `attend` as its operator.

    Matrices whose inputs are not whole groups are padded with zeros: an MLP's inner width for all its matrices at
    once, any other where it is read. Raises `InputError` for weights that cannot be read.
    """
    step = how.layers.block or 1
    kinds = {
        name: replace(spec, mlp_width=spec.mlp_width + -spec.mlp_width % step)
        for name, spec in checkpoint.config.kinds.items()
    }
    with torch.device("meta"):  # no memory, no random initialisation
        decoder = Decoder(replace(checkpoint.config, kinds=kinds), attend)
        for path, module in list(decoder.named_modules()):
            columns = _format(path, how).block or 1
            if isinstance(module, nn.Linear) and module.in_features % columns:
                decoder.set_submodule(path, PaddedLinear(module, columns))
    for name, table in decoder.rotary_tables().items():
        setattr(decoder, name, table)
    total, done = checkpoint.config.parameters() * 4, 0
    for path, module in decoder.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = _read(checkpoint, f"{path}.{name}")
            if not torch.isfinite(tensor).all():
                raise InputError(f"{path}.{name} holds values that are not finite; the checkpoint is damaged")
            done += tensor.nbytes
            setattr(module, name, nn.Parameter(_fit(tensor, parameter.shape), requires_grad=False))
        if isinstance(module, _STORED):
            _quantize(module, _format(path, how))
            progress("Reading weights", min(done, total), total)
    return decoder.eval()


def stored_bytes(decoder: Decoder, how: Weights) -> tuple[int, int]:
    """Bytes in the file of the matrices that are multiplied by, and of all else."""
    matrices = tables = 0
    for path, module in decoder.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if isinstance(module, _STORED) and name == "weight":
                size = sum(_format(path, how).sizes(*tensor.shape))
            else:
                size = tensor.numel() * 4
            if isinstance(module, nn.Linear) and name == "weight":
                matrices += size
            else:
                tables += size
    return matrices, tables


def _format(path: str, how: Weights) -> Format:
    of_model = {"embedding": how.embedding, "layer_embedding": how.embedding, "positions": how.positions}
    return {**of_model, "head": how.head}.get(path, how.layers)


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


def _quantize(module: nn.Linear | nn.Embedding, format: Format) -> None:
    if format.is_float(module.weight.shape[1]):
        return
    dtype = {4: torch.int4, 8: torch.int8}[format.bits]
    granularity = PerGroup(format.block) if format.block else PerAxis(0)
    if isinstance(module, nn.Embedding):
        config = IntxWeightOnlyConfig(dtype, granularity)
    else:
        # XNNPACK keeps the scales of groups in bfloat16: codes are chosen for what it will multiply by.
        scale = torch.bfloat16 if format.block else torch.float32
        config = Int8DynamicActivationIntxWeightConfig(dtype, granularity, weight_scale_dtype=scale)
    quantize_(module, config, lambda child, _: child is module)
