"""The operators of Core ML's ML programs that decoders are lowered to, in numpy.

Their meaning is what coremltools documents for the operators of iOS 18; a parameter has the name it has there. What
that leaves undefined, such as indices out of range, raises `ValueError`; what is defined and not known here raises
`NotImplementedError`. Known is what our export emits, and the plain operators beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from edge_qkv.export.coreml.evaluator.constants import Value, blocks_of_rows, expand, rows

Array = np.ndarray

# ---- arithmetic: float16 comes in as float32, and the caller rounds the result to the type that the program gives ----


def _real_div(x: Array, y: Array) -> Array:
    if x.dtype.kind != "f":
        raise NotImplementedError("real_div of whole numbers")
    return x / y


def _rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Array:
    return np.float32(1) / np.sqrt(x + np.float32(epsilon))


def _clip(x: Array, alpha: Array, beta: Array) -> Array:
    return np.clip(x, alpha, beta)


def _sigmoid(x: Array) -> Array:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


_ERF_STEP, _ERF_END = 1 / 256, 6.0
_ERF_AT = np.arange(round(_ERF_END / _ERF_STEP) + 1) * _ERF_STEP
_ERF = np.array([math.erf(x) for x in _ERF_AT])


def erf(x: Array) -> Array:
    """The error function of float32 or float64, to 1e-11: a Taylor series around the nearest of some known values.

    numpy has none. Beyond 6 it is 1 in both types to 1e-16.
    """
    size = np.minimum(np.abs(x), _ERF_END)
    nearest = np.rint(np.nan_to_num(size) / _ERF_STEP).astype(np.int32)
    at = _ERF_AT[nearest]
    d = size - at
    slope = 2 / math.sqrt(math.pi) * np.exp(-at * at)
    value = _ERF[nearest] + slope * d * (1 - at * d + (2 * at * at - 1) * d * d / 3)
    return np.copysign(value, x).astype(x.dtype)


_GELU = {
    "EXACT": lambda x: np.float32(0.5) * x * (np.float32(1) + erf(x * np.float32(math.sqrt(0.5)))),
    "TANH_APPROXIMATION": lambda x: (
        np.float32(0.5)
        * x
        * (np.float32(1) + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    ),
}


def _gelu(x: Array, mode: str = "EXACT") -> Array:
    if mode not in _GELU:
        raise NotImplementedError(f"gelu with {mode}")
    return _GELU[mode](x)


def _softmax(x: Array, axis: Array | int = -1) -> Array:
    e = np.exp(x - x.max(int(axis), keepdims=True))
    return e / e.sum(int(axis), keepdims=True)


def _axes(axes: Array | None) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(axis) for axis in np.atleast_1d(axes))


def _reduction(reduce: Callable) -> Callable:
    def reduced(x: Array, axes: Array | None = None, keep_dims: Array | bool = False) -> Array:
        return reduce(x, axis=_axes(axes), keepdims=bool(keep_dims))

    return reduced


def _mean(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    if x.dtype.kind != "f":
        raise NotImplementedError("reduce_mean of whole numbers")
    return x.mean(axis, keepdims=keepdims)


def _sum(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    return x.sum(axis, dtype=x.dtype, keepdims=keepdims)


def _layer_norm(
    x: Array,
    axes: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: Array | float = 1e-5,
) -> Array:
    over = tuple(range(x.ndim)) if axes is None else tuple(axis % x.ndim for axis in _axes(axes))
    shape = [size if axis in over else 1 for axis, size in enumerate(x.shape)]
    centred = x - x.mean(over, keepdims=True)
    out = centred / np.sqrt(np.square(centred).mean(over, keepdims=True) + np.float32(epsilon))
    out = out if gamma is None else out * gamma.reshape(shape)
    return out if beta is None else out + beta.reshape(shape)


def _linear(x: Array, weight: Value, bias: Array | None = None) -> Array:
    """x [..., K] times the transpose of weight [N, K], some rows of which are expanded at a time."""
    if x.dtype.kind != "f":
        raise NotImplementedError("linear of whole numbers")
    flat = x.reshape(-1, x.shape[-1])
    out = np.empty((len(flat), weight.shape[0]), np.float32)
    for block in blocks_of_rows(weight.shape):
        out[:, block] = flat @ rows(weight, block.start, block.stop).T
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _matmul(x: Array, y: Array, transpose_x: Array | bool = False, transpose_y: Array | bool = False) -> Array:
    if transpose_x and x.ndim > 1:
        x = x.swapaxes(-1, -2)
    if transpose_y and y.ndim > 1:
        y = y.swapaxes(-1, -2)
    return np.matmul(x, y)


ARITHMETIC: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "real_div": _real_div,
    "abs": lambda x: np.abs(x),
    "square": lambda x: x * x,
    "sqrt": lambda x: np.sqrt(x),
    "rsqrt": _rsqrt,
    "tanh": lambda x: np.tanh(x),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "clip": _clip,
    "softmax": _softmax,
    "reduce_mean": _reduction(_mean),
    "reduce_sum": _reduction(_sum),
    "reduce_sum_square": _reduction(lambda x, axis, keepdims: _sum(x * x, axis, keepdims)),
    "reduce_max": _reduction(np.max),
    "layer_norm": _layer_norm,
    "linear": _linear,
    "matmul": _matmul,
}

# ---- the rest: values stay what they are ----

_CAST = {"fp16": np.float16, "fp32": np.float32, "bool": np.bool_} | {
    name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32")
}


def _cast(x: Array, dtype: str) -> Array:
    target = np.dtype(_CAST[dtype])
    if target.kind in "iu":
        x = np.trunc(x)
        limits = np.iinfo(target)
        if not (limits.min <= x.min() and x.max() <= limits.max):  # NaN fails too
            raise ValueError(f"values from {x.min()} to {x.max()} do not fit into {dtype}")
    return x.astype(target)


def _select(cond: Array, a: Array, b: Array) -> Array:
    return np.where(cond, a, b)


def _gather(
    x: Value, indices: Array, axis: Array | int = 0, batch_dims: Array | int = 0, validate_indices: Array | bool = False
) -> Array:
    """x.shape[:axis] + indices.shape + x.shape[axis + 1:]; never counts from the end."""
    if batch_dims:
        raise NotImplementedError("gather with batch_dims")
    axis = int(axis) % len(x.shape)
    if indices.size and not (indices.min() >= 0 and indices.max() < x.shape[axis]):
        raise ValueError(f"indices from {indices.min()} to {indices.max()} are not all in [0, {x.shape[axis]})")
    if isinstance(x, np.ndarray) or axis:
        return np.take(expand(x), indices, axis)
    picked = [x.rows(i, i + 1) for i in indices.reshape(-1).tolist()]
    return np.concatenate(picked).reshape(*indices.shape, *x.shape[1:]).astype(x.dtype)


def _place(index: int, size: int, what: str) -> int:
    """An index as numpy's: a negative one counts from the end. None is ever out of range."""
    if not -size <= index <= size:
        raise ValueError(f"{what} {index} is outside of {size} values")
    return index + size if index < 0 else index


def _slices(
    shape: Sequence[int],
    begin: Array,
    end: Array,
    stride: Array | None,
    begin_mask: Array | None,
    end_mask: Array | None,
    squeeze_mask: Array | None,
) -> tuple[slice | int, ...]:
    rank = len(shape)
    masks = [np.zeros(rank, np.bool_) if mask is None else mask for mask in (begin_mask, end_mask, squeeze_mask)]
    stride = np.ones(rank, np.int32) if stride is None else stride
    if {len(each) for each in (begin, end, stride, *masks)} != {rank}:
        raise ValueError(f"a slice of {list(shape)} has not {rank} begins and ends")
    picked: list[slice | int] = []
    for size, first, last, step, from_start, to_end, squeeze in zip(shape, begin, end, stride, *masks, strict=True):
        start = 0 if from_start else _place(int(first), size, "begin")
        if squeeze:
            if start == size:
                raise ValueError(f"begin {start} is outside of {size} values")
            picked.append(start)
            continue
        if step < 1:
            raise NotImplementedError("slices backwards")
        stop = size if to_end else _place(int(last), size, "end")
        if stop <= start:
            raise ValueError(f"the slice [{start}, {stop}) is empty")
        picked.append(slice(start, stop, int(step)))
    return tuple(picked)


def _slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    return x[_slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


def _slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    out = x.copy()
    place = _slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if out[place].shape != update.shape:
        raise ValueError(f"the slice is {list(out[place].shape)}, its update {list(update.shape)}")
    out[place] = update
    return out


def _slice_by_size(x: Array, begin: Array, size: Array) -> Array:
    """A size of -1 takes all from `begin` on."""
    starts = [_place(int(first), limit, "begin") for first, limit in zip(begin, x.shape, strict=True)]
    ends = [limit if n == -1 else start + int(n) for start, n, limit in zip(starts, size, x.shape, strict=True)]
    if any(not start < end <= limit for start, end, limit in zip(starts, ends, x.shape, strict=True)):
        raise ValueError(f"{size.tolist()} values from {begin.tolist()} on are not in {list(x.shape)}")
    return x[tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))]


def _reshape(x: Array, shape: Array) -> Array:
    """0 stands for the size of x on the same axis, counted from the last; -1 for what remains."""
    sizes = [int(size) for size in shape]
    for i, size in enumerate(sizes):
        if size == 0:
            axis = x.ndim - (len(sizes) - i)
            sizes[i] = x.shape[axis] if axis >= 0 else 1
    return x.reshape(sizes)


def _squeeze(x: Array, axes: Array | None = None) -> Array:
    """Axes of another size than 1 stay."""
    named = range(x.ndim) if axes is None else [axis % x.ndim for axis in _axes(axes)]
    return x.squeeze(tuple(axis for axis in named if x.shape[axis] == 1))


def _concat(values: list[Array], axis: Array, interleave: Array | bool = False) -> Array:
    if interleave:
        raise NotImplementedError("concat with interleave")
    return np.concatenate(values, int(axis))


def _split(x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None) -> list[Array]:
    size = x.shape[int(axis)]
    if split_sizes is None:
        split_sizes = np.full(int(num_splits), size // int(num_splits))
    if split_sizes.sum() != size:
        raise ValueError(f"parts of {split_sizes.tolist()} are not {size}")
    return np.split(x, np.cumsum(split_sizes)[:-1], int(axis))


OTHER: dict[str, Callable] = {
    "identity": lambda x: x,
    "cast": _cast,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "equal": lambda x, y: x == y,
    "not_equal": lambda x, y: x != y,
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_not": lambda x: ~x,
    "select": _select,
    "gather": _gather,
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "slice_update": _slice_update,
    "reshape": _reshape,
    "expand_dims": lambda x, axes: np.expand_dims(x, _axes(axes)),
    "squeeze": _squeeze,
    "transpose": lambda x, perm: x.transpose(_axes(perm)),
    "concat": _concat,
    "split": _split,
}

COMPRESSED = {"linear": "weight", "gather": "x"}  # the parameter that may come as it is stored
LISTS = {"concat": "values"}  # the parameter that is a list of values
