"""Transfers an error from the sender of KV to the receiver. On the data plane the sender posts an
error array, whose failure carries the error as text. On the control plane a message carries the
name and text of the error. The receiver's pull fails with HandoffError or IncompatiblePeerError."""

import re

from jdisagg import errors
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError

_PATTERN = re.compile(r"sender error (\w+): (.*)", re.DOTALL)


def error_text(error: JdisaggError) -> str:
    return f"sender error {type(error).__name__}: {error.message}"


def sender_error(text: str) -> JdisaggError | None:
    """Converts the text of a failed array to the sender's error. Returns None if the text comes
    from the transfer engine or an XLA program instead."""
    found = _PATTERN.search(text)
    return named_error(*found.groups()) if found else None


def named_error(name: str, message: str) -> JdisaggError:
    """Returns the error with this class name, which must be HandoffError or
    IncompatiblePeerError."""
    named = getattr(errors, name, HandoffError)
    incompatible = isinstance(named, type) and issubclass(
        named, IncompatiblePeerError | errors.ConfigError
    )
    return (IncompatiblePeerError if incompatible else HandoffError)(message)
