"""Registration of workers: the registry service of a router, and the client that runs in each
worker.

A worker registers with every configured router and sends its status a few times a second (a
heartbeat). If a router reports that the worker is not registered, the worker registers again, so
that routers may restart while workers run.

A router may refuse the worker because the model differs or the name is taken. The worker then
retries at longer intervals. If every router refuses the worker, `failed` is set.

Depends only on the `Registrar` Protocol, which dispatch/membership.py implements."""

import asyncio
import contextlib
import logging
import math
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
from jdisagg.messages.registry import RegistryPort, RouterUse, WorkerCard
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.service.guard import Service
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, MembershipTimeouts

log = logging.getLogger(__name__)

# Cap on prefix-cache messages between two heartbeats, so that they do not delay the statuses.
NEWS_A_BEAT = 4
STALE_SECONDS = 5.0  # age after which a router's quota use is no longer passed on
UNSHARED_SECONDS = 10.0  # interval before a failed exchange of quota use is retried


class Registrar(Protocol):
    """The router's bookkeeping of its workers. `Membership` implements it."""

    def has(self, card: WorkerCard) -> bool: ...
    def register(self, card: WorkerCard) -> None: ...
    def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool: ...
    def kept(self, boot_id: int, news: KeptNews) -> KeptMark: ...
    def deregister(self, name: str, boot_id: int) -> None: ...


Reach = Callable[[WorkerCard], Awaitable[None]]
"""Function that calls a worker at the address in its `WorkerCard`, to check that the router can
reach the worker. Raises a JdisaggError if the worker does not answer."""


Share = Callable[[tuple[RouterUse, ...]], RouterUse]
"""Function that receives the use of client quotas at other routers, and returns the use at this
router."""


async def _reached(card: WorkerCard) -> None: ...


def _unshared(uses: tuple[RouterUse, ...]) -> RouterUse:
    return RouterUse()


def registry_service(
    registrar: Registrar,
    tokens: tuple[str, ...] = (),
    reach: Reach = _reached,
    share: Share = _unshared,
) -> Service:
    """Returns the registry service of a router.

    The service accepts calls during a drain, because running requests still need the workers.
    `reach`: function that must succeed before a worker is registered. A registration alone proves
    only that the worker can call the router."""
    lasting = ("register", "heartbeat", "kept", "share_use", "deregister")
    return rpc.service(RegistryPort, _Registry(registrar, reach, share), tokens, lasting)


class _Registry:
    def __init__(self, registrar: Registrar, reach: Reach, share: Share) -> None:
        self._registrar, self._share = registrar, share
        self._reach = reach
        self._unreached: set[tuple[str, str]] = set()  # logged once each

    async def register(self, card: WorkerCard) -> None:
        if not self._registrar.has(card):
            await self._prove(card)
        self._registrar.register(card)

    async def _prove(self, card: WorkerCard) -> None:
        known = card.name, card.address
        try:
            await self._reach(card)
        except JdisaggError as error:
            text = (
                f"worker {card.name!r} reaches this router, but the router cannot call it at"
                f" {card.address}: {error.message}; check the worker's --host and certificate, and"
                " firewalls"
            )
            if known not in self._unreached:
                log.warning("%s", text)
            self._unreached.add(known)
            raise UnavailableError(text, retry_after_seconds=1.0) from error
        self._unreached.discard(known)

    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        return self._registrar.heartbeat(boot_id, status)

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        return self._registrar.kept(boot_id, news)

    async def share_use(self, uses: tuple[RouterUse, ...]) -> RouterUse:
        return self._share(uses)

    async def deregister(self, name: str, boot_id: int) -> None:
        self._registrar.deregister(name, boot_id)


class RegistryClient:
    """Keeps one worker registered with its routers from `start` to `leave`.

    The future `failed` receives an exception if `status` raises, or if all routers refuse the
    worker. The owner of the client then decides whether to stop the worker. `status`: function that
    returns the worker's status, or raises if the worker is broken. After an error, no heartbeat is
    sent, so that routers remove the worker."""

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
        return frozenset(link.connection.address for link in self._links if link.card is not None)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_known(link)) for link in self._links]

    def change(self, card: WorkerCard) -> None:
        """Registers the worker anew, at once, because its role has changed. Statuses that `status`
        returns from now on belong to `card`."""
        self._card = card
        for link in self._links:
            link.due.set()

    async def leave(self) -> None:
        """Deregisters the worker from all reachable routers and stops. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()
        self.failed.cancel()
        deregistrations = (
            link.port.deregister(self._card.name, self._card.boot_id)
            for link in self._links
            if link.card is not None
        )
        await asyncio.gather(*deregistrations, return_exceptions=True)
        for link in self._links:
            link.card = None
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
                # At shutdown the router stops first, and at start-up it may start last. A warning
                # is therefore logged only for a router that stays unreachable.
                quiet = isinstance(error, UnavailableError | TimeoutError) and (
                    self._draining or misses < 2
                )
                # Compare the error's type: gRPC's text for an unreachable router varies per try.
                if type(error) is not said and not quiet:
                    said = type(error)
                    log.warning(
                        "worker %s could not report to router %s: %s",
                        self._card.name,
                        link.connection.address,
                        str(error) or "no status in time",
                    )
            except Exception:
                name, router = self._card.name, link.connection.address
                log.exception("worker %s: reporting to router %s failed", name, router)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await link.due.wait()

    async def _say(self, link: "_RouterLink") -> None:
        link.due.clear()
        card = self._card  # of the status
        try:
            async with asyncio.timeout(self._timeouts.call_seconds):
                status = await self._status()
        except JdisaggError as error:
            self._fail(error)
            raise
        self._draining = status.draining
        if link.card is not card:
            await self._register(link, card)
        if not await link.port.heartbeat(card.boot_id, status):
            link.card = None
            await self._register(link, card)
        await self._share_use(link)
        for _ in range(NEWS_A_BEAT):
            news = self._kept(link.mark)
            if news is None:
                return
            link.mark = await link.port.kept(card.boot_id, news)

    async def _share_use(self, link: "_RouterLink") -> None:
        now = asyncio.get_running_loop().time()
        if len(self._links) == 1 or now < link.share_at:
            return
        fresh = [other for other in self._links if now - other.shared_at < STALE_SECONDS]
        try:
            link.use = await link.port.share_use(
                tuple(other.use for other in fresh if other is not link)
            )
        except (JdisaggError, TimeoutError):  # such as a router of an older version
            link.share_at = now + UNSHARED_SECONDS
            return
        link.shared_at = now
        link.share_at = now + min(one.use.again_seconds for one in (*fresh, link))

    async def _register(self, link: "_RouterLink", card: WorkerCard) -> None:
        await link.port.register(card)
        link.card, link.mark = card, KeptMark()

    def _fail(self, error: JdisaggError) -> None:
        if not self.failed.done():
            self.failed.set_exception(type(error)(error.message))


class _RouterLink:
    def __init__(self, connection: Connection, timeouts: MembershipTimeouts) -> None:
        self.connection = connection
        self._timeouts = timeouts
        self.port = rpc.client(RegistryPort, connection, call_seconds=timeouts.call_seconds)
        self.card: WorkerCard | None = None  # with which the worker is registered
        self.due = asyncio.Event()
        self.mark = KeptMark()
        self.refused: JdisaggError | None = None
        self.taken_since: float | None = None
        self.use, self.shared_at, self.share_at = RouterUse(), -math.inf, 0.0

    def heard(self, error: Exception, now: float) -> float:
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
