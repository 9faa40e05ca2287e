"""Each operator of Core ML programs that the numpy evaluator knows, against PyTorch, through a saved package."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("coremltools", reason="coremltools is not installed")

from coremltools.converters.mil import Builder as mb

from edge_qkv.export.coreml.evaluator.interpreter import Evaluator, load
from edge_qkv.export.coreml.evaluator.operators import ARITHMETIC, OTHER
from ml_programs import convert, ints, random, save

X, Y, POSITIVE = random(2, 3, 4), random(2, 3, 4, seed=1), np.abs(random(2, 3, 4, seed=2)) + 0.1
WEIGHT, BIAS = random(7, 4, seed=4), random(7, seed=5)
WHOLE, DIVISOR = ints([7, -7, 6], [-8, 0, 2**30]), ints([2, 2, -4], [3, 5, 7])
PICKS, AT = ints([2, 0], [1, 2]), ints(1, 0, 2)

# name: (what is built of c, which makes constants of the case's type, and the inputs; the same in PyTorch; the inputs)
FLOATS = {
    "add": (lambda c, x, y: mb.add(x=x, y=y), torch.add, (X, Y)),
    "add, broadcast": (lambda c, x, y: mb.add(x=x, y=y), torch.add, (X, Y[:1, :, :1])),
    "sub": (lambda c, x, y: mb.sub(x=x, y=y), torch.sub, (X, Y)),
    "mul": (lambda c, x, y: mb.mul(x=x, y=y), torch.mul, (X, Y)),
    "real_div": (lambda c, x, y: mb.real_div(x=x, y=y), torch.div, (X, POSITIVE)),
    "abs": (lambda c, x: mb.abs(x=x), torch.abs, (X,)),
    "square": (lambda c, x: mb.square(x=x), torch.square, (X,)),
    "sqrt": (lambda c, x: mb.sqrt(x=x), torch.sqrt, (POSITIVE,)),
    "rsqrt": (lambda c, x: mb.rsqrt(x=x, epsilon=c(0.25)), lambda x: (x + 0.25).rsqrt(), (POSITIVE,)),
    "tanh": (lambda c, x: mb.tanh(x=x), torch.tanh, (X,)),
    "silu": (lambda c, x: mb.silu(x=x), F.silu, (30 * X,)),
    "gelu": (lambda c, x: mb.gelu(x=x, mode="EXACT"), F.gelu, (3 * X,)),
    "gelu, tanh": (lambda c, x: mb.gelu(x=x, mode="TANH_APPROXIMATION"), partial(F.gelu, approximate="tanh"), (3 * X,)),
    "clip": (lambda c, x: mb.clip(x=x, alpha=c(-0.5), beta=c(0.75)), lambda x: x.clamp(-0.5, 0.75), (X,)),
    "softmax": (lambda c, x: mb.softmax(x=x, axis=1), lambda x: x.softmax(1), (5 * X,)),
    "reduce_mean": (lambda c, x: mb.reduce_mean(x=x, axes=[-1], keep_dims=True), lambda x: x.mean(-1, True), (X,)),
    "reduce_sum": (lambda c, x: mb.reduce_sum(x=x, axes=[0, 2]), lambda x: x.sum((0, 2)), (X,)),
    "reduce_sum_square": (lambda c, x: mb.reduce_sum_square(x=x, axes=[1]), lambda x: (x * x).sum(1), (X,)),
    "reduce_max": (lambda c, x: mb.reduce_max(x=x, axes=[-2], keep_dims=True), lambda x: x.amax(-2, True), (X,)),
    "layer_norm": (
        lambda c, x: mb.layer_norm(x=x, axes=[-1], gamma=c(BIAS[:4]), beta=c(BIAS[3:]), epsilon=c(0.1)),
        lambda x: F.layer_norm(x, (4,), torch.tensor(BIAS[:4]), torch.tensor(BIAS[3:]), 0.1),
        (X,),
    ),
    "layer_norm, two axes": (
        lambda c, x: mb.layer_norm(x=x, axes=[1, 2], epsilon=c(1e-3)),
        lambda x: F.layer_norm(x, (3, 4), eps=1e-3),
        (X,),
    ),
    "linear": (
        lambda c, x: mb.linear(x=x, weight=c(WEIGHT), bias=c(BIAS)),
        lambda x: F.linear(x, torch.tensor(WEIGHT), torch.tensor(BIAS)),
        (X,),
    ),
    "matmul": (lambda c, x, y: mb.matmul(x=x, y=y), torch.matmul, (X, random(4, 5))),
    "matmul, transposed": (
        lambda c, x, y: mb.matmul(x=x, y=y, transpose_x=True, transpose_y=True),
        lambda x, y: x.transpose(-1, -2) @ y.transpose(-1, -2),
        (X, random(1, 5, 3)),
    ),
    "select": (
        lambda c, x, y: mb.select(cond=mb.greater(x=x, y=y), a=x, b=c(-2)),
        lambda x, y: torch.where(x > y, x, -2.0),
        (X, Y),
    ),
    "comparisons": (
        lambda c, x, y: mb.cast(
            x=mb.logical_or(
                x=mb.logical_and(x=mb.less(x=x, y=y), y=mb.greater_equal(x=x, y=c(0))),
                y=mb.logical_not(x=mb.logical_or(x=mb.less_equal(x=x, y=y), y=mb.equal(x=x, y=c(1)))),
            ),
            dtype="int32",
        ),
        lambda x, y: (((x < y) & (x >= 0)) | ~((x <= y) | (x == 1))).int(),
        (X, Y),
    ),
    "gather": (lambda c, x, i: mb.gather(x=x, indices=i, axis=1), lambda x, i: x[:, i.long()], (X, PICKS)),
    "gather, last axis": (lambda c, x, i: mb.gather(x=x, indices=i, axis=-1), lambda x, i: x[:, :, i.long()], (X, AT)),
    "slice_by_index": (
        lambda c, x: mb.slice_by_index(
            x=x, begin=[1, -2, 0], end=[0, 0, -1], stride=[1, 1, 2], end_mask=[True, True, False]
        ),
        lambda x: x[1:, -2:, 0:-1:2],
        (X,),
    ),
    "slice_by_index, squeezed": (
        lambda c, x, i: mb.slice_by_index(
            x=x, begin=i, end=[2, 3, 4], begin_mask=[True, False, False], squeeze_mask=[False, True, False]
        ),
        lambda x, i: x[:, 0, 2:4],
        (X, AT),
    ),
    "slice_by_size": (
        lambda c, x, i: mb.slice_by_size(x=x, begin=i, size=[1, 2, -1]),
        lambda x, i: x[1:2, 0:2, 2:],
        (X, AT),
    ),
    "slice_update": (
        lambda c, x, y, i: mb.slice_update(x=x, update=y, begin=i, end=mb.add(x=i, y=ints(1, 3, 2))),
        lambda x, y, i: torch.cat([x[:1], torch.cat([x[1:, :, :2], y], 2)]),
        (X, Y[:1, :, :2], AT),
    ),
    "reshape": (lambda c, x: mb.reshape(x=x, shape=[-1, 0]), lambda x: x.reshape(6, 4), (X,)),
    "reshape, more axes": (lambda c, x: mb.reshape(x=x, shape=[0, 2, -1, 0]), lambda x: x.reshape(1, 2, 3, 4), (X,)),
    "transpose": (lambda c, x: mb.transpose(x=x, perm=[2, 0, -2]), lambda x: x.permute(2, 0, 1), (X,)),
    "expand_dims": (lambda c, x: mb.expand_dims(x=x, axes=[0, -1]), lambda x: x[None, ..., None], (X,)),
    "squeeze": (lambda c, x: mb.squeeze(x=x, axes=[0, 1]), lambda x: x[0], (X[:1],)),
    "concat": (lambda c, x, y: mb.concat(values=[x, y], axis=-1), lambda x, y: torch.cat([x, y], -1), (X, Y)),
    "split": (lambda c, x: mb.split(x=x, split_sizes=[1, 3], axis=2)[1], lambda x: x[..., 1:], (X,)),
    "split, evenly": (lambda c, x: mb.split(x=x, num_splits=3, axis=1)[1], lambda x: x[:, 1:2], (X,)),
    "identity": (lambda c, x: mb.identity(x=x), lambda x: x, (X,)),
    "cast to int": (lambda c, x: mb.cast(x=x, dtype="int32"), lambda x: x.int(), (100 * X,)),
}
WHOLES = {
    "add": (lambda c, x, y: mb.add(x=x, y=y), torch.add, (WHOLE, DIVISOR)),
    "mul": (lambda c, x, y: mb.mul(x=x, y=y), torch.mul, (WHOLE[:1], DIVISOR)),
    "matmul": (lambda c, x, y: mb.matmul(x=x, y=y, transpose_y=True), lambda x, y: x @ y.T, (WHOLE, DIVISOR)),
    "reduce_sum": (lambda c, x: mb.reduce_sum(x=x, axes=[1]), lambda x: x.sum(1).int(), (DIVISOR,)),
    "cast through uint16": (
        lambda c, x: mb.cast(x=mb.cast(x=x, dtype="uint16"), dtype="int32"),
        lambda x: x,
        (ints(0, 50303, 65535),),
    ),
    "not_equal": (
        lambda c, x, y: mb.cast(x=mb.not_equal(x=x, y=y), dtype="int32"),
        lambda x, y: (x != y).int(),
        (WHOLE, DIVISOR),
    ),
}
CASES = [
    *(
        (f"{name}, {np.dtype(dtype)}", dtype, *case)
        for dtype in (np.float16, np.float32)
        for name, case in FLOATS.items()
    ),
    *((f"{name}, whole numbers", np.float32, *case) for name, case in WHOLES.items()),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> tuple[Evaluator, dict[str, np.ndarray]]:
    """All cases in one program, and its inputs."""
    inputs, builds = {}, []
    for i, (_, dtype, build, _, arrays) in enumerate(CASES):
        names = [f"in_{i}_{j}" for j in range(len(arrays))]
        inputs |= {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in zip(names, arrays, strict=True)}
        builds.append((build, partial(np.array, dtype=dtype), names))

    def build(**values):
        return tuple(
            mb.identity(x=make(const, *(values[name] for name in names)), name=f"out_{i}")
            for i, (make, const, names) in enumerate(builds)
        )

    return load(save(convert(build, inputs), tmp_path_factory.mktemp("operators") / "all.mlpackage")), inputs


@pytest.fixture(scope="module")
def results(program) -> dict[str, np.ndarray]:
    evaluator, inputs = program
    return evaluator.predict(inputs)


def test_every_operator_is_in_a_case(program):
    assert {step.kind for step in program[0]._steps} == set(ARITHMETIC | OTHER)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case[0] for case in CASES])
def test_an_operator_computes_what_pytorch_computes(results, number):
    _, dtype, _, reference, arrays = CASES[number]
    given = [torch.tensor(a.astype(dtype).astype(np.float32) if a.dtype.kind == "f" else a) for a in arrays]
    expected, result = reference(*given).numpy(), results[f"out_{number}"]
    if expected.dtype.kind == "f":
        assert result.dtype == dtype
        allowed = {np.float16: 1e-3, np.float32: 2e-6}[dtype]  # an fp16 result is rounded once: half of 2**-10
        np.testing.assert_allclose(result.astype(np.float32), expected.astype(dtype), rtol=allowed, atol=allowed)
    else:
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
