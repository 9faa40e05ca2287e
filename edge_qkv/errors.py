"""Errors a user can act on. The command line prints their one sentence and exits with 2."""


class EdgeQKVError(Exception):
    """Base of every error this package raises on purpose; `str(error)` is one sentence for a person."""


class InputError(EdgeQKVError):
    """A file, option or value that cannot be used; the message names it and the remedy."""


class ContextFull(EdgeQKVError):
    """The tokens do not fit into the session's context."""


class Cancelled(EdgeQKVError):
    """The session was cancelled from another thread."""
