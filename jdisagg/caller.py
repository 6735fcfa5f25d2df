"""Who makes the call that is being served: what its bearer token says, and nothing that its message
says. A context variable, set by the guard of a door and read where a request is built.

KV is shared only within a scope, which is made of this and of what the message adds: a message can
narrow what it shares, never widen it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What may be used with one token, at each router: None is without bound.

    Args:
        streams: that run at a time.
        requests_per_second: on average.
        tokens_per_second: of prompts and answers together, on average.
    """

    streams: int | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who showed a token.

    Args:
        tenant: whom its token belongs to; empty where the token file does not say.
        token: a digest of the token, where tokens are asked for and this one names no tenant:
            then each token is somebody by itself.
        key: a digest of the token, whoever it belongs to; empty where none is asked for. It and
            `limits` say nothing of who somebody is.
    """

    tenant: str = ""
    token: str = ""
    key: str = field(default="", compare=False)
    limits: KeyLimits = field(default=KeyLimits(), compare=False)

    def tenant_of(self, said: str) -> str:
        """The tenant of a request whose message says `said`."""
        return self.tenant or said

    def cache_scope(self, said: str, salt: str) -> str:
        """What narrows whom the request shares KV with, beside its tenant. Parts are told apart,
        whatever they hold."""
        sub_tenant = said if self.tenant and said != self.tenant else ""
        parts = (self.token, sub_tenant, salt)
        return json.dumps(parts) if any(parts) else ""


_ANYBODY = Caller()
_current: ContextVar[Caller] = ContextVar("jdisagg_caller", default=_ANYBODY)


def current() -> Caller:
    """Who calls; nobody in particular outside of a door that asks for tokens."""
    return _current.get()


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Makes `caller` the current one."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)
