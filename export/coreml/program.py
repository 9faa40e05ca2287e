"""The decoder lowered to a Core ML program: functions that share weights, a state for each cached tensor.

Core ML has no operators of ours: attention is written in its own, and what matters is that nothing copies a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Program
from torch import Tensor, nn

from edge_qkv import files
from edge_qkv.description import DESCRIPTION, FINGERPRINT
from edge_qkv.engines.coreml import state_name, states
from edge_qkv.export.progress import Progress, quiet
from edge_qkv.layer import LayerSpec
from edge_qkv.model import Decoder

FUNCTIONS = ("decode", "prefill", "score")  # the first is the default
# Added to the scores of rows that a query does not see. Not the least fp16: with a negative score that would be minus
# infinity, of which a device may make NaN. exp() of it is 0 all the same.
_HIDDEN = -3e4
# Token ids and positions are never negative, so the program need not ask whether they are, nor make int16 of them.
_LEFT_OUT = {"common::guard_negative_gather_indices", "common::add_int16_cast"}


@dataclass(frozen=True)
class _Call:
    """What layers of a call share, made once."""

    tokens: int  # T; sizes are numbers here, where those of a tensor would become operators of the program
    hidden: dict[tuple[int, int], Tensor]  # window, sinks -> [T, C]: what is added to the scores
    here: dict[tuple[float, ...], tuple[Tensor, Tensor]]  # frequencies -> cos and sin of the new tokens, [T, R/2]


def _call(decoder: Decoder, tokens: int, past: Tensor) -> _Call:
    positions = past + torch.arange(tokens, dtype=torch.int32)  # [T]
    row, query = torch.arange(decoder.config.max_positions, dtype=torch.int32)[None], positions[:, None]
    later, hidden, here = row > query, {}, {}
    for spec in decoder.config.kinds.values():
        if (spec.window, spec.sinks) not in hidden:
            hidden[spec.window, spec.sinks] = _hidden(spec, later, row, query)
        if spec.rotary and spec.frequencies not in here:
            here[spec.frequencies] = tuple(table.index_select(0, positions) for table in decoder.tables_of(spec))
    return _Call(tokens, hidden, here)


def _hidden(spec: LayerSpec, later: Tensor, row: Tensor, query: Tensor) -> Tensor:
    """[T, C]: `_HIDDEN` for the rows that a query does not see. later [T, C], row [1, C], query [T, 1]."""
    hidden = later
    if spec.window:
        passed = row <= query - spec.window
        if spec.sinks:
            passed = torch.logical_and(passed, row >= spec.sinks)
        hidden = torch.logical_or(hidden, passed)
    return hidden.float() * _HIDDEN


def _rotate(spec: LayerSpec, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`edge_qkv.attention.rotate` of x [..., D or V] without parts of no values, which coremltools cannot split off."""
    start, half, size = spec.rotary_offset, spec.rotated // 2, x.shape[-1]
    middle, end = start + half, start + 2 * half
    a, b = x[..., start:middle], x[..., middle:end]
    before = [x[..., :start]] if start else []
    rest = [x[..., end:]] if int(size) > end else []
    return torch.cat([*before, a * cos - b * sin, b * cos + a * sin, *rest], dim=-1)


def attend(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    caches: tuple[Any, ...],
    past: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:
    """`edge_qkv.attention.attend` over all rows of the states, those not written yet hidden.

    caches: the `_Call`, and one state (unified) or two, [1, G, C, D] and [1, G, C, V] fp16. All queries of a kv head
    are the rows of one matrix, so both products read the state as it is, for all heads at once.
    """
    call, *states = caches
    heads, groups, dim = spec.heads, spec.kv_heads, spec.head_dim
    tokens, capacity = call.tokens, states[0].shape[2]
    here = call.here.get(spec.frequencies) if spec.rotary else None

    q = query if spec.scale == 1.0 else query * spec.scale
    q = q.view(1, tokens, heads, dim).transpose(1, 2)  # [1, H, T, D]
    new = [x.view(1, tokens, groups, -1).transpose(1, 2) for x in (key, value) if x is not None]  # [1, G, T, D or V]
    if spec.rotary:
        q = _rotate(spec, q, *here)
        if new and spec.positions == "rotary-conjugate":
            new[0] = _rotate(spec, new[0], *here)
    for rows, state in zip(new, states, strict=bool(new)):  # none of a layer that reads an earlier one's
        # Not saturated, unlike other engines' rows: all of the program is fp16, so what overflows did so before.
        state[:, :, past : past + tokens] = rows.to(state.dtype)
    rows = [state.float() for state in states]  # [1, G, C, D or V]; no operator in the program, which is all fp16
    keys, values = rows[0], rows[-1]
    if spec.positions == "rotary-on-read":
        keys = _rotate(spec, keys if key_weight is None else keys * key_weight, *tables)
    elif key_weight is not None:
        q = q * key_weight  # the same products, and the rows stay as they are

    q = q.reshape(1, groups, heads // groups * tokens, dim)
    scores = (q @ keys.transpose(2, 3)).view(1, heads, tokens, capacity) + call.hidden[spec.window, spec.sinks]
    weights = scores.softmax(-1).view(1, groups, heads // groups * tokens, capacity)
    out = (weights @ values).view(1, heads, tokens, values.shape[-1])
    # Of a row that is longer than its value: to take that of the product costs less than a copy of part of the state.
    out = out[..., : spec.values] if spec.values < values.shape[-1] else out
    if spec.output_rotated:
        out = _rotate(spec, out, here[0], -here[1])
    return out.transpose(1, 2).reshape(1, tokens, heads * spec.values), caches


class Function(nn.Module):
    """The decoder for T tokens at once, with its caches as buffers, named kv_0, key_1, value_1, ...

    One buffer a cached tensor, not one for all: where Core ML does not update in place what it reads, writes and reads
    again, a token costs a copy of one layer's rows at a time, and never memory for a second cache.
    """

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        super().__init__()
        self.decoder, self.tokens = decoder, tokens
        self.states = states(decoder.config)
        for name, shape in self.states.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float16), persistent=False)

    def forward(self, input_ids: Tensor, past: Tensor, logit_row: Tensor | None = None) -> Tensor:
        """input_ids [1, T], past [1], logit_row [1] -> logits [1, 1, V], or [1, T, V] without a row"""
        call = _call(self.decoder, self.tokens, past)
        caches: list[tuple] = [(call,) for _ in self.decoder.config.layers]
        for tensor in self.decoder.config.cache_tensors("fp16"):
            caches[tensor.layer] += (getattr(self, state_name(tensor)),)
        return self.decoder(input_ids, past, caches, logit_row)[0]


def lower(decoder: Decoder, chunk: int, text: str, package: Path, progress: Progress) -> None:
    """Writes a decoder that has `attend` as its operator to the directory `package`.

    chunk: T of the functions but decode's. text: by which the file describes itself, see `edge_qkv.description`.
    """
    program = Program()
    for name in FUNCTIONS:
        progress(f"Lowering to Core ML: {name}", 0, 0)
        function = Function(decoder, 1 if name == "decode" else chunk)
        program.add_function(name, _converted(function, with_row=name == "prefill").functions["main"])
    progress("Writing the program", 0, 0)
    program.default_function_name = FUNCTIONS[0]
    program.export_as_multifunction = True
    with _unheard(), _temporary_files_in(package.parent):
        _share_constants(program)
        ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            package_dir=str(package),
            skip_model_load=True,
        )
    description = package / "Data/com.apple.CoreML/model.mlmodel"
    spec = ct.proto.Model_pb2.Model.FromString(description.read_bytes())
    check(spec, list(function.states))
    metadata = spec.description.metadata.userDefined
    metadata[DESCRIPTION] = text
    metadata[FINGERPRINT] = _fingerprint(spec, package)
    description.write_bytes(spec.SerializeToString(deterministic=True))
    description.chmod(0o644)  # coremltools makes it for its owner alone


def _fingerprint(spec: Any, package: Path) -> str:
    """SHA-256 over the program with its small constants, and over the file with the large ones."""
    large = "".join(files.sha256(file) for file in sorted(package.rglob("*.bin")))
    return hashlib.sha256(spec.SerializeToString(deterministic=True) + large.encode()).hexdigest()


def _converted(function: Function, with_row: bool) -> Program:
    shapes = {"input_ids": (1, function.tokens), "past": (1,)} | ({"logit_row": (1,)} if with_row else {})
    inputs = [ct.TensorType(name, shape, np.int32) for name, shape in shapes.items()]
    example = tuple(torch.zeros(shape, dtype=torch.int32) for shape in shapes.values())
    held = {name: ct.TensorType(shape=shape, dtype=np.float16) for name, shape in function.states.items()}
    pipeline = ct.PassPipeline()
    pipeline.remove_passes(_LEFT_OUT)
    with _unheard(), torch.no_grad():
        traced = torch.jit.trace(function.eval(), example, check_trace=False)
        return ct.convert(
            traced,
            convert_to="milinternal",
            inputs=inputs,
            # An fp16 output whose last size is no multiple of 32 has come back as garbage (coremltools issue 1893).
            outputs=[ct.TensorType("logits", dtype=np.float32)],
            states=[ct.StateType(state, name) for name, state in held.items()],
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=pipeline,
        )


def _share_constants(program: Program) -> None:
    """Constants with the same weight_id are stored once.

    coremltools.utils.save_multifunction, which does that for packages, would write one for each function first, and
    compares constants in float64.
    """
    for function in program.functions.values():
        for call in function.operations:
            if call.op_type == "const" and isinstance(call.outputs[0].val, np.ndarray):
                constant = call.outputs[0]
                digest = hashlib.blake2b(np.ascontiguousarray(constant.val), digest_size=20).hexdigest()
                call.weight_id = f"{constant.dtype.__type_info__()} {constant.shape} {digest}"


def check(spec: Any, states: list[str]) -> None:
    """No function of a program copies a state: each is read, has rows put in, is written and is read for the products.

    Raises `RuntimeError`: what is lowered here is ours, so a copy is no user's mistake.
    """
    for name, function in spec.mlProgram.functions.items():
        (block,) = function.block_specializations.values()
        users: dict[str, list[tuple[str, list[str]]]] = {}  # value -> (operator that takes it, what that makes)
        for call in block.operations:
            for argument in call.inputs.values():
                for bound in argument.arguments:
                    users.setdefault(bound.name, []).append((call.type, [output.name for output in call.outputs]))
        declared = [given.name for given in function.inputs if given.type.HasField("stateType")]
        if sorted(declared) != sorted(states):
            raise RuntimeError(f"{name} has the states {sorted(declared)} instead of {sorted(states)}")
        for state in states:
            wrong = _copies(state, users)
            if wrong:
                raise RuntimeError(f"{name} does not update the state {state} in place: {wrong}")


def _copies(state: str, users: Mapping[str, list[tuple[str, list[str]]]]) -> str:
    """What is wrong with how a function uses a state; empty: nothing."""
    kinds = [kind for kind, _ in users.get(state, [])]
    if kinds != ["read_state", "write_state", "read_state"]:
        return f"it is used by {kinds}"
    (before,), (after,) = (outputs for kind, outputs in users[state] if kind == "read_state")
    if [kind for kind, _ in users.get(before, [])] != ["slice_update"]:
        return f"what was read before is used by {[kind for kind, _ in users.get(before, [])]}"
    (updated,) = users[before][0][1]
    if [kind for kind, _ in users.get(updated, [])] != ["write_state"]:
        return f"what was updated is used by {[kind for kind, _ in users.get(updated, [])]}"
    # Products read the rows as they are; parts of them are taken, or weighted, only where keys are rotated as they are
    # read.
    if wrong := {kind for kind, _ in users.get(after, [])} - {"matmul", "slice_by_index", "mul"}:
        return f"what was written is used by {sorted(wrong)}"
    return ""


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """`quiet`, and without coremltools' bars on standard error."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """coremltools collects weights in the system's directory for temporary files, which may be small, and leaves them
    there when it is interrupted."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as tempfile.tempdir:
        try:
            yield
        finally:
            tempfile.tempdir = before
