"""SIGTERM and SIGINT: the first signal ends a process gracefully, the second forces its end. Before
a process serves, either ends it at once."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGINT)


def end_at_once() -> None:
    """Makes either signal end the process silently, with 128 + its number as in a shell, until an
    event loop handles the signals. It raises no exception, which would wait for compiling threads.
    SIGUSR1 is ignored meanwhile."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in ENDS:
        signal.signal(number, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopSignals:
    """Handles both signals from now on. `force` is called at the second. Build it on the event
    loop."""

    def __init__(self, force: Callable[[], None] = lambda: None) -> None:
        self._force = force
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in ENDS:
            self._loop.add_signal_handler(number, self._signalled)

    @property
    def came(self) -> bool:
        """Whether the first signal has come."""
        return self._came.is_set()

    async def first(self) -> None:
        await self._came.wait()

    def raise_first(self) -> None:
        """Behaves as if the first signal had come."""
        self._came.set()

    def release(self) -> None:
        """Restores the handlers from before the event loop."""
        for number in ENDS:
            self._loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._came.is_set():
            self._force()
        self._came.set()
