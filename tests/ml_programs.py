"""ML programs of Core ML as tests write them: built with coremltools, saved as packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

_TYPES = {np.dtype(np.float16): types.fp16, np.dtype(np.float32): types.fp32, np.dtype(np.int32): types.int32}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def convert(build: Callable, inputs: dict[str, np.ndarray], states: dict[str, tuple] | None = None):
    """A model of `build(**inputs, **states)`, exactly as it is written: no pass of coremltools changes it."""
    given = {name: mb.placeholder(x.shape, _TYPES[x.dtype]) for name, x in inputs.items()}
    given |= {name: mb.state_tensor_placeholder(shape, types.fp16) for name, shape in (states or {}).items()}
    with Function(given, opset_version=ct.target.iOS18) as function:
        outputs = build(**function.inputs)
        function.set_outputs(list(outputs) if isinstance(outputs, tuple) else [outputs])
    program = Program()
    program.add_function("main", function)
    return ct.convert(
        program,
        source="milinternal",
        minimum_deployment_target=ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )


def save(model: ct.models.MLModel, path: Path) -> Path:
    model.save(str(path))
    return path
