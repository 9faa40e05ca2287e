"""UnifiedKVAttention in standard ONNX operators: a model-local function, specialised to one model.

An ONNX Runtime in which our library is registered runs the native kernel in its place; any other runs
this, slower and with a copy of the cache a layer. Semantics are those of `edge_qkv.attention.attend`.
"""

from __future__ import annotations

import onnx
import onnx.parser

from edge_qkv.attention import FP16_MAX
from edge_qkv.config import ModelConfig
from edge_qkv.export.operator import ATTRIBUTES, INPUTS

DOMAIN, NAME = "edge_qkv", "UnifiedKVAttention"
OPSET = 21  # of the ONNX operators, here and in the graph; ONNX Runtime has it since 1.18
OUTPUTS = ("attention", "cache_out", "value_cache_out", "cache_scale_out", "value_cache_scale_out")


def used_outputs(config: ModelConfig, cache: str) -> tuple[str, ...]:
    """Those of `OUTPUTS` that this model has."""
    stored = ("cache_out",) if config.unified else ("cache_out", "value_cache_out")
    scales = tuple(name.replace("_out", "_scale_out") for name in stored) if cache == "int8" else ()
    return ("attention", *stored, *scales)


def attention_function(config: ModelConfig, cache: str) -> onnx.FunctionProto:
    """The operator for this model's sizes and a cache of 'fp32', 'fp16' or 'int8'.

    The attributes are declared, as the node carries them, but their values are built in.
    """
    inputs = INPUTS[: 10 if cache == "int8" else 8 if not config.unified else 6 if config.rotary else 4]
    used = used_outputs(config, cache)
    outputs = OUTPUTS[: OUTPUTS.index(used[-1]) + 1]
    text = f"""
        <domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
        {NAME} <{", ".join(ATTRIBUTES)}> ({", ".join(inputs)}) => ({", ".join(outputs)}) {{
            {"".join(_body(config, cache))}
            {"".join(f"{name} = Constant <value_int = 0> ()" for name in outputs if name not in used)}
        }}"""
    function = onnx.parser.parse_function(text)
    function.doc_string = "Attention over one cached row a token and kv head; see the edge-qkv project."
    return function


def _body(config: ModelConfig, cache: str) -> list[str]:
    # Shapes: B batch, T new tokens, E = past + T, H heads, G kv heads, D head_dim, C capacity.
    heads, groups, dim = config.heads, config.kv_heads, config.head_dim
    conjugate, on_read = config.positions == "rotary-conjugate", config.positions == "rotary-on-read"
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
        _split_heads("kv", "key_rows", groups, dim),  # [B, G, T, D]
    ]
    query, key = "query_rows", "key_rows"
    if config.rotary:
        lines += [
            f"rotary_parts = Constant <value_ints = {_rotary_parts(config)}> ()\n",
            "cos_here = Slice (cos, past_1d, end_1d, zero)\n",  # [T, R/2]
            "sin_here = Slice (sin, past_1d, end_1d, zero)\n",
            _rotate(config, query, "query_rotated", "cos_here", "sin_here"),
        ]
        query = "query_rotated"
    if conjugate:
        lines.append(_rotate(config, key, "key_rotated", "cos_here", "sin_here"))
        key = "key_rotated"
    lines.append(_update_cache("cache", key, "keys_stored", cache))  # [B, G, E, D]
    keys = values = "keys_stored"
    if not config.unified:
        lines += [_split_heads("value", "value_rows", groups, dim)]
        lines += [_update_cache("value_cache", "value_rows", "values_stored", cache)]
        values = "values_stored"
    if on_read:
        lines += [
            "cos_all = Slice (cos, zero, end_1d, zero)\n",  # [E, R/2]
            "sin_all = Slice (sin, zero, end_1d, zero)\n",
            _rotate(config, keys, "keys_rotated", "cos_all", "sin_all"),
        ]
        keys = "keys_rotated"
    lines.append(f"""
        group_shape = Constant <value_ints = [0, {groups}, -1, {dim}]> ()
        query_grouped = Reshape ({query}, group_shape)
        keys_across = Transpose <perm = [0, 1, 3, 2]> ({keys})
        products = MatMul (query_grouped, keys_across)
        scale_value = Constant <value_float = {config.scale!r}> ()
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
    if config.window:
        lines += [_ints("window_rows", config.window), _ints("sink_rows", config.sinks)]
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
        """)  # [B, H, T, D]
    mixed = "mixed_rows"
    if conjugate and config.unified:  # the values were rotated with the keys: turn the output back
        lines += ["sin_back = Neg (sin_here)\n", _rotate(config, mixed, "mixed_back", "cos_here", "sin_back")]
        mixed = "mixed_back"
    lines.append(f"""
        mixed_tokens = Transpose <perm = [0, 2, 1, 3]> ({mixed})
        merged_shape = Constant <value_ints = [0, 0, {heads * dim}]> ()
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


def _rotary_parts(config: ModelConfig) -> list[int]:
    half, rest = config.rotated // 2, config.head_dim - config.rotated
    return [half, half, rest] if rest else [half, half]


def _rotate(config: ModelConfig, x: str, out: str, cos: str, sin: str) -> str:
    """Rotates the first R values of x [B, heads, T, D] in half-split pairs; cos, sin [T, R/2]."""
    rest = f", {out}_rest" if config.rotated < config.head_dim else ""
    return f"""
        {out}_a, {out}_b{rest} = Split <axis = -1> ({x}, rotary_parts)
        {out}_ac = Mul ({out}_a, {cos})
        {out}_bs = Mul ({out}_b, {sin})
        {out}_left = Sub ({out}_ac, {out}_bs)
        {out}_bc = Mul ({out}_b, {cos})
        {out}_as = Mul ({out}_a, {sin})
        {out}_right = Add ({out}_bc, {out}_as)
        {out} = Concat <axis = -1> ({out}_left, {out}_right{rest})
        """


def _update_cache(name: str, rows: str, stored: str, cache: str) -> str:
    """Writes rows [B, G, T, D] at `past`; `stored` [B, G, E, D] fp32 are the valid rows as the cache holds them.

    Rows at or beyond E are carried along but never computed with: they may hold anything, NaN included.
    """
    match cache:
        case "fp16":  # saturate: one infinity would spoil every later token
            return f"""
                {name}_least = Constant <value_float = {-FP16_MAX}> ()
                {name}_most = Constant <value_float = {FP16_MAX}> ()
                {name}_clipped = Clip ({rows}, {name}_least, {name}_most)
                {name}_new = Cast <to = {onnx.TensorProto.FLOAT16}> ({name}_clipped)
                {_insert(name)}
                {stored} = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_valid)
                """
        case "int8":
            return f"""
                {_quantize(name, rows)}
                {_insert(name)}
                {_insert(f"{name}_scale")}
                {name}_codes = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_valid)
                {name}_factors = Cast <to = {onnx.TensorProto.FLOAT}> ({name}_scale_valid)
                {name}_factor_columns = Unsqueeze ({name}_factors, rest)
                {stored} = Mul ({name}_codes, {name}_factor_columns)
                """
        case _:
            return f"""
                {name}_new = Identity ({rows})
                {_insert(name)}
                {stored} = Identity ({name}_valid)
                """


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
