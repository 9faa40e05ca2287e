"""The attention operator alone beside ONNX Runtime's own for such models, GroupQueryAttention.

    edge-qkv bench attention --depths 8192 32768

One token attends over a cache of the given depth, both operators in one process, through ONNX Runtime. They take
turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from edge_qkv import _native
from edge_qkv.attention import CACHE_DTYPE
from edge_qkv.bench.common import add_measuring, command_line, run, say
from edge_qkv.checks import thread_count, whole
from edge_qkv.errors import EdgeQKVError, InputError
from edge_qkv.tables import table

DEPTHS = 1024, 8192, 32768
HEADS, HEAD_DIM, LAYERS = 32, 64, 4  # layers: caches that take turns, as in a model, so that none stays in a core's own
FIRST = "GroupQueryAttention, fp32"

SUMMARY = "Compare the attention operator with ONNX Runtime's GroupQueryAttention: one token over one kv head."
NOTES = f"""\
Milliseconds a layer, the median of the rounds and the least; "x": how many times faster than {FIRST},
the median of the rounds' ratios. GroupQueryAttention keeps keys and values apart, ours keeps one row for both. Before
anything is timed, each output is compared with attention in float64 over the rows as that cache holds them.
"""


@dataclass
class Contestant:
    """An operator with a type of cache."""

    name: str
    bind: Callable[[np.ndarray, np.ndarray, int], Bound]  # (query [1, 1, H*D], rows [N, D], threads)
    tolerance: float  # of an output, relative to the largest


@dataclass
class Bound:
    """Its graph with everything in place for one depth."""

    run: Callable[[], None]
    output: Callable[[], np.ndarray]  # [H*D], of the first layer
    rows: np.ndarray  # [N, D], as the cache holds them
    seconds: list[float] = field(default_factory=list)


def _session(nodes: list, inputs: dict[str, np.ndarray], in_place: dict[str, str], element: int, threads: int):
    """Binds `inputs` by name, and of the outputs those of `in_place` to the buffers of their inputs."""
    import onnx
    import onnxruntime

    helper = onnx.helper
    outputs = [f"attention.{i}" for i in range(LAYERS)]
    of = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, of[name], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, element, [1, 1, HEADS * HEAD_DIM]) for name in outputs]
        + [helper.make_tensor_value_info(out, of[into], inputs[into].shape) for out, into in in_place.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("edge_qkv", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # one's idle threads beside another's work
    options.log_severity_level = 3
    options.register_custom_ops_library(str(_native.library_path()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    for name, into in in_place.items():
        binding.bind_ortvalue_output(name, values[into])
    return (lambda: session.run_with_iobinding(binding)), (lambda: binding.get_outputs()[0].numpy().ravel())


def _ours(cache: str) -> Callable[[np.ndarray, np.ndarray, int], Bound]:
    def bind(query: np.ndarray, rows: np.ndarray, threads: int) -> Bound:
        import onnx
        import torch

        from edge_qkv.attention import quantize_rows

        depth, codes = len(rows) - 1, CACHE_DTYPE[cache] == torch.int8
        stored = [rows.astype(np.float16) if not codes else None]
        if codes:
            stored = [part.numpy() for part in quantize_rows(torch.from_numpy(rows))]
        held = stored[0].astype(np.float32) * (stored[1].astype(np.float32)[:, None] if codes else 1)
        inputs = {"query": query, "kv": rows[None, -1:], "past": np.array(depth, np.int64)}
        nodes, in_place = [], {}
        for i in range(LAYERS):
            for kind, array in zip(("cache", "cache_scale"), stored, strict=False):
                inputs[f"{kind}.{i}"] = array[None, None].copy()
                in_place[f"{kind}_out.{i}"] = f"{kind}.{i}"
            names = ["query", "kv", f"cache.{i}", "past"] + (["", "", "", "", f"cache_scale.{i}"] if codes else [])
            outputs = [f"attention.{i}", f"cache_out.{i}"] + (["", f"cache_scale_out.{i}"] if codes else [])
            attributes = {"num_heads": HEADS, "kv_heads": 1, "scale": HEAD_DIM**-0.5, "rotary": "none"}
            attributes |= {"rotary_dim": 0, "window": 0, "sinks": 0}
            nodes.append(onnx.helper.make_node("UnifiedKVAttention", names, outputs, domain="edge_qkv", **attributes))
        return Bound(*_session(nodes, inputs, in_place, onnx.TensorProto.FLOAT, threads), held)

    return bind


def _group_query(dtype: type) -> Callable[[np.ndarray, np.ndarray, int], Bound]:
    def bind(query: np.ndarray, rows: np.ndarray, threads: int) -> Bound:
        import onnx

        held = rows.astype(dtype)
        inputs = {"query": query.astype(dtype), "kv": held[None, -1:]}
        inputs |= {"last": np.array([len(rows) - 1], np.int32), "length": np.array(len(rows), np.int32)}
        nodes, in_place = [], {}
        for i in range(LAYERS):
            for kind in ("key", "value"):
                inputs[f"past_{kind}.{i}"] = held[None, None].copy()
                in_place[f"present_{kind}.{i}"] = f"past_{kind}.{i}"
            names = ["query", "kv", "kv", f"past_key.{i}", f"past_value.{i}", "last", "length"]
            outputs = [f"attention.{i}", f"present_key.{i}", f"present_value.{i}"]
            attributes = {"num_heads": HEADS, "kv_num_heads": 1}
            nodes.append(
                onnx.helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes)
            )
        element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return Bound(*_session(nodes, inputs, in_place, element, threads), held.astype(np.float32))

    return bind


CONTESTANTS = (
    Contestant(FIRST, _group_query(np.float32), 1e-4),
    Contestant("GroupQueryAttention, fp16", _group_query(np.float16), 1e-2),
    Contestant("UnifiedKVAttention, fp16", _ours("fp16"), 1e-4),
    Contestant("UnifiedKVAttention, int8", _ours("int8"), 1e-3),
)


def reference(query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Attention [H*D] of one token's heads over all rows [N, D], in float64."""
    rows, heads = rows.astype(np.float64), query.reshape(HEADS, HEAD_DIM).astype(np.float64)
    scores = heads @ rows.T * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ rows / weights.sum(-1, keepdims=True)).ravel()


def measure(depth: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds a layer of each contestant in each round; an error where an output is wrong."""
    generator = np.random.default_rng(depth)
    query = generator.normal(scale=2, size=(1, 1, HEADS * HEAD_DIM)).astype(np.float32)
    rows = generator.normal(size=(depth + 1, HEAD_DIM)).astype(np.float32)
    bound = {}
    for contestant in CONTESTANTS:
        bound[contestant.name] = one = contestant.bind(query, rows, threads)
        one.run()  # warm as well
        want = reference(query, one.rows)
        off = np.abs(one.output() - want).max() / np.abs(want).max()
        if not off <= contestant.tolerance:
            raise EdgeQKVError(f"{contestant.name} at depth {depth} is off by {off:.2g} of its largest output value")
    for turn in range(rounds):
        for one in list(bound.values())[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            one.run()
            one.seconds.append((time.perf_counter() - began) / LAYERS)
    return {name: [seconds * 1e3 for seconds in one.seconds] for name, one in bound.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("attention", SUMMARY, NOTES)
    add_measuring(parser, 15, "rounds a depth")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=list(DEPTHS), help="rows in the cache; default: %(default)s"
    )
    return run(parser, _report, argv)


def _report(arguments: argparse.Namespace) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed; install it with `pip install {error.name}`") from None
    depths = [whole(depth, "--depths", 0, 1 << 20) for depth in arguments.depths]
    threads = thread_count(arguments.threads) or os.cpu_count()
    results = []
    for depth in depths:
        say(f"depth {depth:,}")
        for name, ms in measure(depth, max(1, arguments.repeats), threads).items():
            results.append({"depth": depth, "operator": name, "ms": ms})
    if arguments.json:
        print(json.dumps({"threads": threads, "results": results}, indent=2))
        return
    first = {one["depth"]: one["ms"] for one in results if one["operator"] == FIRST}
    cells = []
    for one in results:
        ms, peer = one["ms"], first[one["depth"]]
        times = median(theirs / ours for theirs, ours in zip(peer, ms, strict=True))
        cells.append((one["operator"], f"{one['depth']:,}", f"{median(ms):.3f}", f"{min(ms):.3f}", f"{times:.1f}"))
    print(table(cells, ("operator and cache", "depth", "median ms", "least ms", "x")))
    print(f"\n{HEADS} heads of {HEAD_DIM}, one kv head; threads: {threads}, rounds: {len(ms)}\n\n{NOTES}", end="")


if __name__ == "__main__":
    sys.exit(main())
