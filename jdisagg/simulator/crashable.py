"""Workers that may die: what calls to a process, and from one, do when it ends from one moment to
the next, as after `kill -9`.

Before the ports of any worker. Calls under way fail, new ones too, and nothing that the dead one
still sends arrives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ParamSpec, TypeVar

from jdisagg.errors import UnavailableError
from jdisagg.messages.ports import close_stream

P = ParamSpec("P")
T = TypeVar("T")


class Crash:
    """Whether one process has died."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()


class Crashable:
    """A port's middleware. `crashes`: of the processes that a call needs, the worker's and, between
    two workers, the caller's."""

    def __init__(self, *crashes: Crash) -> None:
        self._crashes = crashes

    def _check(self) -> None:
        for crash in self._crashes:
            if crash.dead.is_set():
                raise UnavailableError("connection refused")

    async def unary(self, proceed: Callable[P, Awaitable[T]], *args: P.args, **kw: P.kwargs) -> T:
        """Calls that are answered at once."""
        self._check()
        return await proceed(*args, **kw)

    async def _long(self, proceed: Callable[P, Awaitable[T]], *args: P.args, **kw: P.kwargs) -> T:
        self._check()
        return await self._during(proceed(*args, **kw))

    prefill = reserve = resume_source = fetch = _long

    async def stream(
        self, proceed: Callable[P, AsyncIterator[T]], *args: P.args, **kw: P.kwargs
    ) -> AsyncIterator[T]:
        self._check()
        items = proceed(*args, **kw)
        try:
            while True:
                try:
                    yield await self._during(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if not any(crash.dead.is_set() for crash in self._crashes):
                await close_stream(items)

    async def _during(self, call: Awaitable[T]) -> T:
        """What `call` returns, unless one of the processes dies first."""
        task = asyncio.ensure_future(call)
        deaths = [asyncio.ensure_future(crash.dead.wait()) for crash in self._crashes]
        try:
            await asyncio.wait({task, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or any(crash.dead.is_set() for crash in self._crashes):
                raise UnavailableError("connection reset")
            return task.result()
        finally:
            for one in (task, *deaths):
                one.cancel()
            await asyncio.gather(task, *deaths, return_exceptions=True)
