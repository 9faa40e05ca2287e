"""Runs an exported ONNX package in a plain ONNX Runtime, by the operator's model-local function.

For checks: each call copies every cache, where the native runtime updates them in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_qkv.errors import ContextFull
from edge_qkv.package import Package

_DTYPE = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


class StockSession:
    """One conversation of `context` tokens.

    The caches are the caller's to look at: `caches[name]` [1, G, C, D], and the scales of int8 ones [1, G, C].
    """

    def __init__(self, package: str | Path, context: int, *, threads: int = 0, providers: Sequence[str] | None = None):
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as the native runtime does
        import onnxruntime

        self.package = Package.open(package, verify=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors: it warns of every unused output of a fused node
        model = str(self.package.path / "model.onnx")
        self.engine = onnxruntime.InferenceSession(
            model, options, providers=list(providers or ["CPUExecutionProvider"])
        )
        self.context, self.past = context, 0
        self.caches = {}
        for i in self.engine.get_inputs()[3:]:
            shape, dtype = [context if size == "C" else size for size in i.shape], _DTYPE[i.type]
            # NaN where nothing was written (for int8, in the scales): a graph that reads such a row shows it.
            self.caches[i.name] = np.full(shape, 1 if dtype == np.int8 else np.nan, dtype)

    def evaluate(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Appends tokens; returns the logits [R, V] after those at `rows`, positions in `tokens` (default: all)."""
        if self.past + len(tokens) > self.context:
            raise ContextFull(f"{self.past} + {len(tokens)} tokens do not fit a context of {self.context}")
        feeds = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "past": np.asarray(self.past, np.int64),
            "logit_rows": np.arange(len(tokens)) if rows is None else np.asarray(rows, np.int64),
        }
        logits, *updated = self.engine.run(None, feeds | self.caches)
        self.caches = dict(zip(self.caches, updated, strict=True))
        self.past += len(tokens)
        return logits[0]

    def rewind(self, past: int) -> None:
        """Forgets all tokens but the first `past`."""
        self.past = past

    def score(self, tokens: Sequence[int], chunk: int = 64, decode: int = 8) -> np.ndarray:
        """The logits after each token [n, V]: prefill in chunks, the last `decode` tokens one by one."""
        cuts = [*range(0, max(0, len(tokens) - decode), chunk), *range(max(0, len(tokens) - decode), len(tokens))]
        parts = [self.evaluate(tokens[a:b]) for a, b in zip(cuts, [*cuts[1:], len(tokens)], strict=True)]
        return np.concatenate(parts)
