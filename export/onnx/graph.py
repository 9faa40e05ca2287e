"""The decoder lowered to an ONNX graph: no data, every weight an initializer still to be filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
import torch
from torch import Tensor, nn

from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.config import ModelConfig
from edge_qkv.export import operator
from edge_qkv.export.onnx import function as onnx_function
from edge_qkv.export.progress import quiet
from edge_qkv.model import Decoder

_EXAMPLE_TOKENS, _EXAMPLE_ROWS, _EXAMPLE_CAPACITY = 5, 3, 8  # never 0 or 1: tracing would take those for constants


def cache_names(config: ModelConfig, cache: str) -> list[tuple[str, ...]]:
    """The names of each layer's caches as graph inputs, in the order of `Decoder.new_caches`."""
    kinds = operator.cache_kinds(config, cache)
    return [tuple(f"{kind}.{i}" for kind in kinds) for i in range(config.layers)]


def output_name(cache: str) -> str:
    """kv.3 -> kv_out.3"""
    kind, layer = cache.split(".")
    return f"{kind}_out.{layer}"


def symbolic_attend(
    config: ModelConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    caches: tuple[Tensor, ...],
    past: Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Stands in for `edge_qkv.attention.attend` and leaves the operator's node in the graph."""
    cache = next(name for name, dtype in CACHE_DTYPE.items() if dtype == caches[0].dtype)
    used = onnx_function.used_outputs(config, cache)
    after = dict(zip(used[1:], caches, strict=True))  # an output has the type and shape of its input
    given = list(operator.inputs(config, query, key, value, caches, past, tables).values())
    while given[-1] is None:
        given.pop()
    outputs = onnx_function.OUTPUTS[1 : onnx_function.OUTPUTS.index(used[-1]) + 1]
    like = [after.get(name, caches[0]) for name in outputs]  # those absent are omitted in `build`
    out, *updated = torch.onnx.ops.symbolic_multi_out(
        f"{onnx_function.DOMAIN}::{onnx_function.NAME}",
        given,
        operator.attributes(config),
        dtypes=(query.dtype, *(c.dtype for c in like)),
        shapes=((*key.shape[:2], config.heads * config.head_dim), *(c.shape for c in like)),
        version=operator.VERSION,
    )
    return out, tuple(tensor for name, tensor in zip(outputs, updated, strict=True) if name in after)


class _WithWeights(nn.Module):
    """The decoder as a function of its weights.

    As inputs of the graph they have no values, so nothing can be folded, merged or copied on their account.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple: not a submodule, its own parameters stay out

    def forward(
        self, input_ids: Tensor, past: Tensor, logit_rows: Tensor, weights: dict[str, Tensor], caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (decoder,) = self._decoder
        each = len(caches) // decoder.config.layers
        grouped = [tuple(caches[i : i + each]) for i in range(0, len(caches), each)]
        logits, updated = torch.func.functional_call(decoder, weights, (input_ids, past, grouped, logit_rows))
        return (logits, *(cache for layer in updated for cache in layer))


def named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Parameters and rotary tables by name, shared ones once."""
    return dict(decoder.named_parameters()) | dict(decoder.named_buffers())


def build(decoder: Decoder, cache: str) -> ir.Model:
    """Lowers a prepared decoder. The initializers are values without data; their names are `named_weights`'."""
    config, dtype = decoder.config, CACHE_DTYPE[cache]
    weights = {name: _without_memory(w.shape, w.dtype) for name, w in named_weights(decoder).items()}
    names = [name for layer in cache_names(config, cache) for name in layer]
    example = (
        torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64),
        torch.tensor(2),
        torch.arange(_EXAMPLE_ROWS),
        weights,
        # Last: a dict there would be taken for keywords.
        [tensor for layer in decoder.new_caches(_EXAMPLE_CAPACITY, dtype) for tensor in layer],
    )
    any_size = torch.export.Dim.DYNAMIC
    dynamic = {
        "input_ids": {1: any_size},
        "past": None,
        "logit_rows": {0: any_size},
        "weights": dict.fromkeys(weights),
        "caches": [{2: any_size} for _ in names],
    }
    with quiet():
        program = torch.onnx.export(
            _WithWeights(decoder).eval(),
            example,
            dynamo=True,
            opset_version=onnx_function.OPSET,
            dynamic_shapes=dynamic,
            verbose=False,
        )
    model = program.model
    _name_interface(model.graph, names, list(weights))
    _omit_outputs(model.graph, config, cache)
    return model


def fill(model: ir.Model, tensor_of: Callable[[str], ir.TensorProtocol]) -> None:
    """Gives every initializer that still has no data its tensor."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = tensor_of(name)


def finish(model: ir.Model, config: ModelConfig, cache: str, producer_version: str, stored: Mapping[str, int]) -> None:
    """Adds the operator's function, and the metadata from which the runtime plans without any other file.

    stored: how the weights are stored (`weight_bits`, `block_size`, `matrix_bytes`, `table_bytes`).
    """
    function = ir.serde.deserialize_function(onnx_function.attention_function(config, cache))
    model.functions[function.identifier()] = function
    model.opset_imports[onnx_function.DOMAIN] = operator.VERSION
    model.producer_name, model.producer_version = "edge-qkv", producer_version
    model.ir_version = 10  # the one of opset 21
    model.metadata_props.clear()
    facts = operator.description(config, cache) | {name: str(n) for name, n in stored.items()}
    model.metadata_props.update({f"edge_qkv.{name}": value for name, value in facts.items()})


def _name_interface(graph: ir.Graph, caches: list[str], weights: list[str]) -> None:
    """Names inputs and outputs, and turns the weights from inputs into initializers."""
    inputs = list(graph.inputs)
    for value, name in zip(inputs, ["input_ids", "past", "logit_rows", *weights, *caches], strict=True):
        value.name = name
    for value in inputs[3 : 3 + len(weights)]:
        graph.inputs.remove(value)
        graph.initializers[value.name] = value
    for value, name in zip(graph.outputs, ["logits", *map(output_name, caches)], strict=True):
        value.name = name
    sizes = {"input_ids": {1: "T"}, "logit_rows": {0: "R"}, "logits": {1: "R"}}
    for value in [*graph.inputs, *graph.outputs]:
        kind = value.name.split(".")[0].removesuffix("_out").removesuffix("_scale")
        axes = {2: "C"} if kind in ("kv", "key", "value") else sizes.get(value.name, {})
        value.shape = ir.Shape([axes.get(i, size) for i, size in enumerate(value.shape)])
    for node in graph:  # what tracing notes about source lines is of no use to a reader of the model
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


def _omit_outputs(graph: ir.Graph, config: ModelConfig, cache: str) -> None:
    """Marks the operator's outputs that this model does not have as absent, which tracing cannot express."""
    used = onnx_function.used_outputs(config, cache)
    for node in graph:
        if node.domain == onnx_function.DOMAIN:
            for value, name in zip(node.outputs, onnx_function.OUTPUTS, strict=False):
                if name not in used:
                    value.name = ""


def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)
