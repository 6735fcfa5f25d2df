"""An event loop whose time jumps to the next timer, so that hours of waiting run in milliseconds
and always in the same order.

`run_virtually(main)` runs a coroutine function to its end on a fresh loop. It raises `Stuck` if no
task can run and no timer is set, or if virtual time passes `limit_seconds`.

Ready callbacks, and timers of the same instant, run in the order in which they were scheduled. All
callbacks share one context, so that a context variable set by one callback is visible to all."""

import asyncio
import contextlib
import contextvars
import sys
import typing
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import TypeVar

T = TypeVar("T")

# Cancelled timers stay in the heap until their time. They are removed earlier if there are more
# than this many of them and if they are the majority.
MOST_CANCELLED = 256


class Stuck(AssertionError):
    """Raised if no task can run and no timer is set, or if virtual time passes the limit."""


class _Handle(list[typing.Any]):
    __slots__ = ()

    def cancel(self) -> None:
        if self[_CALLBACK] is not _nothing:
            self[_CALLBACK], self[_ARGUMENTS] = _nothing, ()  # drops the references
            loop = self[_LOOP]
            if loop is not None:
                loop.count_cancelled()

    def cancelled(self) -> bool:
        return self[_CALLBACK] is _nothing

    def when(self) -> float:
        return self[0]

    def __repr__(self) -> str:
        return f"<handle of {self[_CALLBACK]!r}>"


_CALLBACK, _ARGUMENTS, _LOOP = 2, 3, 4


def _nothing() -> None: ...


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop on virtual time, without threads, sockets or signals."""

    def __init__(self, limit_seconds: float = 10_000.0) -> None:
        self._limit_seconds = limit_seconds
        self._now = 0.0
        self._ready: list[_Handle] = []
        self._timers: list[_Handle] = []
        self._scheduled = 0
        self._cancelled = 0
        self._stopping = self._running = self._closed = False
        self._on_exception: (
            Callable[[asyncio.AbstractEventLoop, dict[str, object]], object] | None
        ) = None
        self._generators: set[weakref.ref[AsyncGenerator[object, object]]] = set()

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle((0.0, 0, callback, args, None))
        self._ready.append(handle)
        return handle  # type: ignore[return-value]

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._scheduled += 1
        handle = _Handle((self._now + delay, self._scheduled, callback, args, self))
        heappush(self._timers, handle)
        return handle  # type: ignore[return-value]

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._scheduled += 1
        handle = _Handle((when, self._scheduled, callback, args, self))
        heappush(self._timers, handle)
        return handle  # type: ignore[return-value]

    def count_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [handle for handle in self._timers if handle[_CALLBACK] is not _nothing]
            heapify(self._timers)
            self._cancelled = 0

    def create_future(self) -> "asyncio.Future[typing.Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[object, None, T] | Coroutine[object, object, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        # Without a name asyncio would format a number for each task.
        name = name or "virtual"
        return asyncio.Task(coro, loop=self, name=name, context=context)  # type: ignore[arg-type]

    def run_forever(self) -> None:
        assert not self._closed and not self._running, (
            "a loop runs once at a time, until it is closed"
        )
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._remember, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self._run_until_stopped()
        finally:
            self._stopping = self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_until_stopped(self) -> None:
        while not self._stopping:
            timers = self._timers
            if timers:
                if not self._ready:
                    self._go_on(timers)
                now = self._now
                while timers and timers[0][0] <= now:
                    handle = heappop(timers)
                    if handle[_CALLBACK] is _nothing:
                        self._cancelled -= 1
                    else:
                        handle[_LOOP] = None
                        self._ready.append(handle)
            elif not self._ready:
                raise Stuck("no task can run and no timer is set")
            left = iter(self._ready)
            self._ready = []
            for handle in left:
                try:
                    handle[_CALLBACK](*handle[_ARGUMENTS])
                except (SystemExit, KeyboardInterrupt):
                    self._ready[:0] = left
                    raise
                except BaseException as error:
                    self.call_exception_handler(
                        {
                            "message": f"exception in {handle!r}",
                            "exception": error,
                            "handle": handle,
                        }
                    )

    def _go_on(self, timers: list[_Handle]) -> None:
        while timers and timers[0][_CALLBACK] is _nothing:
            heappop(timers)
            self._cancelled -= 1
        if not timers:
            raise Stuck("no task can run and no timer is set")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
        if self._now > self._limit_seconds:
            raise Stuck(f"virtual time passed {self._limit_seconds} s")

    def run_until_complete(
        self,
        future: "Generator[object, None, T] | Coroutine[object, object, T] | asyncio.Future[T]",
    ) -> T:  # type: ignore[override]
        task = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        task.add_done_callback(self._end)
        try:
            self.run_forever()
        finally:
            # Otherwise a later cancellation of this task would stop the loop's next run.
            task.remove_done_callback(self._end)
        return task.result()

    def _end(self, _: "asyncio.Future[typing.Any]") -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    # asyncio calls `get_debug` for each future; `bool()` returns False and is fast.
    get_debug = staticmethod(bool)  # type: ignore[assignment]

    def set_debug(self, enabled: bool) -> None: ...

    async def shutdown_asyncgens(self) -> None:
        for known in list(self._generators):
            if (generator := known()) is not None:
                await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, object]], object] | None
    ) -> None:
        self._on_exception = handler

    def get_exception_handler(
        self,
    ) -> Callable[[asyncio.AbstractEventLoop, dict[str, object]], object] | None:
        return self._on_exception

    def call_exception_handler(self, context: dict[str, object]) -> None:
        if self._on_exception is not None:
            self._on_exception(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, object]) -> None:
        error = context.get("exception")
        asyncio.log.logger.error(  # type: ignore[attr-defined]
            "%s",
            context.get("message"),
            exc_info=error if isinstance(error, BaseException) else None,
        )

    def _remember(self, generator: AsyncGenerator[object, object]) -> None:
        self._generators.add(weakref.ref(generator, self._generators.discard))

    def _finalize(self, generator: AsyncGenerator[object, object]) -> None:
        self.call_soon(self.create_task, generator.aclose())


class VirtualClock:
    """Clock that returns the virtual time of an event loop. It uses the loop that runs when the
    clock is created. If no loop runs then, it uses the loop that runs when the clock is first
    read."""

    def __init__(self) -> None:
        if _runs_a_loop():
            self.now = asyncio.get_running_loop().time

    def now(self) -> float:
        self.now = asyncio.get_running_loop().time
        return self.now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtually(
    main: Callable[[], Coroutine[object, object, T]], limit_seconds: float = 10_000.0
) -> T:
    """Runs `main()` to its end on a fresh loop, then cancels remaining tasks and closes the loop.
    Returns the result of `main()`.

    The call blocks. If this thread already runs a loop, as in a notebook, `main` runs in another
    thread."""
    if _runs_a_loop():
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(_run, main, limit_seconds).result()
    # Tasks of this loop share one context, a copy, so that their changes do not leak.
    return contextvars.copy_context().run(_run, main, limit_seconds)


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(main: Callable[[], Coroutine[object, object, T]], limit_seconds: float) -> T:
    loop = VirtualLoop(limit_seconds)
    try:
        return loop.run_until_complete(main())
    except (KeyboardInterrupt, SystemExit):
        # The results of the other tasks no longer matter.
        loop.set_exception_handler(lambda loop, context: None)
        raise
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    cancelled: set[asyncio.Task[object]] = set()
    while tasks := asyncio.all_tasks(loop):
        for task in tasks - cancelled:  # once: a second cancel would interrupt its clean-up
            task.cancel()
        cancelled |= tasks
        # A task that received KeyboardInterrupt raises it again; the other tasks still have to end.
        with contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
