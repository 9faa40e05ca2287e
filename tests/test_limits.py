"""A session in a hard limit of memory equal to its planned budget finishes; one below it is refused in advance."""

from __future__ import annotations

import json

import pytest

from edge_qkv import Session
from edge_qkv.errors import OverBudget
from edge_qkv.planning import plan
from limits import CHUNK, memory_group, run_in_budget


@pytest.mark.parametrize("context", [8192, 32768])
def test_a_session_finishes_in_a_hard_limit_equal_to_its_budget(bundled_package, context, capsys):
    package, _ = bundled_package("int4")
    done, what = run_in_budget(package, context)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    memory = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n{what}: cache {memory['cache_used']:,} bytes")
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
    """The same session in half of its anonymous memory does not finish: what the first test shows is not vacuous.

    Pages of files that another process has read are in no limit of this one.
    """
    package, _ = bundled_package("int4")
    planned = plan(package, context=32768, prefill_chunk=CHUNK, threads=2)
    with memory_group() as group:
        if group is None:
            pytest.skip("no control group can be made here")
    done, _ = run_in_budget(package, 32768, share=planned.anonymous / planned.total / 2)
    assert done.returncode != 0
