"""Hard limits on the memory of a subprocess: a control group where the system lets us make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group() -> Iterator[Path | None]:
    """A control group of one's own, of version 1 or 2; None where none can be made."""
    group = None
    for parent in (ROOT / "memory", ROOT):
        if not (parent / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            path = parent / f"edge-qkv-test-{os.getpid()}"
            path.mkdir()
            if limit_file(path) is not None:
                group = path
                break
            path.rmdir()
    try:
        yield group
    finally:
        if group is not None:
            with contextlib.suppress(OSError):
                group.rmdir()


def limit_file(group: Path) -> Path | None:
    """The file that sets the hard limit of a group."""
    names = ("memory.limit_in_bytes", "memory.max")
    return next((group / name for name in names if (group / name).exists()), None)
