"""Middleware that intercepts the calls of any port.

    class Slow:
        async def unary(self, proceed, *args):          # any call that has one reply
            await asyncio.sleep(1.0)
            return await proceed(*args)

        def stream(self, proceed, *args):               # any call that has a stream of replies
            return proceed(*args)

        async def reserve(self, proceed, call):         # this call of the port alone
            ...

    port = through(DecodePort, port, Slow())

A middleware is any object with methods for the calls that it intercepts. `proceed` is the port's
own method, which the middleware calls with the same arguments, with other arguments, or not at
all."""

import inspect
from functools import cache, partial
from typing import TypeVar, cast

P = TypeVar("P")


class _Through:
    pass


@cache
def port_methods(protocol: type) -> tuple[tuple[str, bool], ...]:
    """Returns (name, whether it streams its replies) of each method of a port."""
    return tuple(
        (name, not inspect.iscoroutinefunction(method))
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    )


def through(protocol: type[P], port: P, middleware: object) -> P:
    """Wraps `port` with `middleware`.

    Args:
        middleware: Object with the general methods `unary` and `stream`, with methods that have the
            name of a port's method, or with both kinds. A method with a port's name takes
            precedence.
    """
    wrapped = _Through()
    for name, streams in port_methods(protocol):
        step = getattr(middleware, name, None) or getattr(
            middleware, "stream" if streams else "unary", None
        )
        proceed = getattr(port, name)
        setattr(wrapped, name, partial(step, proceed) if step else proceed)
    return cast(P, wrapped)
