"""One leg between two workers that answer when the test says so."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator

import pytest

from jdisagg.dispatch.leg import Leg
from jdisagg.dispatch.move import Move
from jdisagg.dispatch.ports import (
    Child,
    FirstToken,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    SourceLost,
    Span,
    SpanEnd,
    WorkerStatus,
)
from jdisagg.dispatch.trip import Cluster, Fact, Preempted, Tokens, Trip
from jdisagg.errors import DeadlineExceededError, UnavailableError
from jdisagg.router.decision import Decision
from tests.fakes.cluster import toy_request
from tests.fakes.virtual_time import run_virtually


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


async def the_only_one(avoid: frozenset[str]) -> str:
    return "prefill"


async def the_only_decode(avoid: frozenset[str]) -> str:
    return "decode"


def trip_of(workers: Workers, facts: list[Fact]) -> Trip:
    return Trip(
        cluster=Cluster({"prefill": workers}, {"decode": workers}),
        request=toy_request(1, n=2),
        new_id=itertools.count(5).__next__,
        now=lambda: 0.0,
        arrived_at=0.0,
        deadline=60.0,
        post=facts.append,
        next_attempt=lambda: 2,
        choose_prefill=the_only_one,
        choose_decode=the_only_decode,
    )


@pytest.mark.parametrize("preempted_first", [True, False])
async def test_after_a_childs_preemption_its_leg_gives_out_no_token_of_it(preempted_first: bool) -> None:
    """The next leg begins with the tokens that were accepted when the preemption was heard: a later one would come twice."""
    workers, facts = Workers(preempted_first), list[Fact]()
    trip = trip_of(workers, facts)
    leg = Leg(trip, (Child(0), Child(1)), attempt=1)
    await leg.run(Decision("prefill", "decode", 64, "the only ones"))
    preempted = facts.index(Preempted(0))
    assert not [fact for fact in facts[preempted:] if isinstance(fact, Tokens) and fact.child == 0]
    delivered = [token for fact in facts if isinstance(fact, Tokens) and fact.child == 1 for token in fact.token_ids]
    assert delivered == [30, 31, 32]


class FailingSources(Workers):
    """Source 5 fails; while source 6 is refused the decode side says once more that 5 failed; source 7 is good."""

    def __init__(self) -> None:
        super().__init__(True)
        self._refusing = asyncio.Event()
        self._good = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        yield Span(-1, 0, (), lost=SourceLost(5, 0, "it died"))
        await self._refusing.wait()
        yield Span(-1, 0, (), lost=SourceLost(5, 0, "it died"))
        await self._good.wait()
        yield Span(0, 0, (20,), (), SpanEnd.LENGTH)
        yield Span(1, 0, (30,), (), SpanEnd.LENGTH)

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        if call.handoff_id == 5:
            await asyncio.Event().wait()
        if call.handoff_id == 6:
            self._refusing.set()
            raise UnavailableError("draining")
        self._good.set()
        return PrefillReply((FirstToken(0, 20), FirstToken(1, 30)), 0.0, 0.0)

    async def resume_source(self, call: ResumeCall) -> int | None:
        return 0


async def test_a_refusal_that_comes_with_news_of_an_older_source_is_not_missed() -> None:
    facts = list[Fact]()
    leg = Leg(trip_of(FailingSources(), facts), (Child(0), Child(1)), attempt=1)
    await asyncio.wait_for(leg.run(Decision("prefill", "decode", 64, "the only ones")), 5)
    assert [fact.token_ids for fact in facts if isinstance(fact, Tokens)] == [(20,), (30,)]


class Silent(FailingSources):
    """Its workers answer no call that frees something, as stopped processes do."""

    async def cancel_prefill(self, handoff_id: int) -> None:
        await asyncio.Event().wait()


class SilentDecode(Workers):
    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        raise UnavailableError("it fell silent")
        yield

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        await asyncio.Event().wait()


def test_what_a_silent_worker_holds_is_not_waited_for_before_another_takes_over() -> None:
    async def main() -> None:
        loop, facts = asyncio.get_running_loop(), list[Fact]()
        await Leg(trip_of(Silent(), facts), (Child(0), Child(1)), attempt=1).run(Decision("prefill", "decode", 64, "the only ones"))
        assert loop.time() < 3.0 and len(facts) > 2
        began = loop.time()
        with pytest.raises(UnavailableError, match="it fell silent"):
            await Leg(trip_of(SilentDecode(True), facts), (Child(0),), attempt=1).run(Decision(None, "decode", 64, "the only one"))
        assert loop.time() - began < 1.0

    run_virtually(main)


class Broken(Workers):
    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        raise ZeroDivisionError("a bug of ours")
        yield


async def test_whatever_breaks_a_move_is_heard_by_whoever_waits_for_its_stream() -> None:
    facts = list[Fact]()
    move = Move(trip_of(Broken(True), facts), (Child(0),), "origin", HandoffSource("origin", 9))
    await asyncio.sleep(0.01)
    _, spans = move.arrived()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(anext(spans), 5)


class SlowToFree(Workers):
    """Its streams never end by themselves, or fail; each call that frees something takes a second, and is noted when it is done."""

    def __init__(self, fails: bool) -> None:
        super().__init__(True)
        self._fails = fails
        self.freed: set[str] = set()

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        try:
            await asyncio.sleep(0.1)
            if self._fails:
                raise DeadlineExceededError("too late")
            await asyncio.Event().wait()
            yield
        finally:
            self.freed.add("stream")

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        await asyncio.sleep(0.1)
        raise DeadlineExceededError("too late")

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        await asyncio.sleep(1)
        self.freed.add("reservation")

    async def cancel_prefill(self, handoff_id: int) -> None:
        await asyncio.sleep(1)
        self.freed.add("prefill")


@pytest.mark.parametrize("again", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("prefill", ["prefill", None])
def test_all_is_freed_on_both_sides_however_often_a_leg_is_cancelled_meanwhile(prefill: str | None, fails: bool, again: float) -> None:
    complaints = list[dict[str, object]]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        workers = SlowToFree(fails)
        leg = asyncio.create_task(Leg(trip_of(workers, []), (Child(0),), attempt=1).run(Decision(prefill, "decode", 64, "the only ones")))
        for seconds in (0.02, again):
            await asyncio.sleep(seconds if not fails else seconds + 0.2)
            leg.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leg
        assert workers.freed == {"stream", "reservation"} | ({"prefill"} if prefill else set())

    run_virtually(main)
    gc.collect()
    assert complaints == [], "an error that nobody took"
