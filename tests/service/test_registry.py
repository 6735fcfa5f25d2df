"""Workers register with every router, stay known, come back after a router's restart, and leave."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ports import WorkerRole, WorkerStatus
from jdisagg.dispatch.registration import Registration
from jdisagg.dispatch.roster import ModelCard, Roster, WorkerCard, WorkerPorts
from jdisagg.errors import IncompatiblePeerError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.service.registry import RemoteRouter, registry_service
from jdisagg.service.server import GrpcServer
from tests.service.doors import STATUS, eventually

MODEL = ModelCard("tiny", "llama", 257, 512, "float32", 64, "f00")
CARD = WorkerCard("decode-0", 2**64 - 1, WorkerRole.DECODE, "127.0.0.1:1", Layout(dp=2, tp=2), MODEL)


async def status() -> WorkerStatus:
    return STATUS


@contextlib.asynccontextmanager
async def router(port: int = 0) -> AsyncIterator[tuple[str, Roster]]:
    roster = Roster(MonotonicClock(), lambda card: WorkerPorts())
    server = GrpcServer((registry_service(roster),), ServiceConfig(port=port, drain_seconds=0.0))
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield address, roster
    finally:
        await server.drain()


@contextlib.asynccontextmanager
async def worker(*routers: str) -> AsyncIterator[None]:
    remotes = [RemoteRouter(address) for address in routers]
    registration = Registration(remotes, CARD, status, MonotonicClock())
    registration.start()
    try:
        yield
    finally:
        await registration.leave()
        for remote in remotes:
            await remote.aclose()


async def test_a_worker_is_known_to_all_routers_until_it_leaves() -> None:
    async with router() as (one, first), router() as (two, second):
        async with worker(one, two):
            await eventually(lambda: first.statuses() == second.statuses() == (STATUS,))
            assert first.cards() == second.cards() == (CARD,)
        assert first.cards() == second.cards() == ()


async def test_a_router_that_is_away_holds_up_no_other_and_knows_the_worker_when_it_is_back() -> None:
    async with router() as (one, roster), contextlib.AsyncExitStack() as stack:
        async with router() as (away, _):
            pass
        async with worker(one, away):
            await eventually(lambda: roster.statuses() == (STATUS,))
            _, later = await stack.enter_async_context(router(port=int(away.rpartition(":")[2])))
            await eventually(lambda: later.statuses() == (STATUS,))


async def test_a_router_that_forgot_a_worker_hears_of_it_again() -> None:
    async with router() as (one, roster), worker(one):
        await eventually(lambda: roster.statuses() == (STATUS,))
        roster.deregister(CARD.name, CARD.boot_id)
        assert roster.cards() == ()
        await eventually(lambda: roster.statuses() == (STATUS,))


async def test_a_router_refuses_a_worker_of_another_model_by_name_of_the_field() -> None:
    async with router() as (one, roster), worker(one):
        await eventually(lambda: roster.statuses() == (STATUS,))
        remote = RemoteRouter(one)
        with pytest.raises(IncompatiblePeerError, match="dtype is 'bfloat16'"):
            await remote.register(replace(CARD, name="decode-1", model=replace(MODEL, dtype="bfloat16")))
        await remote.aclose()
        assert roster.cards() == (CARD,)


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    remote = RemoteRouter("127.0.0.1:1")
    with pytest.raises(UnavailableError):
        await remote.heartbeat(1, STATUS)
    await remote.aclose()
