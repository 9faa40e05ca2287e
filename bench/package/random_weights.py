"""Packages of random weights, to measure a configuration before it is trained."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from edge_qkv import InputError, ModelConfig, Package, files
from edge_qkv.bench.common import say
from edge_qkv.packing import packed_directory
from edge_qkv.presets import PRESETS, preset
from edge_qkv.targets import cache_bytes_per_token, stored_as


def named_config(name: str) -> ModelConfig | None:
    """The config of a published size such as "1.2B/Q-MQA", or of the path of a config.json; None: neither."""
    if name.endswith(".json"):
        return ModelConfig.from_file(Path(name))
    return preset(name) if name.partition("/")[0] in PRESETS and not Path(name).exists() else None


def default_directory() -> Path:
    """Where packages of random weights are kept: below the user's cache directory."""
    return packed_directory() / "random"


def random_package(name: str, config: ModelConfig, directory: Path, target: str, weights: str, cache: str) -> Package:
    """The package of `config` with random weights in `directory`, exported there unless it is there already.

    name: what the config is called. Raises `InputError`, also where what the export needs is not installed.
    """
    kind, *_ = stored_as(target, weights)
    cache_bytes_per_token(config, cache, target)  # refuses a cache that the engine has not
    path = directory / f"{name.replace('/', '-')}-{len(config.layers)}-layers-{target}-{kind}-{cache}"
    if (found := _earlier(path, config)) is not None:
        return found
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"{name}: random weights are exported first, which needs torch; run pip install 'edge-qkv[export]', or "
            "give a package that was exported elsewhere"
        )
    from edge_qkv.export import export_package
    from edge_qkv.export.progress import Bar

    say(f"exporting random weights of {name} to {path}")
    directory.mkdir(parents=True, exist_ok=True)
    bar = Bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            description = Path(folder) / "config.json"
            files.write_json(description, config.to_dict())
            export_package(target, f"random:{description}", path, weights=kind, cache=cache, parity=False, progress=bar)
    finally:
        bar.close()
    return Package.open(path, verify=False)


def _earlier(path: Path, config: ModelConfig) -> Package | None:
    """A package that was exported before, of just this config and by a version whose packages this one reads."""
    try:
        package = Package.open(path)
    except InputError:
        return None
    return package if package.config == config else None
