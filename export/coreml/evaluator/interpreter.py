"""Runs a saved ML program of Core ML in numpy, states included: Core ML itself predicts on Apple's systems only.

A check of what a program says, not a picture of a device. The result of an operation has the type that the program
gives it: an fp16 result is rounded, so that overflow and rounding show. Inside an operation sums are of float32; what
Core ML's compute units do there is not specified.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from coremltools.proto import MIL_pb2, Model_pb2
from google.protobuf.message import DecodeError

from edge_qkv.errors import InputError, one_line
from edge_qkv.export.coreml.evaluator import constants
from edge_qkv.export.coreml.evaluator.operators import ARITHMETIC, COMPRESSED, LISTS, OTHER

_OPSET = "CoreML8"  # of iOS 18
_READ, _WRITE = "read_state", "write_state"
_STATES: dict[str, Callable] = {_READ: lambda input: input, _WRITE: lambda input, data: None}  # only what they take


@dataclass(frozen=True)
class Feature:
    """Shape and type of an input, an output or a state; a size of None is known when the program runs."""

    shape: tuple[int | None, ...]
    dtype: np.dtype

    def accepts(self, value: np.ndarray) -> bool:
        sizes = zip(self.shape, value.shape, strict=False)
        return value.dtype == self.dtype and value.ndim == len(self.shape) and all(a in (None, b) for a, b in sizes)

    def __str__(self) -> str:
        return f"{self.dtype} {['?' if size is None else size for size in self.shape]}"


class State:
    """What a program keeps between calls; zeros at first. As coremltools' `MLState`."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self.features = dict(features)
        self._values = {name: np.zeros(feature.shape, feature.dtype) for name, feature in features.items()}

    def read_state(self, name: str) -> np.ndarray:
        """A copy of a state's value. Raises `RuntimeError` when there is none of that name."""
        self._feature(name)
        return self._values[name].copy()

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Replaces a state's value. Raises `RuntimeError` when it has another shape or type."""
        self._put(name, np.array(value))

    def _put(self, name: str, value: np.ndarray) -> None:
        feature = self._feature(name)
        if not feature.accepts(value):
            raise RuntimeError(f"the state {name} is {feature}, not {value.dtype} {list(value.shape)}")
        self._values[name] = value

    def _feature(self, name: str) -> Feature:
        if name not in self.features:
            raise RuntimeError(f"there is no state {name!r}; there are {', '.join(self.features) or 'none'}")
        return self.features[name]


@dataclass
class _Step:
    """An operation of the program."""

    kind: str
    name: str
    compute: Callable
    arguments: dict[str, str | list[str]]  # names of values, by parameter
    outputs: list[tuple[str, Feature]]
    last: list[str] = field(default_factory=list)  # values that nothing after it needs


class Evaluator:
    """A function of a program, ready to run. From `load`."""

    def __init__(self, inputs: dict, states: dict, outputs: dict, steps: list[_Step], fixed: dict) -> None:
        self.inputs: dict[str, Feature] = inputs
        self.states: dict[str, Feature] = states
        self.outputs: dict[str, Feature] = outputs
        self._steps, self._fixed = steps, fixed

    def make_state(self) -> State:
        return State(self.states)

    def predict(self, inputs: Mapping[str, np.ndarray], state: State | None = None) -> dict[str, np.ndarray]:
        """The outputs; `state` is updated. A state of another function will do if it has the states of this one.

        Raises `RuntimeError` for inputs or states that do not fit, and when an operation is given what is not defined
        for it, such as an index out of range; the states may then be updated in part.
        """
        self._check(inputs, state)
        values = self._fixed | {name: np.array(value) for name, value in inputs.items()}
        with np.errstate(all="ignore"):  # an overflow is infinite, as on a device
            for step in self._steps:
                for (name, feature), value in zip(step.outputs, self._run(step, values, state), strict=True):
                    if not feature.accepts(value):
                        raise RuntimeError(
                            f"{step.kind} {step.name}: {value.dtype} {list(value.shape)} is not {feature}"
                        )
                    values[name] = value
                for name in step.last:
                    del values[name]
        return {name: np.array(constants.expand(values[name])) for name in self.outputs}

    def _check(self, inputs: Mapping[str, np.ndarray], state: State | None) -> None:
        if inputs.keys() != self.inputs.keys():
            raise RuntimeError(f"the inputs are {', '.join(self.inputs)}, not {', '.join(inputs)}")
        for name, feature in self.inputs.items():
            if not feature.accepts(inputs[name]):
                raise RuntimeError(
                    f"the input {name} is {feature}, not {inputs[name].dtype} {list(inputs[name].shape)}"
                )
        for name, feature in self.states.items():
            if state is None or state.features.get(name) != feature:
                raise RuntimeError(f"the state {name} of {feature} is missing")

    def _run(self, step: _Step, values: dict[str, constants.Value], state: State | None) -> list[np.ndarray]:
        arguments = {
            parameter: [values[name] for name in names] if isinstance(names, list) else values[names]
            for parameter, names in step.arguments.items()
        }
        if step.kind == _READ:  # nothing changes an array in place, so no copy is needed
            return [state._values[arguments["input"]]]
        if step.kind == _WRITE:
            state._put(arguments["input"], _prepared(arguments["data"], False))
            return []
        for parameter, value in arguments.items():
            if parameter != COMPRESSED.get(step.kind):
                arguments[parameter] = _prepared(value, step.kind in ARITHMETIC)
        try:
            result = step.compute(**arguments)
        except (ValueError, TypeError, LookupError) as error:
            raise RuntimeError(f"{step.kind} {step.name}: {error}") from error
        except NotImplementedError as error:
            raise InputError(f"{error} ({step.name} of the program) cannot be checked here") from error
        if isinstance(result, list):
            return result
        result, dtype = np.asarray(result), step.outputs[0][1].dtype
        if step.kind in ARITHMETIC and result.dtype == np.float32 and dtype.kind == "f":
            result = constants.rounded(result, dtype)
        return [result]


def _prepared(value: Any, arithmetic: bool) -> Any:
    """A value for an operator: not compressed, and in float32 where it computes."""
    if isinstance(value, list | str):
        return value
    return constants.widened(constants.expand(value)) if arithmetic else constants.expand(value)


# ---- reading ----


def load(package: Path, function: str = "main") -> Evaluator:
    """A function of the ML program in `package` (.mlpackage), ready to run; weights stay mapped and compressed.

    Raises `InputError` for what is no readable ML program, for a function that is not in it, and for an operator that
    is not known here.
    """
    file = _model_file(Path(package))
    program = _read_model(file).mlProgram
    if function not in program.functions:
        raise InputError(f"{file} has no function {function!r}; choose from {', '.join(sorted(program.functions))}")
    body = program.functions[function]
    if body.opset != _OPSET or _OPSET not in body.block_specializations:
        raise InputError(f"{file}: a program of {body.opset or 'no opset'} cannot be checked here, only of {_OPSET}")
    try:
        return _compile(body, constants.Blobs(file.parent))
    except NotImplementedError as error:
        raise InputError(f"{file}: {error} cannot be checked here") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{file} is damaged: {one_line(error)}; export the model again") from error


def _model_file(package: Path) -> Path:
    """Where the program is in a package: its manifest says it."""
    manifest = package / "Manifest.json"
    try:
        content = json.loads(manifest.read_text())
        inside = PurePosixPath(content["itemInfoEntries"][content["rootModelIdentifier"]]["path"])
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError("it names a file outside of the package")
    except OSError as error:
        raise InputError(f"{package} is no package of Core ML: {manifest.name} cannot be read") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{manifest} is damaged; copy the whole package or export it again") from error
    return package / "Data" / inside


def _read_model(file: Path) -> Model_pb2.Model:
    try:
        model = Model_pb2.Model.FromString(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise InputError(f"{file} is damaged; copy the whole package or export it again") from error
    if model.WhichOneof("Type") != "mlProgram":
        raise InputError(f"{file} is no ML program of Core ML")
    return model


def _feature(type_: MIL_pb2.ValueType) -> Feature:
    if type_.WhichOneof("type") != "tensorType" or type_.tensorType.dataType not in constants.KINDS:
        raise NotImplementedError("a value that is no tensor of a type known here")
    sizes = [d.constant.size if d.HasField("constant") else None for d in type_.tensorType.dimensions]
    if 0 in sizes:
        raise NotImplementedError("a tensor without values")
    return Feature(tuple(sizes), constants.KINDS[type_.tensorType.dataType].dtype)


def _compile(body: MIL_pb2.Function, blobs: constants.Blobs) -> Evaluator:
    inputs, states = {}, {}
    for each in body.inputs:
        if each.type.WhichOneof("type") == "stateType":
            states[each.name] = _feature(each.type.stateType.wrappedType)
        else:
            inputs[each.name] = _feature(each.type)
    known = dict(inputs)  # features of all values that are computed
    fixed: dict[str, constants.Value] = {name: name for name in states}
    steps: list[_Step] = []
    block = body.block_specializations[_OPSET]
    for operation in block.operations:
        arguments = {name: _bind(each, fixed, blobs) for name, each in operation.inputs.items()}
        if operation.type == "const":
            fixed[operation.outputs[0].name] = constants.read(operation.attributes["val"], blobs)
        elif operation.type in constants.CONSTEXPR:
            values = {parameter: fixed[names[0]] for parameter, names in arguments.items()}
            fixed[operation.outputs[0].name] = constants.compressed(operation.type, values)
        else:
            step = _step(operation, arguments)
            missing = [
                name for names in arguments.values() for name in names if name not in known and name not in fixed
            ]
            if missing:
                raise ValueError(f"{missing[0]} is used before it is computed")
            known |= dict(step.outputs)
            steps.append(step)
    outputs = {name: known[name] for name in block.outputs}
    _free_early(steps, known.keys() - outputs.keys())
    return Evaluator(inputs, states, outputs, steps, fixed)


def _bind(argument: MIL_pb2.Argument, fixed: dict[str, constants.Value], blobs: constants.Blobs) -> list[str]:
    """Names of the values of an argument; constants that it holds itself get one."""
    names = []
    for binding in argument.arguments:
        if binding.WhichOneof("binding") == "value":
            names.append(f"{len(fixed)} of the constants without a name")
            fixed[names[-1]] = constants.read(binding.value, blobs)
        else:
            names.append(binding.name)
    return names


def _step(operation: MIL_pb2.Operation, arguments: dict[str, list[str]]) -> _Step:
    kind = operation.type
    compute = (ARITHMETIC | OTHER | _STATES).get(kind)
    if compute is None or operation.blocks:
        raise NotImplementedError(f"the operator {kind}")
    signature = inspect.signature(compute)
    unknown = arguments.keys() - signature.parameters.keys()
    if unknown:
        raise NotImplementedError(f"the operator {kind} with {', '.join(sorted(unknown))}")
    signature.bind(**arguments)
    name = operation.outputs[0].name if operation.outputs else kind
    bound = {p: names if p == LISTS.get(kind) else names[0] for p, names in arguments.items()}
    return _Step(kind, name, compute, bound, [(each.name, _feature(each.type)) for each in operation.outputs])


def _free_early(steps: list[_Step], values: set[str]) -> None:
    """Notes with each step which of `values` are used there for the last time."""
    waiting = set(values)
    for step in reversed(steps):
        used = {name for names in step.arguments.values() for name in ([names] if isinstance(names, str) else names)}
        step.last = sorted(waiting & (used | {name for name, _ in step.outputs}))
        waiting -= set(step.last)
