"""SIGTERM and SIGINT of a process that ends gracefully: the first asks it to, the second hurries it. Before it serves there is nothing to
end gracefully: then either ends it at once.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType


def end_at_once() -> None:
    """From now on, and until an event loop takes the signals over, either ends the process without a word, with 128 + its number as a
    shell would say. Not by an exception: that would wait for the threads that compile, and compiling is not interrupted."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


class Signals:
    """Catches both from now on. `hurry` is called at the second."""

    def __init__(self, hurry: Callable[[], None] = lambda: None) -> None:
        self._hurry = hurry
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    @property
    def came(self) -> bool:
        """Whether the first has come."""
        return self._came.is_set()

    async def first(self) -> None:
        await self._came.wait()

    def _signalled(self) -> None:
        if self._came.is_set():
            self._hurry()
        self._came.set()
