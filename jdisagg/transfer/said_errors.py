"""Errors that a sender says on the data plane: what an error array carries as text, and what a
receiver makes of it.

Beside it, the same for errors that come by name over the control plane. Whatever comes, a pull
fails with one of two types."""

import re

from jdisagg import errors
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError

_SAID = re.compile(r"the sender says (\w+): (.*)", re.DOTALL)


def said(error: JdisaggError) -> str:
    """The text of an error array."""
    return f"the sender says {type(error).__name__}: {error.message}"


def heard(text: str) -> JdisaggError | None:
    """What a sender said in an array's error; None where the error is the engine's or a program's
    own."""
    found = _SAID.search(text)
    return named_error(*found.groups()) if found else None


def named_error(name: str, message: str) -> JdisaggError:
    """HandoffError or IncompatiblePeerError: what a pull may fail with."""
    named = getattr(errors, name, HandoffError)
    incompatible = isinstance(named, type) and issubclass(
        named, IncompatiblePeerError | errors.ConfigError
    )
    return (IncompatiblePeerError if incompatible else HandoffError)(message)
