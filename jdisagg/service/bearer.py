"""Bearer tokens: checks the token of a call, and returns the token's tenant and limits.

A line of a token file is `TOKEN`, optionally followed in any order by `tenant=NAME`, `streams=N`,
`requests_per_second=X` and `tokens_per_second=X`. Comparisons take the same time for every token,
so that response times reveal nothing about valid tokens."""

import functools
import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping

from jdisagg.dispatch.caller import Caller, KeyLimits
from jdisagg.errors import ConfigError

Tokens = tuple[str, ...] | Callable[[], tuple[str, ...]]
"""Lines of a token file, or a function that returns the current lines. Without any line, all calls
are accepted."""

_FIELD = re.compile(r"(?P<before>.*\S)\s+(?P<name>[a-z_]+)=(?P<value>\S.*)")
_SCHEME = re.compile(r"^bearer +", re.IGNORECASE)
_FIELDS = ("tenant", "streams", "requests_per_second", "tokens_per_second")


def identify(tokens: Tokens, shown: str | bytes) -> Caller | None:
    """Returns the identity of a call's client, or None if the call must be refused because its
    token is missing or unknown.

    Args:
        tokens: Lines of the token file. If there are none, every call is accepted, with an
            anonymous identity.
        shown: Value of the call's `authorization` header, "Bearer TOKEN". Empty if the call has no
            such header.
    """
    known = _known(tokens() if callable(tokens) else tokens)
    if not known:
        return Caller()
    digest = _digest(_SCHEME.sub("", shown, count=1) if isinstance(shown, str) else "")
    found = [caller for own, caller in known if hmac.compare_digest(digest, own)]
    return found[0] if found else None


def token_of(line: str) -> str:
    """Raises ConfigError for an invalid line."""
    return _entry(line)[0]


@functools.lru_cache(maxsize=16)
def _known(tokens: tuple[str, ...]) -> list[tuple[bytes, Caller]]:
    return [(_digest(token), caller) for token, caller in map(_entry, tokens)]


def _entry(line: str) -> tuple[str, Caller]:
    token, said = line, dict[str, str]()
    while found := _FIELD.fullmatch(token):
        name, token = found["name"], found["before"]
        if name not in _FIELDS or name in said:
            wrong = "given twice" if name in said else "unknown"
            raise ConfigError(
                f"field {name!r} after a token is {wrong}; use {', '.join(_FIELDS)}, each once"
            )
        said[name] = found["value"].strip()
    tenant, key = said.get("tenant", ""), _digest(token).hex()[:32]
    limits = KeyLimits(
        streams=_whole(said, "streams"),
        requests_per_second=_rate(said, "requests_per_second"),
        tokens_per_second=_rate(said, "tokens_per_second"),
    )
    return token, Caller(tenant, "" if tenant else key, key, limits)


def _whole(said: Mapping[str, str], name: str) -> int | None:
    text = said.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"after a token, {name} must be a whole number above 0, got {text!r}")
    return None if text is None else int(text)


def _rate(said: Mapping[str, str], name: str) -> float | None:
    text = said.get(name)
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"after a token, {name} must be a number above 0, got {text!r}")
    return rate


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
