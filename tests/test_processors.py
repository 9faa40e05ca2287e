"""The number of threads where none is given: what affinity and control groups let a process use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_qkv.processors import cpu_quotas, processors

VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
VERSION_1 = (
    "25 23 0:22 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "26 23 0:23 / /sys/fs/cgroup/cpu rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
)
CONTAINER = "26 23 0:23 /docker/f00 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "quotas"),
    [
        ("0::/a/b/c", VERSION_2, {}, []),
        ("0::/a/b/c", VERSION_2, {"a/b/c/cpu.max": "max 100000"}, []),
        ("0::/a/b/c", VERSION_2, {"a/b/c/cpu.max": "150000 100000"}, [1.5]),
        ("0::/a/b/c", VERSION_2, {"a/b/c/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, [0.5]),
        ("0::/a/b/c", VERSION_2, {"a/b/cpu.max": "300000 100000", "cpu.max": "50000 25000"}, [3, 2]),
        ("0::/a/b/c", VERSION_2, {"a/bb/cpu.max": "100000 100000"}, []),
        ("0::/", VERSION_2, {"cpu.max": "200000 100000"}, [2]),
        ("0::/../x", VERSION_2, {"cpu.max": "200000 100000"}, [2]),
        ("5:memory:/b\n4:cpu,cpuacct:/a", VERSION_1, {"cpu/a/cpu.cfs_quota_us": "-1"}, []),
        ("5:memory:/b\n4:cpu,cpuacct:/a", VERSION_1, {"cpu/a/cpu.cfs_quota_us": "120000"}, [1.2]),
        ("0::/a", VERSION_1, {"cpu/a/cpu.cfs_quota_us": "120000"}, []),
        ("3:cpu:/docker/f00", CONTAINER, {"cpu/cpu.cfs_quota_us": "250000"}, [2.5]),
        ("3:cpu:/docker/f00/inner", CONTAINER, {"cpu/cpu.cfs_quota_us": "250000"}, [2.5]),
        ("0::/a", VERSION_2, {"a/cpu.max": "", "cpu.max": "0 100000"}, []),
        ("0::/a", VERSION_2, {"a/cpu.max": "-5 100000", "cpu.max": "100000 0"}, []),
        ("0::/a", VERSION_2, {"a/cpu.max": "x y", "cpu.max": "100000"}, []),
        ("::\n:\n0::", "26 - cgroup2\n - \n26 23 0:23 / - cgroup2\n", {}, []),
    ],
)
def test_quotas_of_control_groups(groups, mounts, limits, quotas, tmp_path):
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    files |= {f"sys/fs/cgroup/{name}": content for name, content in limits.items()}
    for name in limits:
        if "cfs" in name:
            files[f"sys/fs/cgroup/{Path(name).parent}/cpu.cfs_period_us"] = "100000"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert list(cpu_quotas(tmp_path)) == quotas


def test_without_proc_there_is_no_quota(tmp_path):
    assert list(cpu_quotas(tmp_path)) == []


@contextlib.contextmanager
def quota_of_one() -> Iterator[Path]:
    """A control group whose processes together have one processor's time."""
    for parent, limits in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "50000", "cpu.cfs_quota_us": "50000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "50000 50000"}),
    ):
        group = parent / f"edge-qkv-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if all((group / name).exists() for name in limits):
                for name, limit in limits.items():
                    (group / name).write_text(limit)
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group with a CPU quota can be made here")


PROGRAM = """
import os, sys
from edge_qkv import plan
from edge_qkv.processors import processors
exec(sys.argv[1])
print(processors(), *(plan(path, context=1).threads for path in sys.argv[2:]))
"""


def counted(first: str, *packages: Path) -> list[int]:
    """The processors, and the threads planned for each package, of a process that runs `first` before."""
    command = [sys.executable, "-c", PROGRAM, first, *map(str, packages)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_a_mask_of_one_processor_gives_every_engine_one_thread(tiny_package, tiny_program):
    one = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert counted(one, tiny_package, tiny_program) == [1, 1, 1]


def test_without_mask_and_quota_all_are_counted(tiny_package, tiny_program):
    assert counted("", tiny_package, tiny_program) == [processors()] * 3


def test_a_quota_of_one_processor_gives_every_engine_one_thread(tiny_package, tiny_program):
    with quota_of_one() as group:
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        assert counted(join, tiny_package, tiny_program) == [1, 1, 1]
