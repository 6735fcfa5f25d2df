"""Workers and routers find each other: the registry that a router serves, and the client in each
worker.

A worker registers with every router it was told of, says how it is a few times a second, and
registers again with a router that does not know it (any more): routers may restart, workers need
not. A router that is away is tried again until it is back, and holds up no other; that is logged
once, and not by a worker that drains: the whole cluster may be ending. A router that refuses the
worker (another model, its name is taken) is asked again now and then, and the refusal is logged
once; when every router refuses it, it has `failed`. With each heartbeat goes what changed of the
KV that the worker keeps, from where that router knows it.

Knows what a `Registrar` is (dispatch/membership.py) and nothing of what a router makes of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from jdisagg.errors import (
    IncompatiblePeerError,
    InvalidRequestError,
    JdisaggError,
    NameTakenError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.messages.kept_blocks import KeptMark, KeptNews
from jdisagg.messages.registry import RegistryPort, WorkerCard
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.timeouts import DEFAULT_TIMEOUTS, MembershipTimeouts

log = logging.getLogger(__name__)

# Messages of what a worker keeps between two heartbeats, at most: statuses do not wait for them.
NEWS_A_BEAT = 4


class Registrar(Protocol):
    """What a router does with workers that come and go: dispatch/membership.py's `Membership`."""

    def register(self, card: WorkerCard) -> None: ...
    def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool: ...
    def kept(self, boot_id: int, news: KeptNews) -> KeptMark: ...
    def deregister(self, name: str, boot_id: int) -> None: ...


def registry_service(registrar: Registrar, tokens: tuple[str, ...] = ()) -> Service:
    """A router that drains hears of its workers to the end: running requests need them."""
    lasting = ("register", "heartbeat", "kept", "deregister")
    return rpc.service(RegistryPort, _Registry(registrar), tokens, lasting)


class _Registry:
    """Implements `RegistryPort`."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def register(self, card: WorkerCard) -> None:
        self._registrar.register(card)

    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        return self._registrar.heartbeat(boot_id, status)

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        return self._registrar.kept(boot_id, news)

    async def deregister(self, name: str, boot_id: int) -> None:
        self._registrar.deregister(name, boot_id)


class RegistryClient:
    """Keeps one worker known to its routers from `start` to `leave`. `status` raises when the
    worker is broken: it is then not heard of, which is how routers learn of it. `kept`: what of the
    blocks that the worker keeps a router does not know yet that knows so much.

    `failed` gets an exception when the worker cannot serve: its status raised, or all routers
    refuse its card. Whoever runs the worker ends it then, or lets it be."""

    def __init__(
        self,
        routers: Sequence[str],
        card: WorkerCard,
        status: Callable[[], Awaitable[WorkerStatus]],
        credentials: Credentials = NO_CREDENTIALS,
        timeouts: MembershipTimeouts = DEFAULT_TIMEOUTS.membership,
        kept: Callable[[KeptMark], KeptNews | None] = lambda mark: None,
    ) -> None:
        self._card = card
        self._status = status
        self._kept = kept
        self._timeouts = timeouts
        self._links = [
            _RouterLink(Connection(address, credentials), timeouts)
            for address in dict.fromkeys(routers)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def registered(self) -> frozenset[str]:
        """The addresses of the routers that know the worker."""
        return frozenset(link.connection.address for link in self._links if link.registered)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_known(link)) for link in self._links]

    async def leave(self) -> None:
        """Tells all routers that the worker leaves, as far as they can be reached, and stops.
        Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()
        self.failed.cancel()
        farewells = (
            link.port.deregister(self._card.name, self._card.boot_id)
            for link in self._links
            if link.registered
        )
        await asyncio.gather(*farewells, return_exceptions=True)
        for link in self._links:
            link.registered = False
            await link.connection.aclose()

    async def _keep_known(self, link: "_RouterLink") -> None:
        said: type[Exception] | None = None
        misses = 0
        while True:
            pause = self._timeouts.heartbeat_seconds
            try:
                await self._say(link)
                said, link.refused, link.taken_since, misses = None, None, None, 0
            except (JdisaggError, TimeoutError) as error:
                pause = max(pause, link.heard(error, asyncio.get_running_loop().time()))
                if link.refused is not None and all(other.refused for other in self._links):
                    self._fail(link.refused)
                misses += 1
                # At a cluster's end the router goes first, and at its start it may come last: only
                # one that stays away is worth a warning.
                quiet = isinstance(error, UnavailableError | TimeoutError) and (
                    self._draining or misses < 2
                )
                # By its kind: the words for a router that is away change from one try to the next.
                if type(error) is not said and not quiet:
                    said = type(error)
                    log.warning(
                        "worker %s, router %s: %s",
                        self._card.name,
                        link.connection.address,
                        str(error) or "no status in time",
                    )
            except Exception:
                log.exception("worker %s, router %s", self._card.name, link.connection.address)
            await asyncio.sleep(pause)

    async def _say(self, link: "_RouterLink") -> None:
        try:
            async with asyncio.timeout(self._timeouts.call_seconds):
                status = await self._status()
        except JdisaggError as error:
            self._fail(error)
            raise
        self._draining = status.draining
        if not link.registered:
            await self._register(link)
        if not await link.port.heartbeat(self._card.boot_id, status):
            link.registered = False
            await self._register(link)
        for _ in range(NEWS_A_BEAT):
            news = self._kept(link.mark)
            if news is None:
                return
            link.mark = await link.port.kept(self._card.boot_id, news)

    async def _register(self, link: "_RouterLink") -> None:
        await link.port.register(self._card)
        link.registered, link.mark = True, KeptMark()

    def _fail(self, error: JdisaggError) -> None:
        if not self.failed.done():
            self.failed.set_exception(type(error)(error.message))


class _RouterLink:
    """`refused`: why this router will have none of the worker, as far as one can tell. `mark`: how
    far it knows what the worker keeps."""

    def __init__(self, connection: Connection, timeouts: MembershipTimeouts) -> None:
        self.connection = connection
        self._timeouts = timeouts
        self.port = rpc.client(RegistryPort, connection, call_seconds=timeouts.call_seconds)
        self.registered = False
        self.mark = KeptMark()
        self.refused: JdisaggError | None = None
        self.taken_since: float | None = None

    def heard(self, error: Exception, now: float) -> float:
        """Notes what came instead of an answer; returns the seconds before which it makes no sense
        to ask again."""
        if isinstance(error, NameTakenError):
            self.taken_since = self.taken_since or now
            self.refused = (
                error
                if now - self.taken_since >= self._timeouts.name_taken_seconds
                else self.refused
            )
        elif isinstance(error, IncompatiblePeerError | InvalidRequestError | UnauthenticatedError):
            self.refused = error
            return self._timeouts.refused_seconds
        return 0.0
