"""How weights are stored: the modules that stand in for a decoder's matrices, and the file that holds the data.

Nothing here holds more than one tensor of the checkpoint at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from edge_qkv.config import ModelConfig
from edge_qkv.export.quantize import blocks_of, quantize
from edge_qkv.formats import Format, Weights
from edge_qkv.model import Decoder, RMSNorm
from edge_qkv.targets import named

# Rows of a quantised head that one operator takes. An engine that repacks a matrix holds it twice while it does so:
# with the head of a large vocabulary in one piece, that moment would be the peak of memory.
HEAD_ROWS = 8192

_SIZES = named("onnx").sizes

Pieces = dict[str, Tensor]  # name in the file -> data


@dataclass
class Conversion:
    """From the tensors of a checkpoint to the parameters of the prepared decoder."""

    convert: dict[str, Callable[[Tensor], Pieces]] = field(default_factory=dict)  # by decoder weight name
    # Parameter -> the piece that holds it and where in it, in bytes, where it is not a piece of its own: two
    # parameters of one tied weight have different shapes (an operator each), but their bytes are stored once.
    alias: dict[str, tuple[str, int]] = field(default_factory=dict)

    def place_of(self, parameter: str) -> tuple[str, int]:
        return self.alias.get(parameter, (parameter, 0))

    def store_blocked(self, name: str, how: Format) -> None:
        """The weight of the module `name` as codes and scales."""

        def convert(tensor: Tensor) -> Pieces:
            quantized = quantize(tensor, how.bits, how.block)
            return {f"{name}.packed": quantized.codes, f"{name}.scales": quantized.scales}

        self.convert[f"{name}.weight"] = convert


class FloatLinear(nn.Module):
    """x [..., K] times weight, stored as [K, N]: the form MatMul takes, with nothing left to transpose at load."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = _placeholder((linear.in_features, linear.out_features))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        return x if self.bias is None else x + self.bias


class FloatHead(nn.Module):
    """Hidden rows [1, R, K] times weight [V, K] transposed, which a tied embedding reads by rows.

    Gemm reads the second operand either way; MatMul would need a transposed second copy of the weight.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.squeeze(0)  # [R, K]
        logits = torch.onnx.ops.symbolic(
            "Gemm", (rows, self.weight), {"transB": 1}, dtype=x.dtype, shape=(rows.shape[0], self.weight.shape[0])
        )
        return logits.unsqueeze(0)  # [1, R, V]


class BlockedLinear(nn.Module):
    """x [..., K] times a weight [N, K] in blocks of 4 or 8 bits."""

    def __init__(self, inputs: int, outputs: int, how: Format, accuracy: int, bias: nn.Parameter | None) -> None:
        """accuracy: the operator's accuracy_level; 4: activations become int8, block by block; 1: they stay float32."""
        super().__init__()
        self.outputs, self.bias = outputs, bias
        blocks = blocks_of(inputs, how.block)
        self.packed = _placeholder((outputs, blocks, how.block * how.bits // 8), torch.uint8)
        self.scales = _placeholder((outputs, blocks))
        self.options = {"K": inputs, "N": outputs, "bits": how.bits, "block_size": how.block}
        self.options["accuracy_level"] = accuracy

    def forward(self, x: Tensor) -> Tensor:
        x = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (x, self.packed, self.scales),
            self.options,
            dtype=x.dtype,
            shape=(*x.shape[:-1], self.outputs),
            version=1,
        )
        return x if self.bias is None else x + self.bias


class BlockedHead(nn.Module):
    """x [1, R, K] times a weight [V, K] in blocks, `HEAD_ROWS` of its rows at a time."""

    def __init__(self, head: nn.Linear, how: Format, accuracy: int) -> None:
        super().__init__()
        sizes = [min(HEAD_ROWS, head.out_features - row) for row in range(0, head.out_features, HEAD_ROWS)]
        self.parts = nn.ModuleList(BlockedLinear(head.in_features, size, how, accuracy, None) for size in sizes)

    def places(self, name: str) -> dict[str, tuple[str, int]]:
        """Parameter of this module, as `head` of the decoder -> where it is in the pieces of the matrix `name`."""
        found, offsets = {}, {"packed": 0, "scales": 0}
        for i, part in enumerate(self.parts):
            for kind, tensor in part.named_parameters():
                found[f"head.parts.{i}.{kind}"] = f"{name}.{kind}", offsets[kind]
                offsets[kind] += _nbytes(tensor)
        return found

    def forward(self, x: Tensor) -> Tensor:
        logits = [part(x) for part in self.parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)  # [1, R, V]


class BlockedTable(nn.Module):
    """Rows of a table [V, K] in blocks of 4 or 8 bits, looked up by number.

    Reads the same bytes as MatMulNBits, but wants them as a matrix: [V, blocks * block_size * bits / 8].
    """

    def __init__(self, table: nn.Embedding, how: Format) -> None:
        super().__init__()
        self.columns, self.how = table.embedding_dim, how
        blocks = blocks_of(self.columns, how.block)
        self.padded = blocks * how.block
        self.packed = _placeholder((table.num_embeddings, self.padded * how.bits // 8), torch.uint8)
        self.scales = _placeholder((table.num_embeddings, blocks))

    def forward(self, indices: Tensor) -> Tensor:
        rows = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (self.packed, indices, self.scales),
            {"gather_axis": 0, "quantize_axis": 1, "block_size": self.how.block, "bits": self.how.bits},
            dtype=self.scales.dtype,
            shape=(*indices.shape, self.padded),
            version=1,
        )
        return rows if self.padded == self.columns else rows[..., : self.columns]


class FusableRMSNorm(nn.Module):
    """RMSNorm in the chain of operators that ONNX Runtime fuses into one kernel, where it has a weight."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        x = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


def prepare(config: ModelConfig, attend: Callable, how: Weights, accuracy: int) -> tuple[Decoder, Conversion]:
    """The decoder without data (device meta), its matrices replaced by modules that store them as `how` says.

    accuracy: of `BlockedLinear`.
    """
    with torch.device("meta"):
        decoder = Decoder(config, attend)
    conversion = Conversion()
    names = decoder.weight_names()
    for name, module in list(decoder.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(module, RMSNorm):
            setattr(decoder.get_submodule(parent), child, FusableRMSNorm(module))
        elif isinstance(module, nn.Linear) and name != "head":
            setattr(decoder.get_submodule(parent), child, _linear(name, module, how.layers, accuracy, conversion))
    tables = {"positions": how.positions, "layer_embedding": how.embedding}
    tables["embedding"] = how.head if config.tied_head else how.embedding
    for name, stored in tables.items():
        if (table := getattr(decoder, name, None)) is not None and stored.scale_bytes:
            setattr(decoder, name, BlockedTable(table, stored))
            conversion.store_blocked(name, stored)
    _replace_head(decoder, how.head, accuracy, conversion)
    for name in names:  # what no module stores in its own way is stored as it is
        conversion.convert.setdefault(name, lambda tensor, name=name: {name: tensor.to(torch.float32).contiguous()})
    return decoder, conversion


def stored_bytes(decoder: Decoder) -> tuple[int, int]:
    """Bytes of the matrices that an engine multiplies by and may keep in a form of its own, and of all else: tables
    that are read a row at a time. The weight of a tied head is both."""
    matrices, tables = 0, 0
    for module in decoder.modules():
        multiplied = isinstance(module, (BlockedLinear, FloatLinear, FloatHead))
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if multiplied and name != "bias":
                matrices += _nbytes(tensor)
            else:
                tables += _nbytes(tensor)
    return matrices, tables


def _replace_head(decoder: Decoder, how: Format, accuracy: int, conversion: Conversion) -> None:
    """The head; tied, it shares the stored bytes of the embedding."""
    tied, head = decoder.config.tied_head, decoder.head
    if not how.scale_bytes:
        decoder.head = FloatHead(head.weight)
        return
    decoder.head = BlockedHead(head, how, accuracy)
    conversion.alias |= decoder.head.places("embedding" if tied else "head")
    if not tied:
        conversion.store_blocked("head", how)


def _linear(name: str, linear: nn.Linear, how: Format, accuracy: int, conversion: Conversion) -> nn.Module:
    if how.scale_bytes:
        conversion.store_blocked(name, how)
        return BlockedLinear(linear.in_features, linear.out_features, how, accuracy, linear.bias)
    weight = f"{name}.weight"
    conversion.convert[weight] = lambda tensor: {weight: tensor.to(torch.float32).t().contiguous()}
    return FloatLinear(linear)


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


# ---- the data file ----

_DTYPES = {torch.float32: (ir.DataType.FLOAT, 4), torch.uint8: (ir.DataType.UINT8, 1)}


class DataFile:
    """Where each piece lies in one file of external data; known before any of the data is read."""

    def __init__(self, parameters: Mapping[str, Tensor], conversion: Conversion) -> None:
        """`parameters`: those of the prepared decoder (shape and dtype are read, never data)."""
        self._parameters, self._conversion = parameters, conversion
        self._offset: dict[str, int] = {}
        self._small: dict[str, Tensor] = {}
        self.bytes = 0
        sizes: dict[str, int] = {}
        for name, parameter in parameters.items():
            piece, offset = conversion.place_of(name)
            sizes[piece] = max(sizes.get(piece, 0), offset + _nbytes(parameter))
        for piece, size in sizes.items():
            if size >= _SIZES.inline_below:
                self._offset[piece] = self.bytes
                self.bytes += -(-size // _SIZES.alignment) * _SIZES.alignment

    def write(self, path: Path, sources: Mapping[str, Callable[[], Pieces]], done: Callable[[str], None]) -> None:
        """Makes and writes the pieces of one source after the other; `done(source)` follows each."""
        missing = {self._conversion.place_of(name)[0] for name in self._parameters}
        with path.open("wb") as file:
            file.truncate(self.bytes)
            for source, make in sources.items():
                for piece, data in make().items():
                    if piece in self._offset:
                        file.seek(self._offset[piece])
                        file.write(_little_endian(data))
                    else:
                        self._small[piece] = data
                    missing.discard(piece)
                done(source)
        assert not missing, f"no source makes {sorted(missing)}"

    def tensor(self, name: str, path: Path) -> ir.TensorProtocol:
        """The ONNX tensor of a parameter, after `write`: a reference into the file, or the small tensor itself."""
        parameter = self._parameters[name]
        piece, offset = self._conversion.place_of(name)
        if piece in self._small:
            return ir.tensor(self._small[piece].numpy().reshape(parameter.shape), name=name)
        return ir.ExternalTensor(
            path.name,
            self._offset[piece] + offset,
            _nbytes(parameter),
            _DTYPES[parameter.dtype][0],
            shape=ir.Shape(parameter.shape),
            name=name,
            base_dir=path.parent,
        )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * _DTYPES[tensor.dtype][1]


def _little_endian(tensor: Tensor) -> memoryview:
    array = tensor.contiguous().numpy()
    return memoryview(array.astype(array.dtype.newbyteorder("<"), copy=False)).cast("B")
