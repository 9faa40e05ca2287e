"""Models that the tests share: tiny random ones, one of them with a tokenizer, and the bundled one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from edge_qkv import _native
from edge_qkv.config import ModelConfig
from edge_qkv.layer import LAYER_FIELDS
from edge_qkv.targets import TARGETS
from native_build import build

TINY = ModelConfig.uniform(
    vocab_size=260,
    max_positions=96,
    layers=2,
    width=32,
    heads=4,
    head_dim=8,
    kv_heads=1,
    mlp_width=48,
    sharing="q-k=v",
    mlp="swiglu",
    norm="rmsnorm",
    positions="rotary-conjugate",
)


def changed(config: ModelConfig, **changes: object) -> ModelConfig:
    """A model whose layers are alike with other fields, as `ModelConfig.uniform` takes them."""
    own = ("kinds", "pattern", "learned_positions")
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in own}
    fields |= {name: getattr(config.only, name) for name in LAYER_FIELDS}
    fields |= {"layers": len(config.layers), "positions": config.positions}
    return ModelConfig.uniform(**{**fields, **changes})


IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of `pytest -n`, one of several
# Minutes each. One that came last would leave the other workers idle.
LONGEST = ("test_published_size.py", "test_every_variant.py", "test_coreml.py")


def pytest_configure() -> None:
    """A worker has a core: PyTorch is imported later, and in processes of the worker, and takes one thread then."""
    if IS_WORKER:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def write_checkpoint(folder: Path, config: ModelConfig, tokenizer=None, seed: int = 0) -> Path:
    """A checkpoint directory with random weights, large enough that logits differ clearly."""
    import torch
    from safetensors.torch import save_file

    from edge_qkv.model import Decoder

    folder.mkdir(parents=True, exist_ok=True)
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            elif len(config.kinds) > 1:  # norms, weights of keys: away from 1
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3, generator=generator))
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in model.weight_names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def hears_ctrl_c() -> None:
    """For `preexec_fn`: where the tests run in the background of a script they ignore SIGINT, and so would this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def needs(target: str) -> None:
    """Skips the test where nothing can be exported to a target, or where what is exported cannot be run."""
    if target == "coreml":
        pytest.importorskip("coremltools", reason="coremltools is not installed")
    if target == "executorch":
        for module in ("executorch.exir", "torchao"):
            pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed")
        if _native.executorch_path() is None:
            pytest.skip("edge-qkv was built without ExecuTorch")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """made_once(name, export) -> the package that export(path) writes at that name: once, for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if IS_WORKER else base) / "made-once"

    def make(name: str, export: Callable[[Path], object]) -> Path:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():  # whole, as exporters move it there
                export(path)
        return path

    return make


@pytest.fixture(scope="session", params=[name for name, known in TARGETS.items() if known.native])
def target(request) -> str:
    """Each target that the native library runs, and with it each engine of it."""
    needs(request.param)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _no_packed_weights_of_the_user(tmp_path_factory):
    """Tests find packed weights only where they have put them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """One token a byte, so that every multi-byte character is spread over several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, bytes_tokenizer) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", TINY, bytes_tokenizer)


@pytest.fixture(scope="session")
def tiny_package(made_once, tiny_checkpoint) -> Path:
    """The tiny model as an ONNX package with fp32 weights and cache."""
    from edge_qkv.export import export_package

    def export(output: Path) -> None:
        export_package("onnx", str(tiny_checkpoint), output, weights="fp32", cache="fp32")

    return made_once("package/tiny", export)


@pytest.fixture(scope="session")
def tiny_program(made_once, tiny_checkpoint) -> Path:
    """The tiny model as an ExecuTorch package with fp32 weights and an fp16 cache."""
    from edge_qkv.export import export_package

    def export(output: Path) -> None:
        export_package("executorch", str(tiny_checkpoint), output, weights="fp32", cache="fp16", parity=False)

    needs("executorch")
    return made_once("program/tiny", export)


@pytest.fixture(scope="session")
def random_package(tmp_path_factory, made_once):
    """random_package(target, config, cache, seed, chunk, **options) -> (the eager decoder, its package with fp32
    weights), each made once. chunk: the most tokens of a call, where the file fixes that."""
    from edge_qkv.checkpoints import read_checkpoint
    from edge_qkv.export import export_package

    @functools.cache
    def checkpoint(config: ModelConfig, seed: int):
        path = write_checkpoint(tmp_path_factory.mktemp("random") / "checkpoint", config, seed=seed)
        return path, read_checkpoint(str(path)).load()

    def make(target: str, config: ModelConfig = TINY, cache: str = "fp32", seed: int = 0, chunk: int = 16, **options):
        needs(target)
        options = {"weights": "fp32", "cache": cache} | options
        if TARGETS[target].prefill_chunk:
            options["prefill_chunk"] = chunk
        path, decoder = checkpoint(config, seed)
        key = hashlib.sha256(repr((config, seed, sorted(options.items()))).encode()).hexdigest()[:16]
        export = functools.partial(export_package, target, str(path), parity=False, **options)
        return decoder, made_once(f"random-{key}/{target}", export)

    return make


@pytest.fixture(scope="session")
def bundled_checkpoint() -> Path:
    from edge_qkv.commands.demo import CHECKPOINT

    return CHECKPOINT


@pytest.fixture(scope="session")
def bundled_package(made_once, bundled_checkpoint):
    """bundled_package(weights, target) -> (package, manifest) of the bundled model, each exported once."""
    from edge_qkv.export import export_package
    from edge_qkv.package import Package

    def package(weights: str, target: str = "onnx") -> tuple[Path, dict]:
        needs(target)
        export = functools.partial(export_package, target, str(bundled_checkpoint), weights=weights)
        path = made_once(f"bundled-{target}/{weights}", export)
        return path, Package.open(path, verify=False).manifest

    return package


@pytest.fixture(scope="session")
def tests() -> Path:
    """Directory of the native test programs."""
    return build("native-tests", "-DCMAKE_BUILD_TYPE=Release")


@pytest.fixture(scope="session")
def sanitized_tests() -> Path:
    """The same programs under AddressSanitizer and UBSan. All but the kernel, which has a level of its own, compiles in
    half the time with -O1."""
    options = "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG"
    programs = "attack_program", "attention_test", "core_test"
    return build("sanitized-tests", *options, "-DEDGE_QKV_SANITIZE=ON", targets=programs)
