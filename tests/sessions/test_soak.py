"""Many conversations, trims, forks and restores leave memory and open files as they were."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CONVERSATIONS = 100

SOAK = """
import gc, json, os, random, sys
from pathlib import Path
from edge_qkv import Model, Sampling, Session

package, folder, conversations = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
choose = random.Random(5)
figures = []


def conversation(model, number):
    with Session(model, context=4096) as session:
        tokens = [choose.randrange(4096) for _ in range(choose.randrange(20, 300))]
        list(session.generate_tokens(tokens, 20, Sampling(seed=number)))
        session.save(folder / "saved")
        with session.fork() as fork:
            model.trim(choose.choice(["workspace", "idle", "all"]))
            list(fork.generate_tokens([number], 10, Sampling(seed=number)))
            session.rewind(len(session.tokens) // 2)
            session.restore(folder / "saved")
            list(session.generate_tokens([number], 10, Sampling(seed=number)))
            with Session(model, context=4096) as other:
                other.restore(folder / "saved")
                other.evaluate(tokens[:50])


with Model(package, threads=2) as model:
    for number in range(conversations):
        conversation(model, number)
        if number % 10 == 9:
            gc.collect()
            model.trim("all")
            with Session(model, context=16) as probe:
                memory = probe.memory()
            figures.append([memory["resident"], memory["anonymous"], len(os.listdir("/proc/self/fd"))])
print(json.dumps(figures))
"""


@pytest.mark.slow
def test_a_hundred_conversations_leave_memory_flat(bundled_package, tmp_path, capsys):
    package, _ = bundled_package("int4")
    done = subprocess.run(
        [sys.executable, "-c", SOAK, str(package), str(tmp_path), str(CONVERSATIONS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    with capsys.disabled():
        first, last = figures[0], figures[-1]
        print(
            f"\nsoak: after {CONVERSATIONS // 10} conversations {first[0]:,} bytes resident ({first[1]:,} anonymous), "
            f"after {CONVERSATIONS} {last[0]:,} ({last[1]:,})"
        )
    # From the second figure on: allocators settle first. A conversation's cache is about 150 KB; one that leaked
    # each time would show as 12 MB.
    settled = figures[1]
    for resident, anonymous, files in figures[2:]:
        assert anonymous < settled[1] + 2e6
        assert resident < settled[0] + 4e6  # pages of files come and go with the trims
        assert files == settled[2]
    assert [name.name for name in tmp_path.iterdir()] == ["saved"]
