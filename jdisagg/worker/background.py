"""Holds references to background tasks until they end, because asyncio may garbage-collect
unreferenced tasks."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

from jdisagg.clock import limit
from jdisagg.errors import JdisaggError
from jdisagg.settings.timeouts import HandoffTimeouts
from jdisagg.telemetry import Counters


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def quiet(self) -> bool:
        return not self._tasks

    def spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


class SideCalls:
    def __init__(self, counters: Counters, timeouts: HandoffTimeouts) -> None:
        self._counters = counters
        self._timeouts = timeouts
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()

    def send(self, message: Callable[[], Awaitable[None]]) -> None:
        self._run(self._send(message))

    def send_until_received(self, message: Callable[[], Awaitable[None]]) -> None:
        self._run(self._send_again(message))

    async def stop(self) -> None:
        self._stopping.set()
        while self._tasks:  # a call may start another one as it ends
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_again(self, message: Callable[[], Awaitable[None]]) -> None:
        for _ in range(self._timeouts.abort_tries):
            if await self._send(message):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.abort_pause_seconds):
                    await self._stopping.wait()
                    return

    async def _send(self, message: Callable[[], Awaitable[None]]) -> bool:
        try:
            with limit(self._timeouts.call_seconds):
                await message()
        except (JdisaggError, TimeoutError):
            self._counters.add("messages_to_senders_lost")
            return False
        return True

    def _run(self, call: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
