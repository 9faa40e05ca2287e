"""Ctrl-C during the work of a library, whatever that makes of it."""

from __future__ import annotations

import contextlib
import signal

import pytest

from edge_qkv import export
from edge_qkv.export.progress import interruptible


@pytest.fixture(autouse=True)
def _usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stays_one():
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_became_an_error_is_one_again():
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise RuntimeError("something failed") from error


def test_an_interrupt_that_was_swallowed_is_one_at_the_end():
    with pytest.raises(KeyboardInterrupt), interruptible(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_not_lost_where_a_library_is_imported(monkeypatch, tmp_path):
    def import_module(name):
        with contextlib.suppress(BaseException):  # as libraries do around what they can be without
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(export.importlib, "import_module", import_module)
    with pytest.raises(KeyboardInterrupt):
        export.export_package("onnx", "absent", tmp_path / "package")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="something failed"), interruptible():
        raise RuntimeError("something failed")


def test_a_handler_of_the_users_own_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert heard == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)
