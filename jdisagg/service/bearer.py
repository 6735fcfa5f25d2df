"""Bearer tokens: whether a call shows one that its service knows, and whose it is.

Every token is compared, whole, so that how long it takes tells nothing."""

import functools
import hashlib
import hmac
import re
from collections.abc import Callable

from jdisagg.caller import Caller

Tokens = tuple[str, ...] | Callable[[], tuple[str, ...]]
"""Tokens that let in, or what gives the latest ones; none: all may call. Behind a token may stand
to whom it belongs: `TOKEN tenant=NAME`."""

_LINE = re.compile(r"(?P<token>.*\S)\s+tenant=(?P<tenant>.*\S)\s*")


def identify(tokens: Tokens, shown: str | bytes) -> Caller | None:
    """Who calls; None where the call may not pass.

    Args:
      tokens: Those that let in.
      shown: The value of its `authorization` header, "Bearer ..."; empty where it has none.
    """
    known = _known(tokens() if callable(tokens) else tokens)
    if not known:
        return Caller()
    digest = _digest(shown.removeprefix("Bearer ") if isinstance(shown, str) else "")
    found = [caller for own, caller in known if hmac.compare_digest(digest, own)]
    return found[0] if found else None


def token_of(line: str) -> str:
    """The token of a line of a token file."""
    return _split(line)[0]


@functools.lru_cache(maxsize=16)
def _known(tokens: tuple[str, ...]) -> list[tuple[bytes, Caller]]:
    return [_entry(line) for line in tokens]


def _entry(line: str) -> tuple[bytes, Caller]:
    token, tenant = _split(line)
    digest = _digest(token)
    return digest, Caller(tenant=tenant) if tenant else Caller(token=digest.hex()[:32])


def _split(line: str) -> tuple[str, str]:
    """Token and tenant."""
    found = _LINE.fullmatch(line)
    return (found["token"], found["tenant"]) if found else (line, "")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
