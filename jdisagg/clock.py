"""Time as an argument: the one place that reads the machine's clock, and the seam the simulator replaces.

Deadlines travel between processes as remaining durations (seconds); instants are local monotonic seconds and
never leave the process.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and a way to wait on the same clock."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
