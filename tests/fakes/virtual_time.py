"""An event loop whose time jumps to the next timer: hours of waiting run in milliseconds, always in the same order.

`run_virtually(main)` runs a coroutine function to its end on a fresh loop. A state in which nothing will ever happen raises
`Stuck`, and so does time beyond `limit_seconds`, so that a lost wake-up fails instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """Nothing will ever happen, or not within the limit."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, limit_seconds: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit_seconds = limit_seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no task can run and no timer is set")
        self.now += max(0.0, timeout)
        if self.now > self._limit_seconds:
            raise Stuck(f"virtual time passed {self._limit_seconds} s")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, limit_seconds: float = 10_000.0) -> None:
        self._jumping = _JumpingSelector(limit_seconds)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """The clock of the running virtual loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtually(main: Callable[[], Coroutine[object, object, T]], limit_seconds: float = 10_000.0) -> T:
    loop = VirtualLoop(limit_seconds)
    try:
        return loop.run_until_complete(main())
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
