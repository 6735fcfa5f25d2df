"""SIGTERM and SIGINT of our processes: the first asks for a graceful end, the second forces it.
Before a process serves there is nothing to end gracefully: then either ends it at once."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGINT)


def end_at_once() -> None:
    """From now on, and until an event loop takes the signals over, either ends the process without
    a word, with 128 + its number as a shell would say. Not by an exception: that would wait for the
    threads that compile, and compiling is not interrupted. SIGUSR1 is passed over meanwhile."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in ENDS:
        signal.signal(number, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopSignals:
    """Catches both from now on. `force` is called at the second. Build it where the loop runs."""

    def __init__(self, force: Callable[[], None] = lambda: None) -> None:
        self._force = force
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in ENDS:
            self._loop.add_signal_handler(number, self._signalled)

    @property
    def came(self) -> bool:
        """Whether the first has come."""
        return self._came.is_set()

    async def first(self) -> None:
        await self._came.wait()

    def raise_first(self) -> None:
        """As if the first had come."""
        self._came.set()

    def release(self) -> None:
        """Gives both back to who had them before the loop."""
        for number in ENDS:
            self._loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._came.is_set():
            self._force()
        self._came.set()
