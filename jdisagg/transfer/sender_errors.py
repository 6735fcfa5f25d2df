"""Converts errors of the sender for transport: to the text of an error array on the data plane, or
by name on the control plane. A failed pull has one of two error types."""

import re

from jdisagg import errors
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError

_PATTERN = re.compile(r"sender error (\w+): (.*)", re.DOTALL)


def error_text(error: JdisaggError) -> str:
    """Returns the text of an error array."""
    return f"sender error {type(error).__name__}: {error.message}"


def sender_error(text: str) -> JdisaggError | None:
    """Extracts the sender's error from a failed array's text, or returns None if the transfer
    engine or an XLA program raised it."""
    found = _PATTERN.search(text)
    return named_error(*found.groups()) if found else None


def named_error(name: str, message: str) -> JdisaggError:
    """Returns the error as HandoffError or IncompatiblePeerError."""
    named = getattr(errors, name, HandoffError)
    incompatible = isinstance(named, type) and issubclass(
        named, IncompatiblePeerError | errors.ConfigError
    )
    return (IncompatiblePeerError if incompatible else HandoffError)(message)
