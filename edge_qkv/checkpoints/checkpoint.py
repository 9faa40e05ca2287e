"""A checkpoint of any format, checked and ready to hand out one tensor at a time.

A format's reader turns its file into `Source`s, one a decoder weight; `assemble` compares them with the decoder
and returns the `Checkpoint`. Nothing large is read before that comparison has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError, one_line

if TYPE_CHECKING:
    import torch

    from edge_qkv.model import Decoder

DTYPES = ("float16", "bfloat16", "float32", "float64")
_PREFIXES = ("module.", "_orig_mod.")
_POSITIONS_LIMIT = 1 << 24


@dataclass(frozen=True)
class Source:
    """One tensor in a file. `name` is the file's own name for it, for errors."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # e.g. "float16"
    load: Callable[[], torch.Tensor]

    def rows(self, start: int, stop: int) -> Source:
        """The rows [start, stop) of a tensor that holds several, one below the other."""
        return Source(self.name, (stop - start, *self.shape[1:]), self.dtype, lambda: self.load()[start:stop])


@dataclass
class Checkpoint:
    """A trained model that has been found sound but not yet read.

    `tensors` maps every name of `Decoder(config).weight_names()` to a function that loads that tensor (a float
    type; the caller casts) and raises `InputError` when it cannot be read or holds NaN or infinity. Without PyTorch
    the config is usable and any look into `tensors` raises `InputError`.
    """

    config: ModelConfig
    tensors: Mapping[str, Callable[[], torch.Tensor]]
    format: str
    path: Path | None
    tokenizer: Path | None

    def load(self) -> Decoder:
        """The eager module in float32 and evaluation mode; float32 files are mapped where the format permits."""
        torch = require_torch(self.path)
        from edge_qkv.model import Decoder

        with torch.device("meta"):  # no random initialisation, no memory: every weight is assigned below
            model = Decoder(self.config)
        weights = {}
        for name, load in self.tensors.items():
            tensor = load().float()
            if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)  # a part of a fused tensor: its own memory
            weights[name] = tensor
        model.load_state_dict(weights, strict=False, assign=True)
        if self.config.tied_head:
            model.head.weight = model.embedding.weight
        for name, table in model.rotary_tables().items():
            setattr(model, name, table)
        return model.eval().requires_grad_(False)


def assemble(
    config: ModelConfig,
    sources: Mapping[str, Source] | Callable[[str, tuple[int, ...]], Source],
    format: str,
    path: Path | None,
    where: str,
    tokenizer: Path | None = None,
) -> Checkpoint:
    """Compares a file's tensors with the decoder and returns the checkpoint.

    sources: the file's tensor of every weight, or a function that makes one of a name and shape; `where` names the
    file in errors. Raises `InputError` for a tensor that is missing, unexpected, of the wrong shape or no float.
    """
    if not callable(sources) and len(config.layers) > len(sources):
        raise InputError(
            f"{where}: the config says {len(config.layers)} layers but the file holds {len(sources)} tensors; "
            "check that config and weights belong together"
        )
    shapes = expected_shapes(config, where)
    if callable(sources):
        sources = {name: sources(name, shape) for name, shape in shapes.items()}
    for name in shapes:
        if name not in sources:
            raise missing(where, name)
    for name in sources:
        if name not in shapes:
            raise unexpected(where, name)
    for name, shape in shapes.items():
        check_shape(sources[name], shape, where)
        if sources[name].dtype not in DTYPES:
            raise InputError(
                f"{where}: tensor {quoted(sources[name].name)} is {sources[name].dtype}; "
                f"save the weights as one of {', '.join(DTYPES)}"
            )
    # The decoder's order, so that a writer that follows `tensors` follows the model.
    tensors = {name: _checked(sources[name], where) for name in shapes}
    return Checkpoint(config, tensors, format, path, tokenizer)


def expected_shapes(config: ModelConfig, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of the decoder, by name; allocates nothing."""
    if config.max_positions > _POSITIONS_LIMIT:
        raise InputError(
            f"{where}: config field max_positions = {config.max_positions}: must be at most {_POSITIONS_LIMIT}"
        )
    torch = require_torch(where)
    from edge_qkv.model import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    state = model.state_dict()
    return {name: tuple(state[name].shape) for name in model.weight_names()}


def config_of(path: Path, **fields: Any) -> ModelConfig:
    """A validated config of a model of learned positions whose layers are alike; its errors name the file."""
    try:
        return ModelConfig.uniform(positions="learned", **fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def check_shape(source: Source, shape: tuple[int, ...], where: str) -> None:
    """Raises `InputError` when a tensor has another shape than its config implies."""
    if source.shape != shape:
        raise InputError(
            f"{where}: tensor {quoted(source.name)} is {list(source.shape)} where the config implies {list(shape)}; "
            "check that config and weights belong together"
        )


def plain_name(name: str, found: Container[str], where: str) -> str:
    """A tensor's name without what data-parallel training and torch.compile put before it.

    found: the plain names so far; raises `InputError` where this is one of them.
    """
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    if name in found:
        raise InputError(f"{where}: tensor {quoted(name)} occurs twice, with and without a prefix; keep one")
    return name


def missing(where: str, name: str) -> InputError:
    return InputError(f"{where}: tensor {quoted(name)} is missing; the file is incomplete or of another model")


def unexpected(where: str, name: Any) -> InputError:
    return InputError(
        f"{where}: tensor {quoted(name)} is not part of the model its config describes; "
        "check that config and weights belong together"
    )


def _checked(source: Source, where: str) -> Callable[[], torch.Tensor]:
    """Loads the tensor and checks what only its values can tell."""

    def load() -> torch.Tensor:
        import torch

        try:
            tensor = source.load().detach().resolve_neg()
            low, high = torch.aminmax(tensor)  # no mask the size of the tensor; NaN propagates
            largest = torch.finfo(torch.float32).max
            sound = -largest <= low.item() and high.item() <= largest  # false for NaN too
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{where}: tensor {quoted(source.name)} cannot be read ({one_line(error)})") from None
        if not sound:
            raise InputError(
                f"{where}: tensor {quoted(source.name)} holds NaN or infinity; "
                "use a checkpoint saved before training diverged"
            )
        return tensor

    return load


def require_torch(needed_by: object) -> Any:
    """The torch module; raises `InputError` when it is not installed."""
    try:
        import torch
    except ImportError:
        raise InputError(f"{needed_by}: reading weights needs PyTorch: pip install 'edge-qkv[export]'") from None
    return torch


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


class NeedsTorch(Mapping):
    """Stands for the tensors where PyTorch is not installed: the config stays readable."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getitem__(self, name: str) -> Any:
        return require_torch(self._where)

    def __iter__(self) -> Iterator[str]:
        return require_torch(self._where)

    def __len__(self) -> int:
        return require_torch(self._where)


def beside(path: Path) -> Path | None:
    """The tokenizer.json in the directory of a file."""
    tokenizer = path.parent / "tokenizer.json"
    return tokenizer if tokenizer.is_file() else None


def quoted(name: Any) -> str:
    """A name from a file, fit for one line of an error."""
    text = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
