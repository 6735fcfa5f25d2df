"""Handles SIGTERM and SIGINT. The first signal ends the process gracefully. The second signal ends
it at once. While a process is still starting, the first signal ends it at once."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGINT)


def end_at_once() -> None:
    """Makes SIGTERM and SIGINT end the process silently, with exit status 128 + signal number.

    This applies until an event loop handles the signals. No exception is raised, because a normal
    exit would wait for threads that compile."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in ENDS:
        signal.signal(number, end)


class StopSignals:
    """Handles SIGTERM and SIGINT of this process from its construction on. Must be constructed on
    the event loop. `force`: function that each signal after the first calls."""

    def __init__(self, force: Callable[[], None] = lambda: None) -> None:
        self._force = force
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in ENDS:
            self._loop.add_signal_handler(number, self._signalled)

    @property
    def came(self) -> bool:
        return self._came.is_set()

    async def first(self) -> None:
        await self._came.wait()

    def raise_first(self) -> None:
        self._came.set()

    def release(self) -> None:
        """Stops handling the signals. They then have their default effect."""
        for number in ENDS:
            self._loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._came.is_set():
            self._force()
        self._came.set()
