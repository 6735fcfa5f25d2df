"""Middleware for ports: one mechanism that intercepts the calls of any port.

    class Slow:
        async def unary(self, proceed, *args):          # any call that has one reply
            await asyncio.sleep(1.0)
            return await proceed(*args)

        def stream(self, proceed, *args):               # any call that has a stream of replies
            return proceed(*args)

        async def reserve(self, proceed, call):         # this call of the port alone
            ...

    port = through(DecodePort, port, Slow())

A middleware is any object and intercepts the calls that it has methods for. `proceed` is the port's
own method, which a middleware calls with the same arguments, with others, or not at all. Other
calls reach the port directly at no cost. The methods of a port, and which of them stream, are read
from its Protocol once. The calls of a wrapped port are bound when it is wrapped."""

import inspect
from functools import cache, partial
from typing import TypeVar, cast

P = TypeVar("P")


class _Through:
    """A port whose methods are bound at its creation."""


@cache
def port_methods(protocol: type) -> tuple[tuple[str, bool], ...]:
    """Returns the methods of a port's Protocol, each with whether it streams (is no coroutine)."""
    return tuple(
        (name, not inspect.iscoroutinefunction(method))
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    )


def through(protocol: type[P], port: P, middleware: object) -> P:
    """Wraps `port` with `middleware`.

    Args:
        protocol: Protocol that `port` implements.
        port: Receiver of the calls.
        middleware: Object with methods `unary` and `stream`, with methods named as the port's, or
            with both. Named methods take precedence.

    Returns:
        A port whose calls pass the middleware.
    """
    wrapped = _Through()
    for name, streams in port_methods(protocol):
        step = getattr(middleware, name, None) or getattr(
            middleware, "stream" if streams else "unary", None
        )
        proceed = getattr(port, name)
        setattr(wrapped, name, partial(step, proceed) if step else proceed)
    return cast(P, wrapped)
