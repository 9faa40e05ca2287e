"""The attention operator beside ONNX Runtime's: what is printed, and that a wrong answer is never timed."""

from __future__ import annotations

import json
from dataclasses import replace

from edge_qkv.bench import attention

OPTIONS = ("--depths", "0", "70", "--threads", "1", "--repeats", "2")


def test_every_operator_is_timed_at_every_depth(capsys):
    assert attention.main([*OPTIONS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["threads"] == 1
    names = [contestant.name for contestant in attention.CONTESTANTS]
    assert [(one["depth"], one["operator"]) for one in found["results"]] == [(d, n) for d in (0, 70) for n in names]
    assert all(len(one["ms"]) == 2 and min(one["ms"]) > 0 for one in found["results"])


def test_the_table_sets_the_first_operator_to_one(capsys):
    assert attention.main(OPTIONS) == 0
    rows = capsys.readouterr().out.splitlines()[2 : 2 + 2 * len(attention.CONTESTANTS)]
    assert [row.split()[-1] for row in rows if row.startswith(attention.FIRST)] == ["1.0", "1.0"]


def test_a_wrong_answer_is_an_error(monkeypatch, capsys):
    ours = attention.CONTESTANTS[2]
    wrong = replace(ours, bind=lambda *given: replace(ours.bind(*given), rows=2 * given[1]))
    monkeypatch.setattr(attention, "CONTESTANTS", (wrong,))
    assert attention.main(OPTIONS) == 2
    assert f"{ours.name} at depth 0 is off by" in capsys.readouterr().err
