"""What the plan says against what the kernel counts, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_qkv import pack
from memory_probe import check, measure


@pytest.fixture(scope="module", params=[("onnx", "int4"), ("executorch", "8da4w")], ids=lambda made: made[0])
def package(request, bundled_package) -> Path:
    target, weights = request.param
    return bundled_package(weights, target)[0]


@pytest.fixture(scope="module")
def packed(package, tmp_path_factory) -> Path:
    return pack(package, tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("context", [1024, 8192, 32768])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_plan_is_what_is_measured(package, packed, context, is_packed):
    found = measure(package, context, packed if is_packed else None)
    assert found["packed"] == is_packed
    check(found)


def test_packed_weights_are_no_anonymous_memory(package, packed):
    plain, mapped = measure(package, 1024, None), measure(package, 1024, packed)
    saved = plain["steady_anonymous"] - mapped["steady_anonymous"]
    assert saved > plain["plan"]["weights_anonymous"] / 2
