"""Errors a user can act on. The command line prints their one sentence and exits with 2."""


class EdgeQKVError(Exception):
    """Base of every error this package raises on purpose; `str(error)` is one sentence for a person."""


class InputError(EdgeQKVError):
    """A file, option or value that cannot be used; the message names it and the remedy."""


class ContextFull(EdgeQKVError):
    """The tokens do not fit into the session's context."""


class OverBudget(InputError):
    """The memory budget does not hold what was asked for; the message says what would fit."""


class Cancelled(EdgeQKVError):
    """The session was cancelled from another thread."""


def one_line(error: BaseException) -> str:
    """The start of another library's message, fit for our one sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
