"""Sessions in a hard limit of memory.

The limit is a control group's where one can be made: it counts what the process adds after it moved in, file pages
included, which the kernel may drop. Elsewhere it is RLIMIT_DATA, on top of what Python and its libraries hold.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from edge_qkv import plan

CHUNK = 128
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


CHILD = """
import json, os, resource, sys
import numpy as np
from edge_qkv import Sampling, Session
from edge_qkv import _native

package, context, budget, hard, anonymous, group, limit = sys.argv[1:]
context, budget, anonymous = int(context), int(budget), int(anonymous)
_native.library(), _native.onnxruntime_path()
if group:
    open(limit, "w").write(hard)
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
else:
    before = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
    stacks = 2 * resource.getrlimit(resource.RLIMIT_STACK)[0]  # address space of threads, which they do not touch
    resource.setrlimit(resource.RLIMIT_DATA, (before + anonymous + stacks,) * 2)
with Session(package, context=context, memory=budget, prefill_chunk=128, threads=2) as session:
    session.evaluate([i % 4096 for i in range(1000)])
    session.fill(context - 200)
    session.evaluate([i % 4096 for i in range(150)])
    written = list(session.generate_tokens([1], 40, Sampling(temperature=0)))
    assert len(written) == 40 and np.isfinite(session.logits()).all()
    print(json.dumps(session.memory()))
"""


def run_in_budget(package: Path, context: int, share: float = 1.0) -> tuple[subprocess.CompletedProcess, str]:
    """Prefills, fills and decodes a session of `context` tokens whose budget is the least that is planned, in a limit
    of `share` of that. Returns the process, which prints `Session.memory()`, and a description of the limit."""
    planned = plan(package, context=context, prefill_chunk=CHUNK, threads=2)
    with memory_group() as group:
        limit = "" if group is None else limit_file(group)
        hard = int(planned.total * share)
        arguments = [package, context, planned.total, hard, planned.anonymous, group or "", limit]
        done = subprocess.run([sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True)
        kind = "RLIMIT_DATA" if group is None else f"control group ({limit.name})"
    return done, f"{context:,} tokens in a limit of {hard:,} bytes, {kind}"
