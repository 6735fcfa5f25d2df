"""Middleware that intercepts the calls of any port.

    class Slow:
        async def unary(self, proceed, *args):          # any call that has one reply
            await asyncio.sleep(1.0)
            return await proceed(*args)

        def stream(self, proceed, *args):               # any call that has a stream of replies
            return proceed(*args)                       # (it returns an async iterator)

        async def reserve(self, proceed, call):         # this call of the port alone
            ...

    port = through(DecodePort, port, Slow())

A middleware is any object with methods for the calls that it intercepts. `proceed` is the port's
own method, which the middleware calls with the same arguments, with other arguments, or not at
all."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache, partial
from types import FunctionType
from typing import TypeVar, cast, get_origin

P = TypeVar("P")


class _Through:
    pass


@cache
def port_methods(protocol: type) -> tuple[tuple[str, str], ...]:
    """Returns (name, kind) of each method of a port. The kind is that of the general method that
    intercepts it: "unary", "stream", or "" for a function that is no call, which none does."""
    return tuple(
        (name, _kind(method))
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    )


def _kind(method: FunctionType) -> str:
    if inspect.iscoroutinefunction(method):
        return "unary"
    returned = get_origin(method.__annotations__["return"])
    return "stream" if returned in (AsyncGenerator, AsyncIterator) else ""


def through(protocol: type[P], port: P, middleware: object) -> P:
    """Wraps `port` with `middleware`.

    Args:
        middleware: Object with the general methods `unary` and `stream`, with methods that have the
            name of a port's method, or with both kinds. A method with a port's name takes
            precedence.
    """
    wrapped = _Through()
    for name, kind in port_methods(protocol):
        step = getattr(middleware, name, None) or getattr(middleware, kind or name, None)
        proceed = getattr(port, name)
        setattr(wrapped, name, partial(step, proceed) if step else proceed)
    return cast(P, wrapped)
