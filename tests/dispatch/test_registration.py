"""A worker's registration with several routers, which are rosters here: away, back, forgetful, and refusing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.dispatch.ports import WorkerRole, WorkerStatus
from jdisagg.dispatch.registration import Registration
from jdisagg.dispatch.roster import ModelCard, Roster, WorkerCard, WorkerPorts
from jdisagg.errors import IncompatiblePeerError, UnavailableError
from jdisagg.layout.axes import Layout

CARD = WorkerCard("d", 7, WorkerRole.DECODE, "127.0.0.1:1", Layout(), ModelCard("m", "llama", 8, 16, "float32", 64, "a"))
STATUS = WorkerStatus("d", WorkerRole.DECODE, "dp=1,tp=1", (8,), (8,), 0, 0, 4, 16, 256)


@dataclass
class Router:
    """A roster that can be away, or hang."""

    away: bool = False
    hangs: bool = False
    roster: Roster = field(default_factory=lambda: Roster(MonotonicClock(), lambda _: WorkerPorts()))
    asked: int = 0

    async def _arrive(self) -> None:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise UnavailableError("nobody is at home")

    async def register(self, card: WorkerCard) -> None:
        await self._arrive()
        self.roster.register(card)

    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        await self._arrive()
        return self.roster.heartbeat(boot_id, status)

    async def deregister(self, name: str, boot_id: int) -> None:
        await self._arrive()
        self.roster.deregister(name, boot_id)

    def knows(self) -> bool:
        return bool(self.roster.statuses())


async def status() -> WorkerStatus:
    return STATUS


@asynccontextmanager
async def registered(*routers: Router, say: Callable[[], object] = status) -> AsyncIterator[Registration]:
    registration = Registration(routers, CARD, say, MonotonicClock())  # type: ignore[arg-type]
    registration.start()
    try:
        yield registration
    finally:
        await registration.leave()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_is_known_to_all_routers_until_it_leaves():
    routers = [Router(), Router()]
    async with registered(*routers):
        await until(lambda: all(router.knows() for router in routers))
    assert not any(router.roster.cards() for router in routers)


async def test_a_router_that_hangs_or_is_away_delays_no_other_and_is_registered_with_when_it_is_back():
    good, away, hanging = Router(), Router(away=True), Router(hangs=True)
    async with registered(good, away, hanging):
        await until(lambda: good.knows() and away.asked > 1 and hanging.asked == 1)
        assert not away.knows()
        away.away = False
        await until(away.knows)


async def test_a_router_that_forgot_the_worker_learns_of_it_again():
    router = Router()
    async with registered(router):
        await until(router.knows)
        router.roster.deregister("d", 7)
        assert not router.knows()
        await until(router.knows)


async def test_a_router_that_serves_another_model_ends_the_registration():
    router = Router()
    router.roster.register(replace(CARD, name="other", model=replace(CARD.model, fingerprint="b")))
    async with registered(router) as registration:
        with pytest.raises(IncompatiblePeerError, match="fingerprint"):
            await asyncio.wait_for(registration.failed, 10)


async def test_a_broken_mesh_is_told():
    async def broken() -> WorkerStatus:
        raise UnavailableError("the mesh's program failed")

    router = Router()
    async with registered(router, say=broken) as registration:
        with pytest.raises(UnavailableError, match="mesh"):
            await asyncio.wait_for(registration.failed, 10)
        assert not router.knows()
