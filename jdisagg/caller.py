"""The identity of the caller of the call being served, taken from its bearer token only.

A context variable holds it. The guard of an endpoint sets it, and the code that builds a request
reads it. KV is shared only within a scope made of this identity and of fields of the message, so a
message can narrow its scope but never widen it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one token at each router. None means no limit.

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
        token: Digest of a required token that has no tenant, so that each such token is a scope of
            its own.
        key: Digest of any required token, else empty. Like `limits`, it does not identify a tenant.
        limits: Limits of the token.
    """

    tenant: str = ""
    token: str = ""
    key: str = field(default="", compare=False)
    limits: KeyLimits = field(default=KeyLimits(), compare=False)

    def tenant_of(self, said: str) -> str:
        """Returns the tenant of a request whose message names tenant `said`."""
        return self.tenant or said

    def cache_scope(self, said: str, salt: str) -> str:
        """Returns the part of the KV sharing scope beyond the tenant, as JSON, so that no two
        combinations of parts collide."""
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
    """Makes `caller` the current one."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)
