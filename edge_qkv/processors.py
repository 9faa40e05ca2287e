"""How many processors this process may use at once, counted as the native library counts them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def processors() -> int:
    """The processors of the affinity mask, or as many as the CPU quotas of the control groups pay for where these are
    fewer; at least 1. Part of a processor counts as one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, cpu_quotas())]))


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """The CPU quotas, in processors, of this process's control groups and the groups above them.

    root: what comes before the paths of /proc and of the mounts, for tests.
    """
    groups = {}  # controllers, none in version 2 -> group
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers or number == "0":
            groups |= dict.fromkeys(controllers.split(","), group)
    for line in _lines(root / "proc/self/mountinfo"):
        # "id parent device root mount-point options [fields] - type source options"
        mounted, _, source = (part.split() for part in line.partition(" - "))
        if len(mounted) < 5 or len(source) < 3:
            continue
        if source[0] == "cgroup2":
            group, limit = groups.get(""), _version_2
        elif source[0] == "cgroup" and "cpu" in source[2].split(","):
            group, limit = groups.get("cpu"), _version_1
        else:
            continue
        if not group:
            continue
        # A container sees the mount from its own group on, while the group may be named from the host's root.
        top, mount = mounted[3], root / mounted[4].lstrip("/")
        inner = Path(group.removeprefix("" if top == "/" else top).lstrip("/"))
        if ".." in inner.parts:  # above the mount: only what is mounted is seen
            inner = Path()
        for directory in (mount / inner, *(mount / above for above in inner.parents)):
            quota, period = limit(directory)
            if quota > 0 and period > 0:
                yield quota / period


def _version_2(directory: Path) -> tuple[float, float]:
    """Microseconds of quota and period; a quota of 0 is none."""
    return _numbers(" ".join(_lines(directory / "cpu.max")))  # "150000 100000", or "max 100000"


def _version_1(directory: Path) -> tuple[float, float]:
    return _numbers(" ".join(w for name in ("quota", "period") for w in _lines(directory / f"cpu.cfs_{name}_us")))


def _numbers(text: str) -> tuple[float, float]:
    words = text.split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(w.isdecimal() for w in words) else (0, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
