"""The model package: a directory that `edge-qkv export` writes and the runtime opens.

It holds the engine's model files, `tokenizer.json` when there is one, and `edge_qkv.json`, which names
every other file with its size and SHA-256; names of files in a directory of the package have slashes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from edge_qkv import files
from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.targets import TARGETS
from edge_qkv.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
MANIFEST = "edge_qkv.json"
FORMAT = 3


@dataclass(frozen=True)
class Package:
    """An opened and checked package."""

    path: Path
    manifest: dict[str, Any]
    config: ModelConfig

    @classmethod
    def open(cls, path: str | Path, verify: bool = True, progress: Progress | None = None) -> Package:
        """Reads `edge_qkv.json` and checks every file it names: presence, size and, with `verify`, content.

        progress: of `verify`. Raises `InputError` naming the file.
        """
        path = Path(path)
        manifest_file = path / MANIFEST
        if not manifest_file.is_file():
            kind = "is not a model package (no edge_qkv.json in it)" if path.is_dir() else "is not a directory"
            raise InputError(f"{path}: {kind}; make a package with `edge-qkv export`")
        manifest = files.read_json(manifest_file, MANIFEST, "export the package again")
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
        for name, entry in listed.items():
            _check_file(path, name, entry)
        package = cls(path.absolute(), manifest, config)  # files are opened later, the current directory may change
        if verify:
            package.verify(progress)
        return package

    def verify(self, progress: Progress | None = None) -> None:
        """Reads every file and compares its SHA-256; raises `InputError` naming the one that is damaged.

        progress(done, total), in bytes, is called after each block, and at the end whatever that is.
        """
        listed = self.manifest["files"]
        done, total = 0, sum(entry["bytes"] for entry in listed.values())

        def read(count: int) -> None:
            nonlocal done
            done += count
            if progress and done < total:
                progress(done, total)

        try:
            for name, entry in listed.items():
                if files.sha256(self.path / name, read) != entry.get("sha256"):
                    raise InputError(
                        f"{self.path / name}: is damaged (its SHA-256 differs); "
                        "copy the package again or export it again"
                    )
        finally:
            if progress:
                progress(total, total)

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

    def tokenizer(self) -> Tokenizer:
        """The package's tokenizer, or an `InputError` that says what to do without one."""
        if self.tokenizer_file is None:
            raise InputError(
                f"{self.path}: has no tokenizer, so it takes token ids only (--tokens); "
                "export again with --tokenizer tokenizer.json to use text"
            )
        return load_tokenizer(self.tokenizer_file, self.config.vocab_size)


def is_package_only(path: Path) -> bool:
    """Whether a directory holds a package and no file that is not part of it."""
    try:
        listed = files.read_json(path / MANIFEST, MANIFEST)["files"]
        known = {
            str(parent)
            for name in (MANIFEST, *listed)
            for parent in (PurePosixPath(name), *PurePosixPath(name).parents)
        }
        return {entry.relative_to(path).as_posix() for entry in path.rglob("*")} <= known
    except (OSError, InputError, KeyError, TypeError):
        return False


def listed_files(path: Path) -> list[str]:
    """Names of the files below `path`, as a manifest lists them."""
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def _check_file(folder: Path, name: str, entry: Any) -> None:
    file, inside = folder / str(name), PurePosixPath(name)
    unsound = inside.is_absolute() or ".." in inside.parts or name in ("", ".") or str(inside) != name
    if unsound or set(name) & {"\\", ":"}:  # by which Windows would leave the directory
        raise InputError(f"{folder / MANIFEST}: lists {name!r}, which is no file of a package; export it again")
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
        raise InputError(f"{folder / MANIFEST}: says nothing about {name}; export the package again")
    if not file.is_file():
        raise InputError(f"{file}: is missing from the package; copy the whole directory or export it again")
    if file.stat().st_size != entry["bytes"]:
        raise InputError(
            f"{file}: has {file.stat().st_size:,} bytes, not {entry['bytes']:,}; "
            "copy the package again or export it again"
        )
