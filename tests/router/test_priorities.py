"""What sequences of lower priority hold is room for a request of higher priority: at placement, in
the queue in front of it, and at the limit of waiting requests."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from jdisagg.dispatch.placer import PlacementRequest
from jdisagg.errors import OverloadedError
from jdisagg.messages.worker_status import PriorityLoad
from jdisagg.router.accounts import Work
from jdisagg.router.admission import FairQueue, Ticket, admit
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision, Deferred, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide
from jdisagg.scheduler.sequences import PRIORITY_SECONDS
from tests.dispatch.desk import Desk
from tests.fakes.virtual_time import run_virtually
from tests.router.fleets import decode_status, prefill_status, state_of

POLICY = PlacementPolicy(tpot_slo_seconds=0.05)
SLOTS, TOKENS = 16, 50000
# all sequences of the full decode worker and all queued prompts have priority 0
HELD = (PriorityLoad(0, sequences=20, pages=4090, waiting=3),)
QUEUED = (PriorityLoad(0, queued_tokens=TOKENS),)


def full_state() -> ClusterState:
    decode = decode_status("d0", (20,), (60000,), free=(0,), waiting=3, slots=SLOTS)
    prefill = prefill_status("p0", TOKENS)
    return state_of(
        msgspec.structs.replace(prefill, priorities=QUEUED),
        msgspec.structs.replace(decode, priorities=HELD),
    )


def query(state: ClusterState, priority: int) -> PlacementQuery:
    return PlacementQuery(Work(1000, expected_tokens=100), yielding=state.yielding(priority))


@pytest.mark.parametrize(("priority", "placed"), [(0, False), (-1, False), (1, True)])
def test_room_that_lower_priorities_hold_is_room(priority: int, placed: bool) -> None:
    state = full_state()
    answer = decide(state, query(state, priority), 0.0, POLICY)
    assert isinstance(answer, Decision if placed else Deferred), answer
    if isinstance(answer, Decision):
        assert answer.terms is not None
        assert answer.terms.decode_queue == answer.terms.prefill_queue == 0


def test_an_entry_of_higher_priority_presses_from_behind_and_is_charged_to_its_tenant() -> None:
    queue = FairQueue()
    queue.add(Ticket(1, "a", due=0.0, cost=5.0))
    queue.add(Ticket(2, "b", due=9 * PRIORITY_SECONDS, cost=7.0, priority=1))
    queue.add(Ticket(3, "b", due=0.0, cost=7.0, priority=0))
    head, pressing = queue.head(), queue.pressing()
    assert head is not None and head.key == 1
    assert pressing is not None and pressing.key == 2
    assert queue.overtakes(2) and not queue.overtakes(1)
    assert queue.serve(pressing).key == 2 and queue.pressing() is None
    queue.add(Ticket(4, "a", due=1.0, cost=1.0))
    assert queue.overtakes(1) and [queue.serve().key for _ in range(3)] == [1, 4, 3]


def asked(desk: Desk, number: int, priority: int) -> PlacementRequest:
    sought = desk.seek(number)
    return replace(sought, request=replace(sought.request, priority=priority))


def test_a_higher_priority_does_not_wait_behind_lower_ones_that_no_worker_has_room_for() -> None:
    async def main() -> None:
        desk = Desk()
        full = decode_status("d0", (300,), (60000,), free=(0,))
        full = msgspec.structs.replace(full, priorities=(PriorityLoad(1, 300, 4096),))
        desk.accounts.heard(full, desk.clock.now())
        low, middle = (
            asyncio.create_task(desk.placer.place(asked(desk, number, priority)))
            for number, priority in enumerate((0, 1))
        )
        await asyncio.sleep(0.3)
        assert desk.placer.waiting == 2, "priority 1 yields nothing to 1"
        high = await asyncio.wait_for(desk.placer.place(asked(desk, 2, 2)), 0.001)
        lower = msgspec.structs.replace(full, priorities=(PriorityLoad(0, 300, 4096),))
        desk.accounts.heard(lower, desk.clock.now())
        placed = await asyncio.wait_for(middle, 0.02)
        assert not low.done() and desk.placer.waiting == 1
        low.cancel()
        await asyncio.gather(low, return_exceptions=True)
        for handle in (high, placed):
            handle.end()
        assert desk.owes() == 0

    run_virtually(main)


def test_waiting_requests_of_lower_priority_leave_room_until_twice_the_limit() -> None:
    with pytest.raises(OverloadedError):
        admit(10, 10, None)
    admit(19, 10, None, lower_waiting=10)
    for waiting, lower in ((19, 9), (20, 20)):
        with pytest.raises(OverloadedError):
            admit(waiting, 10, None, lower_waiting=lower)
