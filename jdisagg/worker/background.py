"""Background tasks that are referenced until they end, so that they are not garbage-collected."""

import asyncio
from collections.abc import Coroutine


class BackgroundTasks:
    """A set of running tasks on one event loop."""

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
