"""Interface of a monotonic clock, with helpers for waits: time limits, a queue, and
tasks in the background.

Components read the time through `Clock` only, so that the simulator can replace it. Clocks of
different processes are not comparable. Times read from the clock therefore never leave the process,
and messages contain the number of seconds left until a deadline instead."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Generic, Protocol, TypeVar

from jdisagg.errors import DeadlineExceededError

T = TypeVar("T")


class Clock(Protocol):
    """A monotonic clock in seconds, with `sleep`."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class limit:
    """Context manager that raises `late` (or TimeoutError) if its block takes more than `seconds`.

    `with limit(seconds): await ...` is cheaper than `asyncio.timeout`, because entry and exit are
    not coroutines."""

    __slots__ = ("_seconds", "_late", "_task", "_cancelling", "_timer", "_passed")

    def __init__(self, seconds: float, late: Exception | None = None) -> None:
        self._seconds = seconds
        self._late = late
        self._passed = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "time is limited within a task"
        self._task, self._cancelling = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._timer.cancel()
        if (
            self._passed
            and self._task.uncancel() <= self._cancelling
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise self._late or TimeoutError() from error

    def _pass(self) -> None:
        self._passed = True
        self._task.cancel()


@contextlib.asynccontextmanager
async def turn(lock: asyncio.Lock, seconds: float, what: str) -> AsyncIterator[None]:
    """Context manager that holds `lock`, and waits at most `seconds` for it.

    Raises:
        DeadlineExceededError: Other tasks held the lock for `seconds`.
    """
    late = DeadlineExceededError(
        f"{what} did not begin within {seconds:g} s, because another update, sleep or wake"
        " runs; try again when it has ended, or with a longer deadline_seconds"
    )
    with limit(seconds, late):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


async def unended(tasks: "Iterable[asyncio.Task[T]]", seconds: float) -> "list[asyncio.Task[T]]":
    """Waits until all tasks are done, but at most `seconds`. Returns the tasks that are not done
    then."""
    left = {task for task in tasks if not task.done()}
    if left:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def ended(task: "asyncio.Task[T]") -> None:
            left.discard(task)
            if not left:
                wake()

        for task in left:
            task.add_done_callback(ended)
        timer = loop.call_later(seconds, wake)
        try:
            await waiter
        finally:
            timer.cancel()
            for task in left:
                task.remove_done_callback(ended)
    return list(left)


async def together(work: "Iterable[Coroutine[object, object, T]]") -> list[T]:
    """Runs coroutines at the same time and returns their results in order. If one raises an error,
    or the caller is cancelled, all have ended before this call does."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except Exception:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def to_the_end(clean_up: Coroutine[object, object, None]) -> None:
    """Runs the coroutine `clean_up` to its end, even if the calling task is cancelled. In this
    case, raises CancelledError after the clean-up."""
    task, cancelled = asyncio.create_task(clean_up), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        _seen(task)
        raise asyncio.CancelledError
    task.result()


async def within(future: "asyncio.Future[T]", seconds: float) -> T:
    """Waits for the future's result. Raises TimeoutError after `seconds`. Never cancels the future,
    even if the waiting task is cancelled."""
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        timer = loop.call_later(seconds, wake)
        future.add_done_callback(wake)
        try:
            await waiter
        except BaseException:
            future.add_done_callback(_seen)
            raise
        finally:
            timer.cancel()
            future.remove_done_callback(wake)
        if not future.done():
            future.add_done_callback(_seen)
            raise TimeoutError
    return future.result()


def _seen(future: "asyncio.Future[T]") -> None:
    """Reads a future's error, so that asyncio does not log the error as unread."""
    if not future.cancelled():
        future.exception()


class Mailbox(Generic[T]):
    """An unbounded queue with one reader, which is cheaper than `asyncio.Queue`.

    `put_nowait` never waits. Invariant: each item is returned exactly once, in insertion order,
    even if a `get` was cancelled."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        """Waits for the next item and returns it. Only one reader may wait at a time."""
        while not self._items:
            assert self._waiter is None, "a mailbox has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class BackgroundTasks:
    """Holds references to tasks until they end, because asyncio may garbage-collect unreferenced
    tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def quiet(self) -> bool:
        return not self._tasks

    def spawn(self, work: Coroutine[None, None, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def ended(self) -> None:
        while self._tasks:  # a task may start another one as it ends
            await asyncio.gather(*self._tasks, return_exceptions=True)
