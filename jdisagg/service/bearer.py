"""Bearer tokens: whether a call shows one that its service knows.

Every token is compared, whole, so that how long it takes tells nothing."""

import functools
import hashlib
import hmac
from collections.abc import Callable

Tokens = tuple[str, ...] | Callable[[], tuple[str, ...]]


def admits(tokens: Tokens, shown: str | bytes) -> bool:
    """Whether a call may pass.

    Args:
      tokens: Those that let in, or what gives the latest ones; none: all may call.
      shown: The value of its `authorization` header, "Bearer ..."; empty where it has none.
    """
    digests = _digests(tokens() if callable(tokens) else tokens)
    digest = _digest(shown.removeprefix("Bearer ") if isinstance(shown, str) else "")
    return not digests or any([hmac.compare_digest(digest, known) for known in digests])


@functools.lru_cache(maxsize=16)
def _digests(tokens: tuple[str, ...]) -> list[bytes]:
    return [_digest(token) for token in tokens]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
