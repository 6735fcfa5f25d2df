"""What the guards of both doors know of the calls that run: the steps of a drain, and what a client
is told meanwhile."""

import asyncio

from jdisagg.errors import ShutDownError, UnavailableError

RETRY_SECONDS = 5.0


class DrainingGuard:
    """`refuse` and `end` are the steps of a drain. Calls put their tasks into `_running` while they
    run, or into `_unhurried` where a drain does not wait for them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self._unhurried: set[asyncio.Task[object]] = set()
        self._refusing = False
        self._cutting = False

    def refuse(self) -> None:
        """From now on new calls are refused as unavailable."""
        self._refusing = True

    async def idle(self, timeout_seconds: float) -> bool:
        """Waits until no call runs; False when the time is over first."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_seconds)
        return not self._running

    def cut(self) -> int:
        """Ends the running calls as unavailable; returns how many there were that a drain waits
        for."""
        self._cutting = True
        for task in (*self._running, *self._unhurried):
            task.cancel()
        return len(self._running)

    async def end(self, seconds: float, forced: asyncio.Event) -> int:
        """Lets the running calls finish, for `seconds` or until it is forced, and cuts the rest;
        returns how many that were."""
        idle = asyncio.ensure_future(self.idle(seconds))
        hurried = asyncio.ensure_future(forced.wait())
        await asyncio.wait((idle, hurried), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurried.cancel()
        return self.cut()


def shutting_down() -> UnavailableError:
    """For a new call."""
    return UnavailableError(
        "the server is shutting down and takes no new requests; ask again later",
        retry_after_seconds=RETRY_SECONDS,
    )


def cut_short() -> ShutDownError:
    """For a call that ran."""
    return ShutDownError(
        "the server shut down before the request had ended", retry_after_seconds=RETRY_SECONDS
    )
