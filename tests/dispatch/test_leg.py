"""One leg between two workers that answer when the test says so."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from jdisagg.dispatch.leg import Leg
from jdisagg.dispatch.ports import (
    Child,
    FirstToken,
    GenerateCall,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    SpanEnd,
    WorkerStatus,
)
from jdisagg.dispatch.trip import Cluster, Fact, Preempted, Tokens, Trip
from jdisagg.errors import UnavailableError
from jdisagg.router.placement import Placement
from tests.fakes.cluster import toy_request


class Workers:
    """Both ports. The decode side preempts child 0, just before or just after the prefill replies."""

    def __init__(self, preempted_first: bool) -> None:
        self._preempted_first = preempted_first
        self._prefilled = asyncio.Event()
        self._preempted = asyncio.Event()

    async def reserve(self, call: ReserveCall) -> Reservation:
        return Reservation(7, "decode", 0, 30.0)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        if not self._preempted_first:
            await self._prefilled.wait()
        self._preempted.set()
        yield Span(0, 0, (), (), SpanEnd.PREEMPTED)
        yield Span(1, 0, (30, 31, 32), (), SpanEnd.LENGTH)

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        if self._preempted_first:
            await self._preempted.wait()
        self._prefilled.set()
        return PrefillReply((FirstToken(0, 20), FirstToken(1, 30)), 0.0, 0.0)

    async def resume_source(self, call: ResumeCall) -> int | None:
        raise NotImplementedError

    async def cancel(self, reservation_id: int, child: int | None = None) -> None: ...

    async def cancel_prefill(self, handoff_id: int) -> None: ...

    async def status(self) -> WorkerStatus:
        raise NotImplementedError


async def nobody(avoid: frozenset[str]) -> str:
    raise UnavailableError("there is no other worker")


@pytest.mark.parametrize("preempted_first", [True, False])
async def test_after_a_childs_preemption_its_leg_gives_out_no_token_of_it(preempted_first: bool) -> None:
    """The next leg begins with the tokens that were accepted when the preemption was heard: a later one would come twice."""
    workers, facts = Workers(preempted_first), list[Fact]()
    trip = Trip(
        cluster=Cluster({"prefill": workers}, {"decode": workers}),
        request=toy_request(1, n=2),
        new_id=lambda: 5,
        now=lambda: 0.0,
        arrived_at=0.0,
        deadline=60.0,
        post=facts.append,
        next_attempt=lambda: 2,
        choose_prefill=nobody,
        choose_decode=nobody,
    )
    leg = Leg(trip, (Child(0), Child(1)), attempt=1)
    await leg.run(Placement("prefill", "decode", 64, "the only ones"))
    preempted = facts.index(Preempted(0))
    assert not [fact for fact in facts[preempted:] if isinstance(fact, Tokens) and fact.child == 0]
    delivered = [token for fact in facts if isinstance(fact, Tokens) and fact.child == 1 for token in fact.token_ids]
    assert delivered == [30, 31, 32]
