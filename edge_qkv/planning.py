"""How much memory a model and one session of it will take: computed before anything is loaded.

The arithmetic is the native library's (`runtime/core/plan.cpp`); its inputs are a package's own description, or, for
a model that is not exported yet, what an export would write (`edge_qkv/estimate.py`).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_qkv import _native
from edge_qkv.checks import chunk_size, thread_count, whole
from edge_qkv.config import CACHE_BYTES, ModelConfig
from edge_qkv.errors import InputError, OverBudget
from edge_qkv.estimate import Estimate, estimate
from edge_qkv.package import MANIFEST, Package
from edge_qkv.packing import is_packed
from edge_qkv.presets import PRESETS, preset
from edge_qkv.sizes import parse_size
from edge_qkv.targets import cache_bytes_per_token, named


@dataclass(frozen=True)
class Plan:
    """Bytes beyond what the process has without the runtime, at full context.

    `total` is `expected` and `margin`, by which measurements differ from it: the least budget for this context.
    `anonymous` is the part of it that no memory pressure gives back; pages of files can be dropped and read again.
    """

    context: int  # tokens
    prefill_chunk: int  # tokens
    threads: int
    cache_type: str
    weights_file: int
    weights_anonymous: int
    cache: int
    workspace: int
    engine_file: int
    engine_anonymous: int
    expected: int
    margin: int
    total: int
    anonymous: int
    weight_bytes: int  # of the model's files on disk
    matrix_bytes: int  # of these, what each token is multiplied by
    packed: bool  # whether the weights are planned as packed for the processor
    memory: int | None = None  # the budget, when there is one
    unknown: str = ""  # what of the engine's memory is not in any of these

    @property
    def left(self) -> int | None:
        """What the budget has beyond the plan."""
        return None if self.memory is None else self.memory - self.total


def plan(
    model: str | Path | Package | ModelConfig,
    *,
    memory: int | str | None = None,
    context: int | str | None = None,
    cache: str | None = None,
    weights: str = "int4",
    block_size: int | None = None,
    target: str = "onnx",
    prefill_chunk: int = 0,
    threads: int = 0,
    packed: bool | None = None,
    margin: int = 0,
) -> Plan:
    """The plan of a package, or of a model that is not exported yet: its config or a config.json, a checkpoint,
    "random:1.2B/Q-MQA", or a published size such as "1.2B/Q-MQA".

    memory: the budget, in bytes or as "512MB"; "min" or None: none, the plan then says what the least is.
    context: tokens; "max" or None: the longest that the budget holds, without one the longest the model allows.
    cache: of a package, default its own; else "fp16". weights, block_size, target: as `edge-qkv export` takes them, for
    a model that is not exported. prefill_chunk: prompt tokens evaluated at once; 0: the default, or the package's.
    packed: whether the weights are packed for this processor; None: whether `pack` has done it for this package, and
    not for a model that is not exported. margin: rows that layers with a window keep behind it, as `Session` takes it;
    0: as many as the window.

    Raises `OverBudget`, which says what would fit, when the budget does not hold the plan, and `InputError` for
    options that make no sense.
    """
    allowed = None if memory in (None, "min") else parse_size(memory)
    wanted = 0 if context in (None, "max") else whole(context, "context", 1)
    if cache not in (None, *CACHE_BYTES):
        raise InputError(f"cache = {cache!r}: must be one of {', '.join(CACHE_BYTES)}")
    options = _native.PlanOptions(
        memory=allowed or 0,
        context=wanted,
        prefill_chunk=chunk_size(prefill_chunk),
        threads=thread_count(threads),
        cache_type=cache.encode() if cache else None,
        margin=whole(margin, "margin"),
    )
    model = planned_model(model)
    package = None if isinstance(model, ModelConfig) else model
    options.packed = (package is not None and is_packed(package)) if packed is None else packed
    config = model if package is None else package.config
    limit = config.max_positions
    if wanted > limit:
        raise InputError(f"context = {wanted}: must be at most {limit}, the most this model allows")
    of_target = target if package is None else package.target
    known = named(of_target)
    asked = weights, block_size, target, options.prefill_chunk, cache or "fp16"
    exported = None if package else estimate(config, *asked)
    if known.hosted:
        if memory is not None:
            raise InputError(f"--memory: {known.unknown_memory}, so a budget cannot be planned; leave it out")
        return _of_weights_and_cache(config, package, exported, options, of_target)
    info = _native.PlanInfo()
    if exported:
        options.engine = known.engine.encode()
        _native.call("eqkv_plan", exported.description.encode(), ctypes.byref(options), ctypes.byref(info))
    else:
        _native.call("eqkv_plan_package", os.fsencode(package.path), ctypes.byref(options), ctypes.byref(info))
    values = {name: getattr(info, name) for name, _ in info._fields_ if name != "struct_size"}
    values["cache_type"] = info.cache_type.decode()
    if exported:
        values["weight_bytes"] = exported.weight_bytes
    return Plan(**values, packed=bool(options.packed), memory=allowed)


def _of_weights_and_cache(
    config: ModelConfig,
    package: Package | None,
    exported: Estimate | None,
    options: _native.PlanOptions,
    target: str,
) -> Plan:
    """What can be known of an engine that Python hosts."""
    own = package.manifest.get("cache") if package else "fp16"
    cache = options.cache_type.decode() if options.cache_type else own
    a_token = (
        package.cache_bytes_per_token if package and cache == own else cache_bytes_per_token(config, cache, target)
    )
    context = options.context or config.max_positions
    fixed = package.manifest.get("prefill_chunk") if package else exported.prefill_chunk  # else none is planned
    weights = package.weight_bytes if package else exported.weight_bytes
    known = named(target)
    rows = config.max_positions if known.whole_cache else context
    cache_bytes = -(-rows // known.context_multiple) * known.context_multiple * a_token
    return Plan(
        context=context,
        prefill_chunk=fixed or 0,
        threads=options.threads,
        cache_type=cache,
        weights_file=weights,
        weights_anonymous=0,
        cache=cache_bytes,
        workspace=0,
        engine_file=0,
        engine_anonymous=0,
        expected=weights + cache_bytes,
        margin=0,
        total=weights + cache_bytes,
        anonymous=cache_bytes,
        weight_bytes=weights,
        matrix_bytes=exported.matrix_bytes if exported else 0,
        packed=False,
        unknown=known.unknown_memory,
    )


def fits(model: str | Path | Package | ModelConfig, **options: Any) -> Plan | None:
    """`plan`, or None where the budget does not hold it."""
    try:
        return plan(model, **options)
    except OverBudget:
        return None


def planned_model(model: str | Path | Package | ModelConfig) -> Package | ModelConfig:
    """What `plan` takes, opened: a package, or the config of a model that is not exported."""
    if isinstance(model, (Package, ModelConfig)):
        return model
    name = str(model)
    if (Path(name) / MANIFEST).exists():
        return Package.open(name, verify=False)
    if name.partition("/")[0] in PRESETS and not Path(name).exists():
        return preset(name)
    if name.endswith(".json"):
        return ModelConfig.from_file(name)
    from edge_qkv.checkpoints import read_checkpoint

    return read_checkpoint(name).config
