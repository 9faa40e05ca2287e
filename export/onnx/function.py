"""UnifiedKVAttention in standard ONNX operators: a model-local function for each kind of layer that it sees.

An ONNX Runtime in which our library is registered runs the native kernel in its place; any other runs
this, slower and with a copy of the cache a layer. Semantics are those of `edge_qkv.attention.attend`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import onnx
import onnx.parser

from edge_qkv.attention import FP16_MAX
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.export import operator
from edge_qkv.layer import LayerSpec

DOMAIN, NAME = "edge_qkv", "UnifiedKVAttention"
MOST_FUNCTIONS = 16  # op types that the native library registers: NAME, NAME_1, ... NAME_15
OPSET = 21  # of the ONNX operators, here and in the graph; ONNX Runtime has it since 1.18
OUTPUTS = ("attention", "cache_out", "value_cache_out", "cache_scale_out", "value_cache_scale_out")


def seen_alike(spec: LayerSpec) -> Hashable:
    """Equal for kinds of layers between which the operator sees no difference."""
    return (*operator.attributes(spec).values(), spec.unified, spec.key_weight, bool(spec.rows_of))


def op_types(config: ModelConfig) -> dict[Hashable, tuple[str, LayerSpec]]:
    """The operator's names in a graph, one a function, each with a kind of layer that has it, by `seen_alike`.

    A function is specialised to sizes, which ONNX Runtime finds by the node's name: so kinds that the operator does not
    see alike have another. Raises `InputError` for more than `MOST_FUNCTIONS` of them.
    """
    found: dict[Hashable, tuple[str, LayerSpec]] = {}
    for spec in config.kinds.values():
        found.setdefault(seen_alike(spec), (f"{NAME}_{len(found)}" if found else NAME, spec))
    if len(found) > MOST_FUNCTIONS:
        raise InputError(f"the model has {len(found)} kinds of attention; an ONNX package has at most {MOST_FUNCTIONS}")
    return found


def used_inputs(spec: LayerSpec, cache: str) -> frozenset[str]:
    """Those of `operator.INPUTS` that this kind of layer has."""
    rows = ("cache",) if spec.unified else ("cache", "value_cache")
    new = ("kv",) if spec.unified else ("kv", "value")
    if spec.rows_of:  # an earlier layer wrote the rows
        new = ()
    scales = tuple(f"{name}_scale" for name in rows) if cache == "int8" else ()
    tables = ("cos", "sin") if spec.rotary else ()
    return frozenset(("query", "past", *new, *rows, *scales, *tables, *(("key_weight",) if spec.key_weight else ())))


def used_outputs(spec: LayerSpec, cache: str) -> tuple[str, ...]:
    """Those of `OUTPUTS` that this kind of layer has: the attention, and the caches that it writes."""
    written = () if spec.rows_of else used_inputs(spec, cache)
    return ("attention", *(name for name in OUTPUTS if name.removesuffix("_out") in written))


def up_to_last(names: Sequence[str], used: Sequence[str] | frozenset[str]) -> tuple[str, ...]:
    """The names of a node up to the last that is used: those between are absent, those after it are left out."""
    return tuple(names[: max(i for i, name in enumerate(names) if name in used) + 1])


def attention_function(spec: LayerSpec, cache: str, name: str = NAME) -> onnx.FunctionProto:
    """The operator for the sizes of this kind of layer and a cache of 'fp32', 'fp16' or 'int8'.

    The attributes are declared, as the node carries them, but their values are built in.
    """
    inputs = up_to_last(operator.INPUTS, used_inputs(spec, cache))
    used = used_outputs(spec, cache)
    outputs = up_to_last(OUTPUTS, used)
    text = f"""
        <domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
        {name} <{", ".join(operator.ATTRIBUTES)}> ({", ".join(inputs)}) => ({", ".join(outputs)}) {{
            {"".join(_body(spec, cache))}
            {"".join(f"{name} = Constant <value_int = 0> ()" for name in outputs if name not in used)}
        }}"""
    function = onnx.parser.parse_function(text)
    function.doc_string = "Attention over one cached row a token and kv head; see the edge-qkv project."
    return function


def _body(spec: LayerSpec, cache: str) -> list[str]:
    # Shapes: B batch, T new tokens, E = past + T, H heads, G kv heads, D head_dim, V value_dim, C capacity.
    heads, groups, dim, values_dim = spec.heads, spec.kv_heads, spec.head_dim, spec.values
    conjugate, on_read = spec.positions == "rotary-conjugate", spec.positions == "rotary-on-read"
    lines = [
        _ints("zero", 0) + _ints("one", 1) + _ints("rows_axis", 2) + _ints("last_row", 2**62) + _ints("rest", -1),
        """
        batch = Shape <start = 0, end = 1> (query)
        tokens = Shape <start = 1, end = 2> (query)
        past_1d = Reshape (past, one)
        end_1d = Add (past_1d, tokens)
        end = Squeeze (end_1d)
        past_scalar = Squeeze (past_1d)
        """,
        _split_heads("query", "query_rows", heads, dim),  # [B, H, T, D]
    ]
    query, key = "query_rows", "key_rows"
    if not spec.rows_of:
        lines.append(_split_heads("kv", key, groups, dim))  # [B, G, T, D]
    if spec.rotary:
        lines += [
            "cos_here = Slice (cos, past_1d, end_1d, zero)\n",  # [T, R/2]
            "sin_here = Slice (sin, past_1d, end_1d, zero)\n",
            _rotate(spec, query, "query_rotated", "cos_here", "sin_here", dim),
        ]
        query = "query_rotated"
    if conjugate and not spec.rows_of:
        lines.append(_rotate(spec, key, "key_rotated", "cos_here", "sin_here", dim))
        key = "key_rotated"
    lines.append(_cached("cache", None if spec.rows_of else key, "keys_stored", cache))  # [B, G, E, D]
    keys = values = "keys_stored"
    if not spec.unified:
        new = None if spec.rows_of else "value_rows"
        lines += [] if new is None else [_split_heads("value", new, groups, values_dim)]
        lines += [_cached("value_cache", new, "values_stored", cache)]  # [B, G, E, V]
        values = "values_stored"
    elif values_dim < dim:
        lines += [_ints("value_dim_end", values_dim)]
        lines += ["values_stored = Slice (keys_stored, zero, value_dim_end, rest)\n"]
        values = "values_stored"
    if spec.key_weight:
        lines.append(f"keys_weighted = Mul ({keys}, key_weight)\n")
        keys = "keys_weighted"
    if on_read:
        lines += [
            "cos_all = Slice (cos, zero, end_1d, zero)\n",  # [E, R/2]
            "sin_all = Slice (sin, zero, end_1d, zero)\n",
            _rotate(spec, keys, "keys_rotated", "cos_all", "sin_all", dim),
        ]
        keys = "keys_rotated"
    lines.append(f"""
        group_shape = Constant <value_ints = [0, {groups}, -1, {dim}]> ()
        query_grouped = Reshape ({query}, group_shape)
        keys_across = Transpose <perm = [0, 1, 3, 2]> ({keys})
        products = MatMul (query_grouped, keys_across)
        scale_value = Constant <value_float = {spec.scale!r}> ()
        scaled = Mul (products, scale_value)
        """)  # query_grouped [B, G, H/G*T, D]; products [B, G, H/G*T, E]
    lines += [_ints("heads", heads), _ints("groups", groups)]
    lines.append("""
        score_shape = Concat <axis = 0> (batch, heads, tokens, end_1d)
        scores = Reshape (scaled, score_shape)
        first = Constant <value_int = 0> ()
        step = Constant <value_int = 1> ()
        query_positions = Range (past_scalar, end, step)
        query_column = Unsqueeze (query_positions, one)
        key_positions = Range (first, end, step)
        causal = LessOrEqual (key_positions, query_column)
        """)  # scores [B, H, T, E]; causal [T, E]
    visible = "causal"
    if spec.window:
        lines += [_ints("window_rows", spec.window), _ints("sink_rows", spec.sinks)]
        lines.append("""
        outside = Sub (query_column, window_rows)
        recent = Greater (key_positions, outside)
        sink = Less (key_positions, sink_rows)
        recent_or_sink = Or (recent, sink)
        visible = And (causal, recent_or_sink)
        """)
        visible = "visible"
    lines.append(f"""
        hidden_score = Constant <value_float = -3.4028234e38> ()
        masked = Where ({visible}, scores, hidden_score)
        weights = Softmax <axis = -1> (masked)
        grouped_shape = Concat <axis = 0> (batch, groups, rest, end_1d)
        weights_grouped = Reshape (weights, grouped_shape)
        """)
    lines.append(f"""
        mixed = MatMul (weights_grouped, {values})
        head_shape = Concat <axis = 0> (batch, heads, tokens, rest)
        mixed_rows = Reshape (mixed, head_shape)
        """)  # [B, H, T, V]
    mixed = "mixed_rows"
    if spec.output_rotated:  # the values were rotated with the keys: turn the output back
        lines += ["sin_back = Neg (sin_here)\n"]
        lines += [_rotate(spec, mixed, "mixed_back", "cos_here", "sin_back", values_dim)]
        mixed = "mixed_back"
    lines.append(f"""
        mixed_tokens = Transpose <perm = [0, 2, 1, 3]> ({mixed})
        merged_shape = Constant <value_ints = [0, 0, {heads * values_dim}]> ()
        attention = Reshape (mixed_tokens, merged_shape)
        """)
    return lines


def _ints(name: str, value: int) -> str:
    return f"{name} = Constant <value_ints = [{value}]> ()\n"


def _split_heads(name: str, out: str, heads: int, dim: int) -> str:
    """[B, T, heads*D] -> [B, heads, T, D]"""
    return f"""
        {out}_shape = Constant <value_ints = [0, 0, {heads}, {dim}]> ()
        {out}_split = Reshape ({name}, {out}_shape)
        {out} = Transpose <perm = [0, 2, 1, 3]> ({out}_split)
        """


def _rotate(spec: LayerSpec, x: str, out: str, cos: str, sin: str, dim: int) -> str:
    """Rotates R values of x [B, heads, T, dim] from the rotary offset on in half-split pairs; cos, sin [T, R/2]."""
    half, offset = spec.rotated // 2, spec.rotary_offset
    parts = {"before": offset, "a": half, "b": half, "rest": dim - offset - 2 * half}
    parts = {part: size for part, size in parts.items() if size}
    turned = {"a": f"{out}_left", "b": f"{out}_right"}
    return f"""
        {out}_parts = Constant <value_ints = {[*parts.values()]}> ()
        {", ".join(f"{out}_{part}" for part in parts)} = Split <axis = -1> ({x}, {out}_parts)
        {out}_ac = Mul ({out}_a, {cos})
        {out}_bs = Mul ({out}_b, {sin})
        {out}_left = Sub ({out}_ac, {out}_bs)
        {out}_bc = Mul ({out}_b, {cos})
        {out}_as = Mul ({out}_a, {sin})
        {out}_right = Add ({out}_bc, {out}_as)
        {out} = Concat <axis = -1> ({", ".join(turned.get(part, f"{out}_{part}") for part in parts)})
        """


def _cached(name: str, rows: str | None, stored: str, cache: str) -> str:
    """`stored` [B, G, E, D] fp32: the valid rows as the cache holds them, after `rows` [B, G, T, D] were written at
    `past`; None: an earlier layer has written them.

    Rows at or beyond E are carried along but never computed with: they may hold anything, NaN included.
    """
    parts = (name, f"{name}_scale") if cache == "int8" else (name,)
    if rows is None:
        valid = "".join(f"{part}_valid = Slice ({part}, zero, end_1d, rows_axis)\n" for part in parts)
    else:
        valid = _rounded(name, rows, cache) + "".join(_insert(part) for part in parts)
    return valid + _widened(name, stored, cache)


def _rounded(name: str, rows: str, cache: str) -> str:
    """`new` [B, G, T, D] are the rows as the cache holds them, and with int8 `scale_new` [B, G, T] their scales."""
    match cache:
        case "fp16":  # saturate: one infinity would spoil every later token
            return f"""
                {name}_least = Constant <value_float = {-FP16_MAX}> ()
                {name}_most = Constant <value_float = {FP16_MAX}> ()
                {name}_clipped = Clip ({rows}, {name}_least, {name}_most)
                {name}_new = Cast <to = {onnx.TensorProto.FLOAT16}> ({name}_clipped)
                """
        case "int8":
            return _quantize(name, rows)
        case _:
            return f"{name}_new = Identity ({rows})\n"


def _widened(name: str, stored: str, cache: str) -> str:
    """The rows `valid` in fp32."""
    match cache:
        case "fp16":
            return f"{stored} = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_valid)\n"
        case "int8":
            return f"""
                {name}_codes = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_valid)
                {name}_factors = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_scale_valid)
                {name}_factor_columns = Unsqueeze ({name}_factors, rest)
                {stored} = Mul ({name}_codes, {name}_factor_columns)
                """
        case _:
            return f"{stored} = Identity ({name}_valid)\n"


def _insert(name: str) -> str:
    """`new` [B, G, T, ...] at `past` of a cache, or of its scales; `valid` are the rows up to E."""
    return f"""
        {name}_before = Slice ({name}, zero, past_1d, rows_axis)
        {name}_after = Slice ({name}, end_1d, last_row, rows_axis)
        {name}_out = Concat <axis = 2> ({name}_before, {name}_new, {name}_after)
        {name}_valid = Concat <axis = 2> ({name}_before, {name}_new)
        """


def _quantize(name: str, rows: str) -> str:
    """`edge_qkv.attention.quantize_rows`: rows [B, G, T, D] to codes `new` and scales `scale_new` [B, G, T]."""
    return f"""
        {name}_nothing = Constant <value_float = 0.0> ()
        {name}_whole = Constant <value_float = 1.0> ()
        {name}_least = Constant <value_float = -127.0> ()
        {name}_most = Constant <value_float = 127.0> ()
        {name}_most_scale = Constant <value_float = {FP16_MAX}> ()
        {name}_nan = IsNaN ({rows})
        {name}_rows = Where ({name}_nan, {name}_nothing, {rows})
        {name}_magnitudes = Abs ({name}_rows)
        {name}_largest = ReduceMax <keepdims = 0> ({name}_magnitudes, rest)
        {name}_exact_scale = Div ({name}_largest, {name}_most)
        {name}_bounded_scale = Min ({name}_exact_scale, {name}_most_scale)
        {name}_scale_new = Cast <to = {onnx.TensorProto.FLOAT16}> ({name}_bounded_scale)
        {name}_scale_float = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_scale_new)
        {name}_positive = Greater ({name}_scale_float, {name}_nothing)
        {name}_divisor = Where ({name}_positive, {name}_scale_float, {name}_whole)
        {name}_divisor_column = Unsqueeze ({name}_divisor, rest)
        {name}_quotient = Div ({name}_rows, {name}_divisor_column)
        {name}_rounded = Round ({name}_quotient)
        {name}_bounded = Clip ({name}_rounded, {name}_least, {name}_most)
        {name}_new = Cast <to = {onnx.TensorProto.INT8}> ({name}_bounded)
        """
