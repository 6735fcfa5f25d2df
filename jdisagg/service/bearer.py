"""Bearer tokens: whether a call shows one that its service knows, whose it is, and how much it may
use.

A line of a token file is `TOKEN`, and behind it in any order `tenant=NAME`, `streams=N`,
`requests_per_second=X`, `tokens_per_second=X`, of which none need be there. Every token is
compared, whole, so that how long it takes tells nothing."""

import functools
import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping

from jdisagg.caller import Caller, KeyLimits
from jdisagg.errors import ConfigError

Tokens = tuple[str, ...] | Callable[[], tuple[str, ...]]
"""Lines of tokens that let in, or what gives the latest ones; none: all may call."""

_FIELD = re.compile(r"(?P<before>.*\S)\s+(?P<name>[a-z_]+)=(?P<value>\S.*)")
_FIELDS = ("tenant", "streams", "requests_per_second", "tokens_per_second")


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
    """The token of a line of a token file. Raises ConfigError for a line that is none."""
    return _entry(line)[0]


@functools.lru_cache(maxsize=16)
def _known(tokens: tuple[str, ...]) -> list[tuple[bytes, Caller]]:
    return [(_digest(token), caller) for token, caller in map(_entry, tokens)]


def _entry(line: str) -> tuple[str, Caller]:
    """Token, and who shows it."""
    token, said = line, dict[str, str]()
    while found := _FIELD.fullmatch(token):
        name, token = found["name"], found["before"]
        if name not in _FIELDS or name in said:
            wrong = "there twice" if name in said else "no field"
            raise ConfigError(
                f"behind a token stands {name!r}, which is {wrong}; there may be"
                f" {', '.join(_FIELDS)}, each once"
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
        raise ConfigError(f"behind a token, {name} must be a whole number above 0, got {text!r}")
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
        raise ConfigError(f"behind a token, {name} must be a number above 0, got {text!r}")
    return rate


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
