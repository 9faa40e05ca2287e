"""Targets: what is met, by how much one is missed, and what was not measured."""

from __future__ import annotations

import json

import pytest

from edge_qkv.bench.peers.targets import HEAD, Target, as_table
from edge_qkv.tables import table


def test_the_median_decides_in_the_direction_that_is_wanted():
    faster = Target("faster", 4, "at least", [1, 4, 9])
    smaller = Target("smaller", 1.1, "at most", [0.9, 1.2, 1.3])
    assert faster.met and faster.row() == ("faster", "at least 4x", "4.00 (1.00..9.00)x", "met")
    assert not smaller.met and smaller.row()[1:] == ("at most 1.1x", "1.20 (0.90..1.30)x", "missed by 9 %")
    assert Target("faster", 10, "at least", [9.995], "why").row()[-1] == "missed by 0.05 % (why)"


def test_what_was_not_measured_is_neither_met_nor_missed():
    target = Target("beside it", 2, "at least", note="it is not installed")
    assert target.met is None and target.figure is None
    assert target.row() == ("beside it", "at least 2x", "", "not measured (it is not installed)")
    assert json.loads(json.dumps(target.as_json()))["met"] is None


def test_targets_are_a_table():
    cells, head = as_table([Target("a", 1, "at least", [2]), Target("b", 1, "at least")])
    assert head == HEAD and len(table(cells, head).splitlines()) == 4


def test_another_direction_is_refused():
    with pytest.raises(ValueError, match="at least or at most"):
        Target("a", 1, ">=")
