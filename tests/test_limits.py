"""A session in a hard limit of memory equal to its planned budget finishes; one below it is refused in advance.

The limit is a control group's where one can be made: it counts what the process adds after it moved in, file pages
included, which the kernel may drop. Elsewhere it is RLIMIT_DATA, on top of what Python and its libraries hold.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edge_qkv import Session
from edge_qkv.errors import OverBudget
from edge_qkv.planning import plan
from limits import limit_file, memory_group

CHUNK = 128

CHILD = """
import json, os, resource, sys
import numpy as np
from edge_qkv import Sampling, Session
from edge_qkv import _native

package, context, budget, anonymous, group, limit = sys.argv[1:]
context, budget, anonymous = int(context), int(budget), int(anonymous)
_native.library(), _native.onnxruntime_path()
if group:
    open(limit, "w").write(str(budget))
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


@pytest.mark.parametrize("context", [8192, 32768])
def test_a_session_finishes_in_a_hard_limit_equal_to_its_budget(bundled_package, context, capsys):
    package, _ = bundled_package("int4")
    planned = plan(package, context=context, prefill_chunk=CHUNK, threads=2)
    with memory_group() as group:
        limit = "" if group is None else limit_file(group)
        arguments = [package, context, planned.total, planned.anonymous, group or "", limit]
        done = subprocess.run([sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.returncode} {done.stderr}"
        memory = json.loads(done.stdout)
        with capsys.disabled():
            kind = "RLIMIT_DATA" if group is None else f"control group ({limit.name})"
            print(f"\n{context:,} tokens in {planned.total:,} bytes, {kind}: cache {memory['cache_used']:,}")
    assert memory["cache_used"] > (context - 200) * 512


@pytest.mark.parametrize("context", [8192, 32768])
def test_less_than_the_budget_is_refused_in_advance(bundled_package, context):
    package, _ = bundled_package("int4")
    needed = plan(package, context=context, prefill_chunk=CHUNK, threads=2).total
    with Session(package, context=context, memory=needed, prefill_chunk=CHUNK, threads=2) as session:
        assert session.context == context
    with pytest.raises(OverBudget) as refused:
        Session(package, context=context, memory=needed - 1, prefill_chunk=CHUNK, threads=2)
    message = str(refused.value)
    for change in ("int8 cache", "a context of", "a prefill chunk of"):
        assert change in message


def test_the_limit_is_real(bundled_package):
    """The same session in half of its budget does not finish: what the first test shows is not vacuous."""
    package, _ = bundled_package("int4")
    planned = plan(package, context=32768, prefill_chunk=CHUNK, threads=2)
    with memory_group() as group:
        if group is None:
            pytest.skip("no control group can be made here")
        limit = limit_file(group)
        child = CHILD.replace("write(str(budget))", "write(str(budget // 2))")
        arguments = [package, 32768, planned.total, planned.anonymous, group, limit]
        done = subprocess.run([sys.executable, "-c", child, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode != 0
