"""Something between a port and its callers: every call goes through it, one file for all ports.

    class Slow:
        async def unary(self, proceed, *args):          # any call that has one reply
            await asyncio.sleep(1.0)
            return await proceed(*args)

        def stream(self, proceed, *args):               # any call that has a stream of replies
            return proceed(*args)

        async def reserve(self, proceed, call):         # this call of the port alone
            ...

    port = through(DecodePort, port, Slow())

A middleware is any object; it takes part in what it has methods for. `proceed` is the port's own
method; a middleware calls it with the same arguments, others, or not at all. What it has no method
for goes straight to the port and costs nothing. Which methods a port has, and which of them
stream, is read from its Protocol once; the calls of one wrapped port are bound when it is wrapped.
"""

import inspect
from functools import cache, partial
from typing import TypeVar, cast

P = TypeVar("P")


class _Through:
    """A port whose methods are bound when it is made."""


@cache
def port_methods(protocol: type) -> tuple[tuple[str, bool], ...]:
    """The methods of a port's Protocol, each with whether it streams (it is no coroutine)."""
    return tuple(
        (name, not inspect.iscoroutinefunction(method))
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    )


def through(protocol: type[P], port: P, middleware: object) -> P:
    """Puts `middleware` before `port`.

    Args:
      protocol: The Protocol that `port` implements; the result implements it.
      port: Where calls go on to.
      middleware: An object with methods `unary` and `stream`, or with methods named as the port's,
        or both; the named ones come first.

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
