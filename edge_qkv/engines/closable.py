"""Closing what another thread, or a signal handler, may close while it is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from edge_qkv.errors import InputError


class Closable:
    """Closed once: by `close`, or at the end of the object's life; never during a call."""

    _what: str  # its name in messages

    def __init__(self) -> None:
        self._in_use = threading.RLock()  # held during a call, so that closing waits for it
        # The lock lets its own thread in again, which only a signal handler tries that runs during a call.
        self._in_call = self._close_after = self._closed = False

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Around everything that needs the object open."""
        with self._in_use:
            if self._in_call:
                raise InputError(f"the {self._what} is in a call of this thread; use it when the call has returned")
            if self._closed:
                raise InputError(f"the {self._what} is closed; open a new one")
            try:
                self._in_call = True
                yield
            finally:
                self._in_call = False
                if self._close_after:
                    self.close()

    def close(self) -> None:
        """Frees the memory, after a call that another thread is in, or this one where a signal handler closes."""
        with self._in_use:
            if self._in_call:
                self._close_after = True
            elif not self._closed:
                self._closed = True
                self._free()

    def _free(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
