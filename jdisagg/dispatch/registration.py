"""A worker's side of the rosters: it registers with each router, says how it is, and takes its leave.

One task for each router, so that one that is away delays no other: it is tried again until it answers, and a router that has forgotten the
worker (or was restarted) is registered with anew. A router that refuses the worker for good (another model) ends them all: `failed`.
Asyncio alone; a `RouterPort` is a router as its wire, or itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from jdisagg.clock import Clock
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.dispatch.roster import HEARTBEAT_SECONDS, WorkerCard
from jdisagg.errors import ConfigError, IncompatiblePeerError, InvalidRequestError, JdisaggError

CALL_SECONDS = 2.0
LEAVE_SECONDS = 2.0

_FOR_GOOD = (IncompatiblePeerError, InvalidRequestError, ConfigError)


class RouterPort(Protocol):
    """A router, as a worker sees it. All raise UnavailableError when it is away."""

    async def register(self, card: WorkerCard) -> None:
        """Raises IncompatiblePeerError when the worker serves another model."""
        ...

    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """False: the router does not know this worker (any more)."""
        ...

    async def deregister(self, name: str, boot_id: int) -> None: ...


class Registration:
    """`status` is asked before each heartbeat; when it raises, the worker's mesh is broken and `failed` has its error.

    `start` begins, `leave` ends; between them `failed` is a future that has an exception when the worker must end.
    """

    def __init__(
        self, routers: Sequence[RouterPort], card: WorkerCard, status: Callable[[], Awaitable[WorkerStatus]], clock: Clock
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._routers = tuple(routers)
        self._card = card
        self._status = status
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(router)) for router in self._routers]

    async def leave(self) -> None:
        """Says goodbye to all routers, within LEAVE_SECONDS. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            await asyncio.gather(*(self._goodbye(router) for router in self._routers))
        self._tasks = []
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()
        self.failed.cancel()

    async def _keep(self, router: RouterPort) -> None:
        """Registers and beats, for ever."""
        registered = False
        while True:
            try:
                status = await self._status()
            except JdisaggError as error:
                self._fail(error)
                return
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    if not registered:
                        await router.register(self._card)
                    registered = await router.heartbeat(self._card.boot_id, status)
            except _FOR_GOOD as error:
                self._fail(error)
                return
            except (JdisaggError, TimeoutError):
                pass  # it is away: the next beat tries again
            if registered:
                await self._clock.sleep(HEARTBEAT_SECONDS)
            else:
                await self._clock.sleep(HEARTBEAT_SECONDS / 2)

    async def _goodbye(self, router: RouterPort) -> None:
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await router.deregister(self._card.name, self._card.boot_id)
        except (JdisaggError, TimeoutError):
            return  # its heartbeats have ended: that says it too

    def _fail(self, error: JdisaggError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
