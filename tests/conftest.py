"""Models that the tests share: tiny random ones, one of them with a tokenizer, and the bundled one."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path

import pytest

from edge_qkv import _native
from edge_qkv.config import ModelConfig
from edge_qkv.engines import NATIVE
from edge_qkv.stored import STORAGE
from native_build import build

TINY = ModelConfig(
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


@pytest.fixture(scope="session", params=NATIVE)
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
def tiny_package(tmp_path_factory, tiny_checkpoint) -> Path:
    """The tiny model as an ONNX package with fp32 weights and cache."""
    from edge_qkv.export import TARGETS

    output = tmp_path_factory.mktemp("package") / "tiny"
    TARGETS["onnx"](str(tiny_checkpoint), output, weights="fp32", cache="fp32")
    return output


@pytest.fixture(scope="session")
def tiny_program(tmp_path_factory, tiny_checkpoint) -> Path:
    """The tiny model as an ExecuTorch package with fp32 weights and an fp16 cache."""
    from edge_qkv.export import TARGETS

    needs("executorch")
    output = tmp_path_factory.mktemp("program") / "tiny"
    TARGETS["executorch"](str(tiny_checkpoint), output, weights="fp32", cache="fp16", parity=False)
    return output


@pytest.fixture(scope="session")
def random_package(tmp_path_factory):
    """random_package(target, config, cache, seed, chunk, **options) -> (the eager decoder, its package with fp32
    weights), each made once. chunk: the most tokens of a call, where the file fixes that."""
    from edge_qkv.checkpoints import read_checkpoint
    from edge_qkv.export import TARGETS

    @functools.cache
    def checkpoint(config: ModelConfig, seed: int):
        path = write_checkpoint(tmp_path_factory.mktemp("random") / "checkpoint", config, seed=seed)
        return path, read_checkpoint(str(path)).load()

    @functools.cache
    def export(target: str, config: ModelConfig, cache: str, seed: int, options: frozenset):
        needs(target)
        path, decoder = checkpoint(config, seed)
        output = tmp_path_factory.mktemp("random") / target
        TARGETS[target](str(path), output, cache=cache, parity=False, **{"weights": "fp32"} | dict(options))
        return decoder, output

    def make(target: str, config: ModelConfig = TINY, cache: str = "fp32", seed: int = 0, chunk: int = 16, **options):
        if STORAGE[target].prefill_chunk:
            options["prefill_chunk"] = chunk
        return export(target, config, cache, seed, frozenset(options.items()))

    return make


@pytest.fixture(scope="session")
def bundled_checkpoint() -> Path:
    from edge_qkv.demo import CHECKPOINT

    return CHECKPOINT


@pytest.fixture(scope="session")
def bundled_package(tmp_path_factory, bundled_checkpoint):
    """bundled_package(weights, target) -> (package, manifest) of the bundled model, each exported once."""
    from edge_qkv.export import TARGETS

    @functools.cache
    def export(weights: str, target: str) -> tuple[Path, dict]:
        needs(target)
        output = tmp_path_factory.mktemp("bundled") / weights
        return output, TARGETS[target](str(bundled_checkpoint), output, weights=weights)

    return lambda weights, target="onnx": export(weights, target)


@pytest.fixture(scope="session")
def tests() -> Path:
    """Directory of the native test programs."""
    return build("native-tests", "-DCMAKE_BUILD_TYPE=Release")


@pytest.fixture(scope="session")
def sanitized_tests() -> Path:
    """The same programs under AddressSanitizer and UBSan."""
    return build("sanitized-tests", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DEDGE_QKV_SANITIZE=ON")
