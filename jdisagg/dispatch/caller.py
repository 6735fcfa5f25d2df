"""Identity of the client of the current call, derived from its bearer token only.

Cached KV is shared only within a scope. The scope consists of the identity and of fields of the
request. A client can therefore narrow the scope of its requests but never widen it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Rate limits of one bearer token, summed over all routers. None means no limit."""

    streams: int | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a bearer token.

    Attributes:
        tenant: Tenant of the token, or empty if the token file names none.
        token: Digest of the token if it has no tenant, so that each such token has its own cache
            scope. Empty if the token has a tenant, or if tokens are not required.
        key: Digest of the token, or empty if tokens are not required. `key` and `limits` are not
            part of the identity: two callers that differ only in these compare equal.
    """

    tenant: str = ""
    token: str = ""
    key: str = field(default="", compare=False)
    limits: KeyLimits = field(default=KeyLimits(), compare=False)

    def tenant_of(self, said: str) -> str:
        return self.tenant or said

    def cache_scope(self, said: str, salt: str) -> str:
        """Returns the name of the scope, within the tenant, in which cached KV is shared.

        The name is JSON text, so that two scopes with different parts never have equal names. It is
        empty if all requests of the tenant share their KV."""
        sub_tenant = said if self.tenant and said != self.tenant else ""
        parts = (self.token, sub_tenant, salt)
        return json.dumps(parts) if any(parts) else ""


_ANYBODY = Caller()
_current: ContextVar[Caller] = ContextVar("jdisagg_caller", default=_ANYBODY)


def current() -> Caller:
    """Returns the caller of the current call, or an anonymous caller if tokens are not required."""
    return _current.get()


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)
