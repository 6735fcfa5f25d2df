"""Identity of the caller of the current call, derived from the bearer token only.

An endpoint's guard stores the identity in a context variable, and the code that builds a request
reads it. KV is shared only within a scope that consists of the identity and of fields of the
message. A message can therefore narrow its scope but never widen it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one bearer token, which each router applies on its own. None means no limit.

    Attributes:
        streams: Streams that may run at the same time.
        requests_per_second: Mean rate of requests.
        tokens_per_second: Mean rate of prompt and answer tokens together.
    """

    streams: int | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a bearer token.

    Attributes:
        tenant: Tenant of the token, or empty if the token file names none.
        token: Digest of a required token without a tenant, so that each such token has its own
            scope. Else empty.
        key: Digest of any required token, else empty. Like `limits`, it does not identify a tenant.
        limits: Limits of the token.
    """

    tenant: str = ""
    token: str = ""
    key: str = field(default="", compare=False)
    limits: KeyLimits = field(default=KeyLimits(), compare=False)

    def tenant_of(self, said: str) -> str:
        """Returns the token's tenant, or the tenant `said` in the message if the token has none."""
        return self.tenant or said

    def cache_scope(self, said: str, salt: str) -> str:
        """Returns the KV sharing scope within the tenant. JSON keeps different combinations of the
        parts distinct."""
        sub_tenant = said if self.tenant and said != self.tenant else ""
        parts = (self.token, sub_tenant, salt)
        return json.dumps(parts) if any(parts) else ""


_ANYBODY = Caller()
_current: ContextVar[Caller] = ContextVar("jdisagg_caller", default=_ANYBODY)


def current() -> Caller:
    """Returns the current caller, or an anonymous one where no endpoint requires tokens."""
    return _current.get()


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Context manager in which `caller` is the current caller."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)
