"""How an exporter says what it is doing."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator

# (what is being done, units done, units in all); units are bytes of the checkpoint, or 0 of 0 for a step
# whose length is not known.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Reports nothing."""


class Bar:
    """A tqdm bar on standard error for each step."""

    def __init__(self) -> None:
        from tqdm import tqdm  # not where only packages are run

        self._what, self._bar, self._tqdm = "", None, tqdm

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what = what
            self._bar = self._tqdm(desc=what, total=total or None, unit="B", unit_scale=True) if total else None
            if not total:
                self._tqdm.write(what)
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
