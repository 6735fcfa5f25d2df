"""SIGTERM and SIGINT of a process that ends gracefully: the first asks it to, the second hurries it."""

import asyncio
import signal
from collections.abc import Callable


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
