"""Code that the gRPC guard and the HTTP guard share: draining at shutdown, the time limit of a
stream, and errors.

A guard is the code that every call to a server passes through first. A drain is the phase of a
shutdown in which new calls are refused and running calls may finish. This module depends neither on
gRPC nor on HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jdisagg.errors import DeadlineExceededError, JdisaggError, ShutDownError
from jdisagg.request import Request
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

RETRY_SECONDS = 5.0


class DrainingGuard:
    """Base of the gRPC and the HTTP guard: tracks running calls and implements the steps of a drain
    (`refuse`, `idle`, `cut`).

    A subclass adds the task of each running call to `_running`. If a drain does not need to wait
    for the call, the subclass adds the task to `_unhurried` instead."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self._unhurried: set[asyncio.Task[object]] = set()
        self._refusing = False
        self._cutting = False

    def refuse(self) -> None:
        """Makes the guard refuse all further calls with UnavailableError."""
        self._refusing = True

    def wait_for(self, task: asyncio.Task[None]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def idle(self) -> None:
        """Waits until no call runs. A running call may begin others (`wait_for`)."""
        while self._running:
            await asyncio.wait(set(self._running))

    def cut(self) -> int:
        """Cancels all running calls. They then fail with UnavailableError. Returns the number of
        cancelled calls, not counting those for which a drain does not wait."""
        self._cutting = True
        for task in (*self._running, *self._unhurried):
            task.cancel()
        return len(self._running)


@contextlib.asynccontextmanager
async def read_in_time(request: Request) -> AsyncIterator[None]:
    """Context manager that limits the time in which a client must read its stream, so that a slow
    client does not block the server. The limit is the request's deadline plus a margin. Raises
    DeadlineExceededError if the client did not read its stream within the limit."""
    seconds = request.deadline_seconds
    assert seconds is not None, "the frontend sets a deadline for every request"
    try:
        async with asyncio.timeout(seconds + DEFAULT_TIMEOUTS.call.unread_seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError(
            f"request {request.request_id!r}: its deadline of {seconds:g} s passed before the"
            " client read all events; read faster"
        ) from None


def shutting_down() -> ShutDownError:
    return ShutDownError(
        "the server is shutting down and takes no new requests; try again later",
        retry_after_seconds=RETRY_SECONDS,
    )


def cut_short() -> ShutDownError:
    return ShutDownError(
        "the server shut down before the request had ended", retry_after_seconds=RETRY_SECONDS
    )


def internal_error(error: Exception, log: str = "the server's log") -> JdisaggError:
    """Returns a general error for the client in place of an unexpected exception. The message names
    `log` as the log that has the details."""
    return JdisaggError(f"internal error ({type(error).__name__}); see {log} for details")
