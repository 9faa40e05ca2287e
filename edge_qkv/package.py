"""The model package: a directory that `edge-qkv export` writes and the runtime opens.

It holds the engine's model files, `tokenizer.json` when there is one, and `edge_qkv.json`, which names
every other file with its size and SHA-256; names of files in a directory of the package have slashes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edge_qkv import files
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError, one_line
from edge_qkv.targets import TARGETS

MANIFEST = "edge_qkv.json"
FORMAT = 3
# Names that tokenizers give to the token that ends a text.
_END_TOKENS = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|end|>",
)


@dataclass(frozen=True)
class Package:
    """An opened and checked package."""

    path: Path
    manifest: dict[str, Any]
    config: ModelConfig

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> Package:
        """Reads `edge_qkv.json` and checks every file it names: presence, size and, with `verify`, content.

        Raises `InputError` naming the file.
        """
        path = Path(path)
        manifest_file = path / MANIFEST
        if not manifest_file.is_file():
            kind = "is not a model package (no edge_qkv.json in it)" if path.is_dir() else "is not a directory"
            raise InputError(f"{path}: {kind}; make a package with `edge-qkv export`")
        try:
            manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{manifest_file}: cannot be read as JSON ({error}); export the package again") from None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
            raise InputError(f"{manifest_file}: is not a package manifest; export the package again")
        if manifest["format"] != FORMAT:
            raise InputError(
                f"{manifest_file}: has format {manifest['format']}, this version reads {FORMAT}; "
                "export the package again or install the matching edge-qkv"
            )
        config = ModelConfig.from_dict(manifest.get("config"), str(manifest_file))
        listed, target = manifest.get("files"), manifest.get("target")
        known = isinstance(target, str) and target in TARGETS and isinstance(listed, dict)
        model = TARGETS[target].model_file if known else None
        if not model or not any(name == model or name.startswith(f"{model}/") for name in listed):
            raise InputError(f"{manifest_file}: lists no model file; export the package again")
        stops, parity = manifest.get("stop_tokens"), manifest.get("parity")
        if not isinstance(stops, list) or not isinstance(parity, (dict, type(None))):
            raise InputError(f"{manifest_file}: has stop_tokens or parity of the wrong type; export the package again")
        if not isinstance(manifest.get("cache_bytes_per_token"), int):
            raise InputError(f"{manifest_file}: does not say its cache_bytes_per_token; export the package again")
        for name, facts in listed.items():
            _check_file(path, name, facts)
        package = cls(path, manifest, config)
        if verify:
            package.verify()
        return package

    def verify(self) -> None:
        """Reads every file and compares its SHA-256; raises `InputError` naming the one that is damaged."""
        for name, facts in self.manifest["files"].items():
            if files.sha256(self.path / name) != facts.get("sha256"):
                raise InputError(
                    f"{self.path / name}: is damaged (its SHA-256 differs); copy the package again or export it again"
                )

    @property
    def target(self) -> str:
        """What it was exported to, one of `edge_qkv.targets.TARGETS`."""
        return self.manifest["target"]

    @property
    def tokenizer_file(self) -> Path | None:
        return self.path / "tokenizer.json" if "tokenizer.json" in self.manifest["files"] else None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(t for t in self.manifest["stop_tokens"] if isinstance(t, int))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model files on disk."""
        return sum(f["bytes"] for name, f in self.manifest["files"].items() if name != "tokenizer.json")

    @property
    def cache_bytes_per_token(self) -> int:
        """What the engine keeps of a token, which may be more than the model needs."""
        return self.manifest["cache_bytes_per_token"]

    def tokenizer(self):
        """The package's tokenizer, or an `InputError` that says what to do without one."""
        if self.tokenizer_file is None:
            raise InputError(
                f"{self.path}: has no tokenizer, so it takes token ids only (--tokens); "
                "export again with --tokenizer tokenizer.json to use text"
            )
        return load_tokenizer(self.tokenizer_file, self.config.vocab_size)


def load_tokenizer(path: Path, vocab_size: int):
    """Reads a `tokenizer.json` and checks that the model has a row for each of its tokens."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # the library raises plain Exception for anything it cannot parse
        raise InputError(f"{path}: is not a tokenizer.json ({one_line(error)})") from None
    tokenizer.no_truncation()  # files made for training carry both; a prompt is neither cut nor filled up
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise InputError(f"{path}: has an empty vocabulary; give the tokenizer.json the model was trained with")
    if largest >= vocab_size:
        raise InputError(
            f"{path}: belongs to another model: it has token {largest}, the model has {vocab_size} tokens; "
            "give the tokenizer.json the model was trained with"
        )
    return tokenizer


def encode(tokenizer, text: str, stops: frozenset[int], start: bool) -> list[int]:
    """The ids of `text`; `start` puts the tokens before it that open a text (never one that ends it).

    Raises `InputError` for text that the tokenizer cannot express.
    """
    try:
        text.encode()  # bytes of a command line that are no UTF-8 arrive as lone surrogates
        opening = [i for i in tokenizer.encode("").ids if i not in stops] if start else []
        return opening + tokenizer.encode(text, add_special_tokens=False).ids
    except UnicodeEncodeError:
        raise InputError("the text must be UTF-8; this has bytes that are not") from None
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"the tokenizer cannot encode this text ({one_line(error)})") from None


def is_package_only(path: Path) -> bool:
    """Whether a directory holds a package and no file that is not part of it."""
    try:
        listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        known = {
            str(parent)
            for name in (MANIFEST, *listed)
            for parent in (PurePosixPath(name), *PurePosixPath(name).parents)
        }
        return {entry.relative_to(path).as_posix() for entry in path.rglob("*")} <= known
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def listed_files(path: Path) -> list[str]:
    """Names of the files below `path`, as a manifest lists them."""
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def stop_tokens(tokenizer) -> list[int]:
    """Ids of the tokens of a tokenizer that end a text."""
    return sorted(i for name in _END_TOKENS if (i := tokenizer.token_to_id(name)) is not None)


def _check_file(folder: Path, name: str, facts: Any) -> None:
    file, inside = folder / str(name), PurePosixPath(name)
    unsound = inside.is_absolute() or ".." in inside.parts or name in ("", ".") or str(inside) != name
    if unsound or set(name) & {"\\", ":"}:  # by which Windows would leave the directory
        raise InputError(f"{folder / MANIFEST}: lists {name!r}, which is no file of a package; export it again")
    if not isinstance(facts, dict) or not isinstance(facts.get("bytes"), int):
        raise InputError(f"{folder / MANIFEST}: says nothing about {name}; export the package again")
    if not file.is_file():
        raise InputError(f"{file}: is missing from the package; copy the whole directory or export it again")
    if file.stat().st_size != facts["bytes"]:
        raise InputError(
            f"{file}: has {file.stat().st_size:,} bytes, not {facts['bytes']:,}; "
            "copy the package again or export it again"
        )
