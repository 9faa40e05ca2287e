"""Watching memory pressure: a model trims itself when its control group comes near its limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edge_qkv import InputError, Model, Session

from .engines import DEEP

PRESSURE = "/proc/pressure/memory"


@pytest.fixture(scope="module")
def package(random_package) -> Path:
    return random_package("onnx", DEEP)[1]


@pytest.fixture
def model(package):
    with Model(package, threads=1) as model:
        yield model


@pytest.fixture
def group(tmp_path) -> Path:
    """The files of a control group with half of its limit in use."""
    (tmp_path / "memory.current").write_text("50000000\n")
    (tmp_path / "memory.high").write_text("100000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    return tmp_path


def _committed(session: Session) -> int:
    return session.memory()["cache_committed"]


def _wait_until(condition) -> None:
    """The watch looks once a second; a minute is for machines that are very busy."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("the watch did not trim")


def test_the_nearer_the_limit_the_more_is_given(model, group):
    model.watch_pressure(group)
    with Session(model, context=8192) as idle, Session(model, context=8192) as last:
        for session in (idle, last):
            session.fill(8000)
        full = _committed(last)
        time.sleep(2.5)  # long enough for two looks: half of the limit is no reason to trim
        assert _committed(idle) == _committed(last) == full
        (group / "memory.current").write_text("92000000\n")
        _wait_until(lambda: _committed(idle) < full / 10)
        assert _committed(last) == full
        (group / "memory.current").write_text("98000000\n")
        _wait_until(lambda: _committed(last) < full / 10)
        last.evaluate([1])  # and it goes on


def test_closing_the_model_ends_the_watch(package, group):
    before = len(os.listdir("/proc/self/task"))
    with Model(package, threads=1) as model:
        model.watch_pressure(group)
        assert len(os.listdir("/proc/self/task")) > before
    _wait_until(lambda: len(os.listdir("/proc/self/task")) == before)


@pytest.mark.skipif(not os.access(PRESSURE, os.W_OK), reason="this kernel reports no memory pressure")
def test_the_kernel_takes_the_trigger(model):
    model.watch_pressure()
    assert any(
        os.path.realpath(f"/proc/self/fd/{fd}").endswith("memory.pressure")
        or os.path.realpath(f"/proc/self/fd/{fd}") == PRESSURE
        for fd in os.listdir("/proc/self/fd")
    )


def test_what_cannot_be_watched_is_one_sentence(model, group, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(InputError, match=f"{empty}: is not the directory of a control group"):
        model.watch_pressure(empty)
    model.watch_pressure(group)
    with pytest.raises(InputError, match="already"):
        model.watch_pressure(group)


@pytest.mark.parametrize(("android", "ours"), [(20, 2), (40, 3), (80, 3), (5, 1), (15, 3), (0, 0), (7, 0), (-1, 0)])
def test_androids_levels_have_one_of_ours(android, ours):
    from edge_qkv._native import library

    assert library().eqkv_android_trim_level(android) == ours
