"""Engines as `edge-qkv bench peers` compares them, each behind the same few calls.

All hold one conversation whose cache is filled with noise up to a depth. Each is set up as its own documentation does:
llama.cpp packs the weights for the processor, chooses its kind of attention and takes prompts 512 tokens at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge_qkv import Model, Package, Session
from edge_qkv.engines.llama_state import Layout
from edge_qkv.errors import EdgeQKVError, InputError

_CHUNK = 512  # tokens of a prompt that ONNX Runtime by itself takes at a time, as llama.cpp does


class Peer(Protocol):
    """An engine with one conversation."""

    def fill(self, depth: int) -> None:
        """Makes the cache one of noise for `depth` tokens."""

    def rewind(self, depth: int) -> None:
        """Forgets all but the first `depth` tokens."""

    def evaluate(self, tokens: Sequence[int]) -> np.ndarray:
        """Appends tokens; the logits [V] after the last."""

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Appends tokens; the logits [n, V] after each."""


def open_peer(kind: str, path: Path, threads: int, context: int) -> Peer:
    """One of PEERS on a package, with room for `context` tokens."""
    return PEERS[kind](Package.open(path, verify=False), threads, context)


class Ours:
    """A package in this project's runtime, with its defaults."""

    def __init__(self, package: Package, threads: int, context: int) -> None:
        self._session = Session(Model(package.path, threads, verify=False, packed=False), context=context)
        self.score = self._session.score

    def fill(self, depth: int) -> None:
        self.rewind(min(depth, len(self._session.tokens)))
        self._session.fill(depth)

    def rewind(self, depth: int) -> None:
        self._session.rewind(depth)

    def evaluate(self, tokens: Sequence[int]) -> np.ndarray:
        self._session.evaluate(tokens)
        return self._session.logits()


class Llama:
    """llama.cpp on the package's file, with its own defaults; or without flash attention, which it chooses itself."""

    def __init__(self, package: Package, threads: int, context: int, flash: bool = True) -> None:
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        import llama_cpp as llama

        self._llama, config = llama, package.config
        self._silent = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silent, None)
        llama.llama_backend_init()
        how = llama.llama_model_default_params()
        how.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(os.fsencode(package.path / "model.gguf"), how)
        if not self._model:
            raise InputError(f"{package.path}: llama.cpp cannot open it; export the package again")
        how = llama.llama_context_default_params()
        how.n_ctx, how.n_threads, how.n_threads_batch = context, threads, threads
        how.offload_kqv = how.op_offload = False
        if not flash:
            how.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama.llama_init_from_model(self._model, how)
        if not self._context:
            raise EdgeQKVError(f"{package.path}: llama.cpp cannot open a session of {context} tokens")
        self._vocabulary = config.vocab_size
        width, fp16 = config.only.kv_heads * config.only.head_dim, np.dtype(np.float16)
        # Values are transposed without flash attention, which llama.cpp also leaves out where it finds it has none.
        orders = (False, True) if flash else (True,)
        parts = ("keys", "values")
        self._layouts = [Layout(len(config.layers), width, fp16, parts, transposed) for transposed in orders]
        self._past = 0

    def fill(self, depth: int) -> None:
        self.rewind(0)
        if depth and not any(self._set(depth, layout) for layout in self._layouts):
            raise EdgeQKVError("this version of llama.cpp does not take a cache from outside; install 0.3.36")
        self._past = depth

    def _set(self, depth: int, layout: Layout) -> bool:
        """Whether it took noise as its cache."""
        generator = np.random.default_rng(0)
        # The same in all layers: it does not matter what is multiplied, and a large model's noise takes minutes.
        noise = generator.standard_normal((1, depth, layout.width), np.float32).astype(layout.dtype)
        state = layout.join(dict.fromkeys(layout.parts, np.repeat(noise, layout.layers, axis=0)))
        pointer = state.ctypes.data_as(self._llama.llama_state_seq_set_data.argtypes[1])
        return self._llama.llama_state_seq_set_data(self._context, pointer, len(state), 0) == len(state)

    def rewind(self, depth: int) -> None:
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), 0, depth, -1)
        self._past = depth

    def evaluate(self, tokens: Sequence[int]) -> np.ndarray:
        return self._decode(tokens, False)[-1]

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        return self._decode(tokens, True)

    def _decode(self, tokens: Sequence[int], every: bool) -> np.ndarray:
        llama, size = self._llama, self._llama.llama_n_batch(self._context)
        for start in range(0, len(tokens), size):
            ids = np.array(tokens[start : start + size], np.int32)
            positions = np.arange(self._past, self._past + len(ids), dtype=np.int32)
            wanted = np.full(len(ids), every, np.int8)
            wanted[-1] = True
            batch = llama.llama_batch(n_tokens=len(ids))
            for name, values in (("token", ids), ("pos", positions), ("logits", wanted)):
                setattr(batch, name, values.ctypes.data_as(type(getattr(batch, name))))
            if status := llama.llama_decode(self._context, batch):
                raise EdgeQKVError(f"llama.cpp could not evaluate {len(ids)} tokens (it returned {status})")
            self._past += len(ids)
        logits = llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(ids) if every else 1, self._vocabulary)).copy()


class _OnnxRuntime:
    """The package's graph in ONNX Runtime without this project's library, the caches bound in place."""

    def __init__(self, package: Package, threads: int, context: int) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        self._ort, self._context, self._past = onnxruntime, context, 0
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # Weights stay where they are: the graph comes as bytes, and may be another than the package's.
        where = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(where, str(package.path.resolve()))
        graph = self._graph(package)
        self._engine = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._caches = {}
        for i in self._engine.get_inputs():
            if "." in i.name:
                shape = [context if size == "C" else size for size in i.shape]
                dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[i.type]
                self._caches[i.name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    def _graph(self, package: Package) -> bytes:
        raise NotImplementedError

    def _lengths(self, count: int) -> dict[str, np.ndarray]:
        """What tells the graph how long the sequence is."""
        return {"past": np.array(self._past, np.int64)}

    def _outputs(self, binding: Any) -> None:
        """Binds the outputs of the caches."""
        for name, value in self._caches.items():
            binding.bind_ortvalue_output(name.replace(".", "_out."), value)

    def _updated(self, outputs: Sequence[Any]) -> None:
        """Takes the caches from the outputs, where they are not in place."""

    def fill(self, depth: int) -> None:
        generator = np.random.default_rng(0)
        for name, value in self._caches.items():
            rows = value.numpy()  # [1, G, C, D], a copy
            rows[:, :, :depth] = generator.standard_normal(rows[:, :, :depth].shape, np.float32)
            self._caches[name].update_inplace(rows)
        self._past = depth

    def rewind(self, depth: int) -> None:
        self._past = depth

    def evaluate(self, tokens: Sequence[int]) -> np.ndarray:
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            logits = self._run(part, np.array([len(part) - 1]))
        return logits[0]

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        return self._run(tokens, np.arange(len(tokens)))

    def _run(self, tokens: Sequence[int], rows: np.ndarray) -> np.ndarray:
        binding = self._engine.io_binding()
        inputs = {"input_ids": np.array([tokens], np.int64), "logit_rows": rows} | self._lengths(len(tokens))
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, value in self._caches.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        self._outputs(binding)
        self._engine.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        self._updated(outputs[1:])
        self._past += len(tokens)
        return outputs[0].numpy()[0]


class Fallback(_OnnxRuntime):
    """The function of the operator that the package holds; what it returns are new caches."""

    def _graph(self, package: Package) -> bytes:
        return (package.path / "model.onnx").read_bytes()

    def _outputs(self, binding: Any) -> None:
        for name in self._caches:
            binding.bind_output(name.replace(".", "_out."))

    def _updated(self, outputs: Sequence[Any]) -> None:
        self._caches = dict(zip(self._caches, outputs, strict=True))


class GroupQuery(_OnnxRuntime):
    """The same graph with ONNX Runtime's own operator in place of ours, and keys and values apart, in float32."""

    def _graph(self, package: Package) -> bytes:
        import onnx

        spec = package.config.only
        if not spec.unified or spec.rotary or spec.window or spec.key_weight or spec.values != spec.head_dim:
            raise InputError("takes unified rows without rotary positions or a window only")
        model = onnx.load(package.path / "model.onnx", load_external_data=False)
        helper, graph = onnx.helper, model.graph
        del model.functions[:]
        for values in (graph.input, graph.output):
            for value in [value for value in values if "." in value.name]:
                values.remove(value)
        shape = [1, spec.kv_heads, "C", spec.head_dim]
        float32, int32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
        graph.input.append(helper.make_tensor_value_info("last", int32, [1]))
        graph.input.append(helper.make_tensor_value_info("length", int32, []))
        for node in [node for node in graph.node if node.op_type == "UnifiedKVAttention"]:
            scale = next(a.f for a in node.attribute if a.name == "scale")
            layer = node.input[2].split(".")[1]
            query, row, out = node.input[0], node.input[1], node.output[0]
            caches, updated = ([f"{kind}{end}.{layer}" for kind in ("key", "value")] for end in ("", "_out"))
            replaced = helper.make_node(
                "GroupQueryAttention",
                [query, row, row, *caches, "last", "length"],
                [out, *updated],
                domain="com.microsoft",
                num_heads=spec.heads,
                kv_num_heads=spec.kv_heads,
                scale=scale,
            )
            node.CopyFrom(replaced)
            graph.input.extend(helper.make_tensor_value_info(name, float32, shape) for name in caches)
            graph.output.extend(helper.make_tensor_value_info(name, float32, shape) for name in updated)
        return model.SerializeToString()

    def _lengths(self, count: int) -> dict[str, np.ndarray]:
        total = self._past + count
        lengths = {"last": np.array([total - 1], np.int32), "length": np.array(total, np.int32)}
        return super()._lengths(count) | lengths


PEERS: dict[str, Callable[[Package, int, int], Peer]] = {
    "ours": Ours,
    "llama.cpp": Llama,
    "llama.cpp, no flash attention": partial(Llama, flash=False),
    "function": Fallback,
    "GroupQueryAttention": GroupQuery,
}
