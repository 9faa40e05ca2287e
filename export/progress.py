"""How an exporter says what it is doing."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

# (what is being done, units done, units in all); units are bytes of the checkpoint, or 0 of 0 for a step
# whose length is not known.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Reports nothing."""


class Bar:
    """A line on standard error for each step, and on a terminal a tqdm bar for one whose length is known."""

    def __init__(self) -> None:
        self._what, self._bar = "", None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what = what
            if total and sys.stderr.isatty():
                from tqdm import tqdm  # not where only packages are run

                self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True)
            else:
                print(what, file=sys.stderr)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps libraries from reporting their steps on standard output, and from warning about their own internals."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ends with `KeyboardInterrupt` after Ctrl-C, also where it reached a library that made an error of its own of it,
    or nothing: PyTorch does where it calls Python from C++."""
    heard = []

    def interrupt(number: int, frame) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    main = threading.current_thread() is threading.main_thread()
    usual = [number for number in (signal.SIGINT, signal.SIGTERM) if main and _raises(number)]
    for number in usual:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        if heard:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in usual:
            signal.signal(number, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt


def _raises(number: int) -> bool:
    return signal.getsignal(number) is signal.default_int_handler
