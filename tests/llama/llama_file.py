"""A GGUF file in llama.cpp, through the low-level interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np

_TYPES = {"fp32": llama_cpp.GGML_TYPE_F32, "fp16": llama_cpp.GGML_TYPE_F16}
_ATTENTION = {True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}
_lines: list[str] = []


@llama_cpp.llama_log_callback
def _collect(level: int, text: bytes, _: object) -> None:
    _lines.append(text.decode(errors="replace"))


llama_cpp.llama_backend_init()


class LlamaFile:
    """A model and a context of `tokens` tokens."""

    def __init__(self, path: Path, tokens: int, cache: str, flash: bool, batch: int) -> None:
        llama_cpp.llama_log_set(_collect, None)
        _lines.clear()
        how = llama_cpp.llama_model_default_params()
        # Weights as they are in the file: no second copy of them, and no AMX, which some virtual machines announce and
        # do not have.
        how.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), how)
        assert self._model, "".join(_lines[-20:])
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, batch, batch
        params.type_k = params.type_v = _TYPES[cache]
        params.flash_attn_type = _ATTENTION[flash]
        params.n_threads = params.n_threads_batch = 2
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "".join(_lines[-20:])
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.log = "".join(_lines)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def score(self, tokens: Sequence[int], past: int = 0) -> np.ndarray:
        """The logits [n, V] after each of `tokens`, of which the first is at position `past`."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, 0, past, -1)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, past + i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(self._context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(tokens), size)).copy()

    def tokenize(self, text: str, opening: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        found = (ctypes.c_int32 * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), found, room, opening, True)
        assert count >= 0
        return list(found[:count])

    def ends(self) -> set[int]:
        """The tokens that end a text."""
        size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        return {i for i in range(size) if llama_cpp.llama_vocab_is_eog(self._vocab, i)}

    def state(self) -> bytes:
        room = llama_cpp.llama_state_get_size(self._context)
        data = (ctypes.c_uint8 * room)()
        count = llama_cpp.llama_state_get_data(self._context, data, room)
        return bytes(data[:count])

    def restore(self, state: bytes) -> None:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_set_data(self._context, data, len(state)) == len(state), "".join(_lines[-5:])


@contextmanager
def opened(
    path: Path, tokens: int = 256, cache: str = "fp32", flash: bool = False, batch: int = 256
) -> Iterator[LlamaFile]:
    file = LlamaFile(path, tokens, cache, flash, batch)
    try:
        yield file
    finally:
        file.close()
