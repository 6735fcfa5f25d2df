"""One attempt between two workers that answer when the test says so."""

import asyncio
import gc
import itertools
import math
from collections.abc import AsyncIterator
from typing import cast

import pytest

from jdisagg.config import LimitsConfig
from jdisagg.dispatch.attempt import Attempt
from jdisagg.dispatch.migration import Migration
from jdisagg.dispatch.placer import PlacementHandle, Placer
from jdisagg.dispatch.request_context import ClusterPorts, RequestContext
from jdisagg.dispatch.request_run import RequestRun
from jdisagg.errors import DeadlineExceededError, UnavailableError
from jdisagg.messages.ports import (
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
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.router.accounts import Accounts, Charges, Work
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision
from jdisagg.telemetry import Counters
from tests.fakes.cluster import ToyText, toy_request
from tests.fakes.virtual_time import VirtualClock, run_virtually

pytestmark = pytest.mark.usefixtures("few_objects")


class Workers:
    """Both ports. The decode side preempts child 0, just before or just after the prefill
    replies."""

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

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None: ...

    async def cancel_prefill(self, handoff_id: int) -> None: ...

    async def status(self) -> WorkerStatus:
        raise NotImplementedError


class TheOnlyOnes:
    """Places everything on the one pair."""

    def life(self, worker: str) -> int:
        return 1

    def most_computed(self, decode: str) -> float:
        return math.inf

    async def another_prefill(
        self, avoid: frozenset[str], decode: str, unfit: frozenset[str]
    ) -> str:
        return "prefill"

    async def another_decode(
        self, avoid: frozenset[str], origin: str, *_: object
    ) -> tuple[str, Charges]:
        return "decode", Accounts(ClusterState()).place(None, "decode", Work(1), 0.0)


class Placed:
    """A placement whose reports are not kept."""

    def __init__(self, prefill: str | None) -> None:
        self.decision = Decision(prefill, "decode", 64, "the only ones")

    def prefill_sent(self) -> None: ...

    def prefill_at(self, worker: str) -> None: ...

    def moved(self, placed: Charges) -> None: ...

    def prefilled(self) -> None: ...

    def handed_over(self, prefill: str | None, decode: str) -> None: ...

    def lost(self, prefill: str, decode: str) -> None: ...


class Room:
    """A request of two children, and what its attempts need."""

    def __init__(self, workers: Workers) -> None:
        self.run = RequestRun(toy_request(1, n=2), lambda _: ToyText(()), VirtualClock(), 60.0)
        self.run.context_tokens = 64
        self.preempted: dict[int, int] = {}  # tokens accepted by then
        self.context = RequestContext(
            ClusterPorts({"prefill": workers}, {"decode": workers}),
            cast(Placer, TheOnlyOnes()),
            LimitsConfig(),
            VirtualClock(),
            itertools.count(5).__next__,
            Counters(),
        )

    async def attempt(self, *children: int, prefill: str | None = "prefill") -> None:
        attempt = Attempt(self.context, self.run, children, self.note)
        await attempt.run(cast(PlacementHandle, Placed(prefill)))

    def accepted(self, child: int) -> list[int]:
        return self.run.children[child].accepted

    def note(self, child: int) -> None:
        self.preempted[child] = len(self.accepted(child))


@pytest.mark.parametrize("preempted_first", [True, False])
async def test_after_a_childs_preemption_its_attempt_gives_out_no_token_of_it(
    preempted_first: bool,
) -> None:
    """The next attempt begins with the tokens that were accepted at the preemption: a later one
    would come twice."""
    room = Room(Workers(preempted_first))
    await room.attempt(0, 1)
    assert room.preempted == {0: len(room.accepted(0))}
    assert room.accepted(1) == [30, 31, 32]


class PreemptedLate(Workers):
    def __init__(self) -> None:
        super().__init__(True)
        self.preempts = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        await self.preempts.wait()
        yield Span(0, 0, (), (), SpanEnd.PREEMPTED)


async def test_a_preemption_that_comes_after_a_suspension_starts_no_second_attempt() -> None:
    """The suspension has started one already. Each of two would end the other at the workers."""
    workers = PreemptedLate()
    room = Room(workers)
    attempt = Attempt(room.context, room.run, (0, 1), room.note)
    running = asyncio.create_task(attempt.run(cast(PlacementHandle, Placed("prefill"))))
    await asyncio.sleep(0.01)
    workers.preempts.set()
    attempt.suspend()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert room.preempted == {}


class FailingSources(Workers):
    """Source 5 fails; while source 6 is refused the decode side says once more that 5 failed;
    source 7 is good."""

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
    room = Room(FailingSources())
    await asyncio.wait_for(room.attempt(0, 1), 5)
    assert (room.accepted(0), room.accepted(1)) == ([20], [30])


class Silent(FailingSources):
    """Its workers answer no call that frees something, as stopped processes do."""

    async def cancel_prefill(self, handoff_id: int) -> None:
        await asyncio.Event().wait()


class SilentDecode(Workers):
    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        raise UnavailableError("it fell silent")
        yield

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
        await asyncio.Event().wait()


async def test_what_a_silent_worker_holds_is_not_waited_for_before_another_takes_over() -> None:
    loop, room = asyncio.get_running_loop(), Room(Silent())
    await room.attempt(0, 1)
    assert loop.time() < 3.0 and room.run.output_tokens == 2
    began = loop.time()
    with pytest.raises(UnavailableError, match="it fell silent"):
        await Room(SilentDecode(True)).attempt(0, prefill=None)
    assert loop.time() - began < 1.0


class Broken(Workers):
    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        raise ZeroDivisionError("a bug of ours")
        yield


async def test_what_breaks_a_migration_reaches_the_reader_of_its_stream() -> None:
    room = Room(Broken(True))
    source = HandoffSource("origin", 9)
    migration = Migration(room.context, room.run, (Child(0),), "origin", source)
    await asyncio.sleep(0.01)
    *_, spans = migration.arrived()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(anext(spans), 5)


class SlowToFree(Workers):
    """Its streams never end by themselves, or fail; each call that frees something takes a second,
    and is noted when it is done."""

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

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
        await asyncio.sleep(1)
        self.freed.add("reservation")

    async def cancel_prefill(self, handoff_id: int) -> None:
        await asyncio.sleep(1)
        self.freed.add("prefill")


@pytest.mark.parametrize("again", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("prefill", ["prefill", None])
def test_all_is_freed_on_both_sides_however_often_an_attempt_is_cancelled_meanwhile(
    prefill: str | None, fails: bool, again: float
) -> None:
    complaints = list[dict[str, object]]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, complaint: complaints.append(complaint)
        )
        workers = SlowToFree(fails)
        attempt = asyncio.create_task(Room(workers).attempt(0, prefill=prefill))
        for seconds in (0.02, again):
            await asyncio.sleep(seconds if not fails else seconds + 0.2)
            attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert workers.freed == {"stream", "reservation"} | ({"prefill"} if prefill else set())

    run_virtually(main)
    gc.collect()
    assert complaints == [], "an error that nobody took"
