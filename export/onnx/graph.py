"""The decoder lowered to an ONNX graph: no data, every weight an initializer still to be filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
import torch
from torch import Tensor, nn

from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.config import ModelConfig
from edge_qkv.description import DESCRIPTION, OPERATOR, describe
from edge_qkv.export import operator
from edge_qkv.export.onnx import function as onnx_function
from edge_qkv.export.progress import quiet
from edge_qkv.layer import LayerSpec
from edge_qkv.model import Decoder

_EXAMPLE_TOKENS, _EXAMPLE_ROWS, _EXAMPLE_CAPACITY = 5, 3, 8  # never 0 or 1: tracing would take those for constants


def output_name(cache: str) -> str:
    """kv.3 -> kv_out.3"""
    kind, layer = cache.split(".")
    return f"{kind}_out.{layer}"


def attend_in(config: ModelConfig) -> Callable:
    """A function that stands in for `edge_qkv.attention.attend` and leaves the operator's nodes in the graph.

    Raises `InputError` for a model that has too many kinds of attention.
    """
    op_types = onnx_function.op_types(config)

    def attend(
        spec: LayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, ...],
        past: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        key_weight: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        cache = next(name for name, dtype in CACHE_DTYPE.items() if dtype == caches[0].dtype)
        used = onnx_function.used_outputs(spec, cache)
        outputs = onnx_function.up_to_last(onnx_function.OUTPUTS, used)[1:]
        after = dict(zip(used[1:], caches, strict=True)) if used[1:] else {}  # of the type and shape of their inputs
        given = list(operator.inputs(spec, query, key, value, caches, past, tables, key_weight).values())
        while given[-1] is None:
            given.pop()
        like = [after.get(name, caches[0]) for name in outputs]  # those absent are omitted in `build`
        out, *updated = torch.onnx.ops.symbolic_multi_out(
            f"{onnx_function.DOMAIN}::{op_types[onnx_function.seen_alike(spec)][0]}",
            given,
            operator.attributes(spec),
            dtypes=(query.dtype, *(c.dtype for c in like)),
            shapes=((*query.shape[:2], spec.heads * spec.values), *(c.shape for c in like)),
            version=OPERATOR,
        )
        written = tuple(tensor for name, tensor in zip(outputs, updated, strict=True) if name in after)
        return out, written or caches

    return attend


class _WithWeights(nn.Module):
    """The decoder as a function of its weights.

    As inputs of the graph they have no values, so nothing can be folded, merged or copied on their account.
    """

    def __init__(self, decoder: Decoder, cache: str) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple: not a submodule, its own parameters stay out
        self._layers = [tensor.layer for tensor in decoder.config.cache_tensors(cache)]

    def forward(
        self, input_ids: Tensor, past: Tensor, logit_rows: Tensor, weights: dict[str, Tensor], caches: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (decoder,) = self._decoder
        grouped = [() for _ in decoder.layers]
        for layer, tensor in zip(self._layers, caches, strict=True):
            grouped[layer] += (tensor,)
        logits, updated = torch.func.functional_call(decoder, weights, (input_ids, past, grouped, logit_rows))
        return (logits, *(cache for layer in updated for cache in layer))


def named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Parameters and rotary tables by name, shared ones once."""
    return dict(decoder.named_parameters()) | dict(decoder.named_buffers())


def build(decoder: Decoder, cache: str) -> ir.Model:
    """Lowers a prepared decoder. The initializers are values without data; their names are `named_weights`'."""
    config, dtype = decoder.config, CACHE_DTYPE[cache]
    weights = {name: _without_memory(w.shape, w.dtype) for name, w in named_weights(decoder).items()}
    names = [tensor.name for tensor in config.cache_tensors(cache)]
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
            _WithWeights(decoder, cache).eval(),
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


def finish(
    model: ir.Model, config: ModelConfig, cache: str, producer_version: str, facts: Mapping[str, int | str]
) -> None:
    """Adds the operator's functions, and the description from which the runtime plans without any other file.

    facts: of `edge_qkv.description.describe`.
    """
    for op_type, spec in onnx_function.op_types(config).values():
        function = ir.serde.deserialize_function(onnx_function.attention_function(spec, cache, op_type))
        model.functions[function.identifier()] = function
    model.opset_imports[onnx_function.DOMAIN] = OPERATOR
    model.producer_name, model.producer_version = "edge-qkv", producer_version
    model.ir_version = 10  # the one of opset 21
    model.metadata_props.clear()
    model.metadata_props[DESCRIPTION] = describe(config, cache, facts)


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
    """Marks the operator's outputs that a kind of layer does not have as absent, which tracing cannot express."""
    kinds = dict(onnx_function.op_types(config).values())
    for node in graph:
        if node.domain == onnx_function.DOMAIN:
            used = onnx_function.used_outputs(kinds[node.op_type], cache)
            for value, name in zip(node.outputs, onnx_function.OUTPUTS, strict=False):
                if name not in used:
                    value.name = ""


def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)
