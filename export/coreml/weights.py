"""The decoder with its weights as Core ML stores them: quantised one tensor of the checkpoint at a time.

Core ML multiplies codes of 4 or 8 bits by the fp16 scale of their row or block (`constexpr_blockwise_shift_scale`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil import register_torch_op
from coremltools.converters.mil.mil import types
from torch import Tensor, nn

from edge_qkv import attention
from edge_qkv.checkpoints import Checkpoint
from edge_qkv.errors import InputError
from edge_qkv.export.progress import Progress
from edge_qkv.export.quantize import quantize_signed
from edge_qkv.formats import Format, Weights
from edge_qkv.model import Decoder, RMSNorm

# The operators below hold stored weights: what they compute here, coremltools is told to say in its own words. Left to
# its converter, every weight would be in memory as float32 besides, once for each function of the program.
_library = torch.library.Library("edge_qkv_coreml", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int bits) -> Tensor")
_library.define("lookup(Tensor indices, Tensor weight, Tensor? scales, int bits) -> Tensor")


def _floats(weight: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        return weight.float()
    blocks = weight.view(*scales.shape, -1).float() * scales.float()[..., None]  # [N, blocks, block]
    return blocks.view(weight.shape)


@torch.library.impl(_library, "linear", "CPU")
def _linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int) -> Tensor:
    return F.linear(x, _floats(weight, scales), bias)


@torch.library.impl(_library, "lookup", "CPU")
def _lookup(indices: Tensor, weight: Tensor, scales: Tensor | None, bits: int) -> Tensor:
    return _floats(weight[indices], None if scales is None else scales[indices])


def _constant(context, weight, scales, bits):
    """The fp16 matrix of a weight and its scales, which are constants of the program; one for each that is stored."""
    made = vars(context).setdefault("edge_qkv_constants", {})
    place = weight.val.ctypes.data
    if scales is not None and place not in made:
        codes = weight.val.view(types.np_int4_dtype) if bits.val == 4 else weight.val
        made[place] = mb.constexpr_blockwise_shift_scale(data=codes, scale=scales.val)
    return made.setdefault(place, weight)


@register_torch_op(torch_alias=["edge_qkv_coreml::linear"])
def edge_qkv_coreml_linear(context, node) -> None:
    x, weight, scales, bias, bits = (context[name] for name in node.inputs)
    bias = {} if bias is None else {"bias": mb.cast(x=bias, dtype="fp16")}
    out = mb.linear(x=mb.cast(x=x, dtype="fp16"), weight=_constant(context, weight, scales, bits), **bias)
    context.add(mb.cast(x=out, dtype="fp32", name=node.name))


@register_torch_op(torch_alias=["edge_qkv_coreml::lookup"])
def edge_qkv_coreml_lookup(context, node) -> None:
    indices, weight, scales, bits = (context[name] for name in node.inputs)
    out = mb.gather(x=_constant(context, weight, scales, bits), indices=indices, axis=0)
    context.add(mb.cast(x=out, dtype="fp32", name=node.name))


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [N, K] as fp16, or as int8 codes of 4 or 8 bits with fp16 scales [N, blocks]."""

    weight: Tensor
    scales: Tensor | None
    bits: int

    @classmethod
    def of(cls, weight: Tensor, format: Format) -> StoredMatrix:
        how = format.of(weight.shape[1])
        if how.scale_bytes:
            return cls(*quantize_signed(weight, how.bits, how.block or weight.shape[1]), how.bits)
        return cls(weight.clamp(-attention.FP16_MAX, attention.FP16_MAX).half(), None, how.bits)


class _Module(nn.Module):
    def __init__(self, stored: StoredMatrix, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bits = stored.bits
        self.register_buffer("weight", stored.weight)
        self.register_buffer("scales", stored.scales)
        self.register_buffer("bias", bias)


class StoredLinear(_Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.edge_qkv_coreml.linear(x, self.weight, self.scales, self.bias, self.bits)


class StoredTable(_Module):
    def forward(self, indices: Tensor) -> Tensor:
        return torch.ops.edge_qkv_coreml.lookup(indices, self.weight, self.scales, self.bits)


class ScaledRMSNorm(nn.Module):
    """RMSNorm whose squares fit fp16: a value above 256 has none there, and residual streams have such values.

    Divided by its largest value a row has squares of at most 1 and a mean of at least 1 / width.
    coremltools' own lowering divides as well, but adds eps to the mean of a divided row as it is, and makes NaN of a
    row of zeros.
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("root_eps", torch.tensor(norm.eps**0.5))

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-10)  # over which 1 and the root of eps are fp16
        x, root_eps = x / largest, self.root_eps / largest
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + root_eps.square())
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


def load(checkpoint: Checkpoint, attend: Callable, how: Weights, progress: Progress) -> Decoder:
    """The checkpoint's decoder with its weights stored as `how` says, and `attend` as its operator.

    It can be run: it then computes what was stored, in float32. Raises `InputError` for weights that cannot be read.
    """
    config = checkpoint.config
    with torch.device("meta"):  # no memory, no random initialisation
        decoder = Decoder(config, attend)
    for name, table in decoder.rotary_tables().items():
        setattr(decoder, name, table)
    total, done = config.parameters() * 4, 0

    def read(name: str) -> Tensor:
        nonlocal done
        tensor = checkpoint.tensors[name]().float()
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds values that are not finite; the checkpoint is damaged")
        done += tensor.nbytes
        progress("Reading weights", min(done, total), total)
        return tensor

    tied: StoredMatrix | None = None
    for path, module in list(decoder.named_modules()):
        parent, _, child = path.rpartition(".")
        if isinstance(module, (nn.Linear, nn.Embedding)):
            share = path == "head" and config.tied_head
            stored = tied if share else StoredMatrix.of(read(f"{path}.weight"), _format(path, how))
            tied = stored if path == "embedding" else tied
            bias = read(f"{path}.bias").clone() if getattr(module, "bias", None) is not None else None
            replacement = StoredLinear(stored, bias) if isinstance(module, nn.Linear) else StoredTable(stored)
            setattr(decoder.get_submodule(parent), child, replacement)
            continue
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(read(f"{path}.{name}").clone(), requires_grad=False))
        if isinstance(module, RMSNorm):
            setattr(decoder.get_submodule(parent), child, ScaledRMSNorm(module))
    return decoder.eval()


def _format(path: str, how: Weights) -> Format:
    tables = {"embedding": how.embedding, "layer_embedding": how.embedding, "positions": how.positions}
    return (tables | {"head": how.head}).get(path, how.layers)
