"""Handles SIGTERM and SIGINT: the first signal ends a process gracefully, the second forces its
end. Before a process serves, either signal ends the process at once."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGINT)


def end_at_once() -> None:
    """Makes either signal end the process silently with status 128 + the signal's number, until an
    event loop handles the signals. No exception is raised, because the exit would wait for
    compiling threads. SIGUSR1 is ignored meanwhile."""

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    for number in ENDS:
        signal.signal(number, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StopSignals:
    """Handles both signals once constructed on the event loop. The second signal calls `force`."""

    def __init__(self, force: Callable[[], None] = lambda: None) -> None:
        self._force = force
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in ENDS:
            self._loop.add_signal_handler(number, self._signalled)

    @property
    def came(self) -> bool:
        """Whether the first signal has been received."""
        return self._came.is_set()

    async def first(self) -> None:
        await self._came.wait()

    def raise_first(self) -> None:
        """Simulates the first signal."""
        self._came.set()

    def release(self) -> None:
        """Restores the handlers that were set before the event loop."""
        for number in ENDS:
            self._loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._came.is_set():
            self._force()
        self._came.set()
