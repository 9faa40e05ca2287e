"""Errors a user can act on. The command line prints their one sentence and exits with 2."""


class EdgeQKVError(Exception):
    """Base of every error this package raises on purpose; `str(error)` is one sentence for a person, fit for a
    terminal whatever the files hold that it names."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(EdgeQKVError):
    """A file, option or value that cannot be used; the message names it and the remedy."""


class ContextFull(EdgeQKVError):
    """The tokens do not fit into the session's context."""


class OverBudget(InputError):
    """The memory budget does not hold what was asked for; the message says what would fit."""


class Cancelled(EdgeQKVError):
    """The session was cancelled from another thread."""


def printable(text: str) -> str:
    """Text that may be out of a file as a terminal can show it: what would move its cursor, change its colours or turn
    its direction is escaped, as line ends are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The start of another library's message, fit for our one sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
