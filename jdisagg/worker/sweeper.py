"""A task that calls a function every so often on the clock, whether or not there is work. Leases end here.

When the function fails, nothing would end leases any more: `failed` is told, and the sweeping ends.
"""

import asyncio
from collections.abc import Callable

from jdisagg.clock import Clock

# How often at least: a mesh that hangs is found out by the sweep, too, however long leases are.
MOST_SECONDS = 1.0


class Sweeper:
    """Calls `sweep` four times in the shortest lease, and each second at least."""

    def __init__(self, clock: Clock, lease_seconds: float, sweep: Callable[[float], None], failed: Callable[[Exception], None]) -> None:
        self._clock = clock
        self._every_seconds = min(lease_seconds / 4, MOST_SECONDS)
        self._sweep = sweep
        self._failed = failed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._every_seconds)
            try:
                self._sweep(self._clock.now())
            except Exception as error:
                self._failed(error)
                return
