"""Workers register with every router, stay known, come back after a router's restart, and leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.dispatch.membership import Membership, WorkerPorts
from jdisagg.errors import IncompatiblePeerError, NameTakenError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.kept_blocks import KeptScheme
from jdisagg.messages.registry import ModelCard, RouterUse, WorkerCard
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.router.predictor import FEWEST, LearnedLengths
from jdisagg.scheduler.kept_log import KeptLog
from jdisagg.service.internal import registry
from jdisagg.service.internal.registry import RegistryClient, Share, registry_service
from jdisagg.settings.timeouts import MembershipTimeouts
from tests.service.doors import STATUS, eventually
from tests.service.listening import listening

QUICK = MembershipTimeouts(heartbeat_seconds=0.02)
MODEL = ModelCard("tiny", "llama", 257, 512, "float32", 64, "f00")
CARD = WorkerCard(
    "decode-0", 2**64 - 1, WorkerRole.DECODE, "127.0.0.1:1", Layout(dp=2, tp=2), MODEL
)


async def status() -> WorkerStatus:
    return STATUS


@contextlib.asynccontextmanager
async def router(
    port: int = 0, share: Share = lambda uses: RouterUse(), known: KnownBlocks | None = None
) -> AsyncIterator[tuple[str, Membership]]:
    membership = Membership(MonotonicClock(), lambda card: WorkerPorts(), known=known)
    async with listening(registry_service(membership, share=share), port=port) as address:
        yield address, membership


@contextlib.asynccontextmanager
async def worker(
    *routers: str, card: WorkerCard = CARD, says=status, timeouts=QUICK, kept=lambda mark: None
) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(routers, card, says, timeouts=timeouts, kept=kept)
    client.start()
    try:
        yield client
    finally:
        await client.leave()


async def test_a_worker_is_known_to_all_routers_until_it_leaves() -> None:
    async with router() as (one, first), router() as (two, second):
        async with worker(one, two) as client:
            await eventually(lambda: first.statuses() == second.statuses() == (STATUS,))
            assert first.cards() == second.cards() == (CARD,)
            assert client.registered == {one, two}
        assert first.cards() == second.cards() == ()


async def test_lengths_of_answers_at_one_router_are_predicted_at_another_through_their_worker() -> (
    None
):
    learned = [LearnedLengths(0.5) for _ in range(2)]
    shares = [
        lambda uses, number=number: learned[number].exchange(uses, RouterUse(number))
        for number in range(2)
    ]
    for _ in range(FEWEST):
        learned[0].observe("t", 50, 7)
    async with (
        router(share=shares[0]) as (one, _),
        router(share=shares[1]) as (two, _),
        worker(one, two),
    ):
        await eventually(lambda: learned[1].predict("t", 50, 100) == 7)


async def test_a_router_that_is_away_holds_up_no_other_and_knows_the_worker_when_it_is_back() -> (
    None
):
    async with router() as (one, membership), contextlib.AsyncExitStack() as stack:
        async with router() as (away, _):
            pass
        async with worker(one, away):
            await eventually(lambda: membership.statuses() == (STATUS,))
            _, later = await stack.enter_async_context(router(port=int(away.rpartition(":")[2])))
            await eventually(lambda: later.statuses() == (STATUS,))


async def test_a_router_that_stays_away_is_told_of_once_and_not_at_all_by_a_worker_that_drains(
    caplog, monkeypatch
) -> None:
    """gRPC's words for it are another from try to try."""
    tries = 0

    async def away(self, *_: object) -> None:
        nonlocal tries
        tries += 1
        raise UnavailableError(
            f"{self.address}: {'failed to connect' if tries % 2 else 'did not answer within 2 s'}"
        )

    monkeypatch.setattr(registry.Connection, "call", away)
    async with worker("127.0.0.1:1"):
        await eventually(lambda: tries > 4)
    # The first miss is passed over: at a cluster's end the router goes before its workers.
    assert len(caplog.records) == 1 and "did not answer" in caplog.text
    caplog.clear()

    async def drains() -> WorkerStatus:
        return msgspec.structs.replace(STATUS, draining=True)

    async with worker("127.0.0.1:1", says=drains):
        await eventually(lambda: tries > 9)
    assert not caplog.records


async def test_a_router_that_forgot_a_worker_hears_of_it_again() -> None:
    async with router() as (one, membership), worker(one):
        await eventually(lambda: membership.statuses() == (STATUS,))
        membership.deregister(CARD.name, CARD.boot_id)
        assert membership.cards() == ()
        await eventually(lambda: membership.statuses() == (STATUS,))


async def test_blocks_that_a_worker_keeps_are_known_until_they_are_reset_or_it_is_gone() -> None:
    log, known = KeptLog(), KnownBlocks(b"secret")
    card = msgspec.structs.replace(CARD, kept=KeptScheme("tiny", 8, 8))
    log.gained(b"1" * 16)
    log.gained(b"2" * 16)
    kept = partial(log.news, CARD.name)
    async with router(known=known) as (one, membership), worker(one, card=card, kept=kept):
        await eventually(lambda: known.blocks(CARD.name) == 2)
        membership.deregister(CARD.name, CARD.boot_id)
        assert known.blocks(CARD.name) == 0
        # the worker lives, hears that it is not known, and tells all that it has
        await eventually(lambda: known.blocks(CARD.name) == 2)
        log.cleared()
        await eventually(lambda: len(known) == 0)
        log.gained(b"3" * 16)
        await eventually(lambda: known.blocks(CARD.name) == 1)
    assert known.blocks(CARD.name) == 0


async def test_a_refused_worker_asks_on_and_others_are_not_disturbed(caplog) -> None:
    async with router() as (one, membership), worker(one):
        await eventually(lambda: membership.statuses() == (STATUS,))
        other = msgspec.structs.replace(
            CARD, name="decode-1", model=msgspec.structs.replace(MODEL, dtype="bfloat16")
        )
        async with worker(one, card=other) as refused:
            await eventually(lambda: "dtype is 'bfloat16'" in caplog.text)
            assert refused.registered == frozenset()
            with pytest.raises(IncompatiblePeerError, match="dtype"):
                await asyncio.wait_for(refused.failed, 5)
        assert membership.cards() == (CARD,)


async def test_the_second_of_a_name_is_refused_while_the_first_is_heard_and_takes_its_place_after_it(  # noqa: E501
    caplog,
) -> None:
    async with router() as (one, membership), contextlib.AsyncExitStack() as stack:
        async with worker(one):
            await eventually(lambda: membership.statuses() == (STATUS,))
            elsewhere = msgspec.structs.replace(CARD, boot_id=7, address="127.0.0.1:2")
            second = await stack.enter_async_context(
                worker(
                    one,
                    card=elsewhere,
                    timeouts=replace(QUICK, suspect_seconds=0.5, gone_seconds=1.0),
                )
            )
            await eventually(
                lambda: "a worker with that name is alive at 127.0.0.1:1" in caplog.text
            )
            assert not second.failed.done(), "the first may be on its way out"
            with pytest.raises(NameTakenError):
                await asyncio.wait_for(asyncio.shield(second.failed), 5)
            assert membership.cards() == (CARD,)
        await eventually(lambda: membership.cards() == (elsewhere,))


async def test_a_worker_that_one_of_its_routers_refuses_has_not_failed(caplog) -> None:
    async with router() as (one, first), router() as (two, second):
        first.register(
            msgspec.structs.replace(
                CARD, name="other", model=msgspec.structs.replace(MODEL, dtype="bfloat16")
            )
        )
        async with worker(one, two) as client:
            await eventually(
                lambda: second.statuses() == (STATUS,) and "dtype is 'float32'" in caplog.text
            )
            assert not client.failed.done() and client.registered == {two}


async def test_a_broken_worker_is_not_heard_of() -> None:
    broken = asyncio.Event()
    heard = []

    async def says() -> WorkerStatus:
        heard.append(broken.is_set())
        if broken.is_set():
            raise UnavailableError("the mesh failed")
        return STATUS

    async with router() as (one, membership), worker(one, says=says) as client:
        await eventually(lambda: membership.statuses() == (STATUS,))
        broken.set()
        await eventually(lambda: heard.count(True) > 2)
        heard_at = membership._entries[CARD.name].heard_at
        await eventually(lambda: heard.count(True) > 5)
        assert membership._entries[CARD.name].heard_at == heard_at
        with pytest.raises(UnavailableError, match="the mesh failed"):
            await client.failed


async def test_a_worker_is_listed_once_the_router_has_reached_it(caplog) -> None:
    open_to, calls = asyncio.Event(), 0

    async def reach(card: WorkerCard) -> None:
        nonlocal calls
        calls += 1
        if not open_to.is_set():
            raise UnavailableError("Hostname Verification Check failed")

    membership = Membership(MonotonicClock(), lambda card: WorkerPorts())
    async with listening(registry_service(membership, reach=reach)) as address:
        async with worker(address) as client:
            await eventually(lambda: calls > 3)
            assert membership.cards() == () and not client.registered
            said = [record.getMessage() for record in caplog.records]
            assert len([text for text in said if "cannot call it" in text]) == 2, "each side once"
            assert all("Hostname Verification" in text for text in said)
            open_to.set()
            await eventually(lambda: membership.statuses() == (STATUS,))
            now = calls
            assert not client.failed.done()
        assert calls == now, "heartbeats need no call back"
