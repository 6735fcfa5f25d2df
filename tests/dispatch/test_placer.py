"""The effects around placement, in virtual time: who waits, who is let go, what is left when they
leave, and breakers that heal."""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jdisagg.config import RoutingConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.dispatch.placer import PlacementRequest, Placer, PlacerSettings
from jdisagg.errors import NoWorkerError, OverloadedError
from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptNews, KeptScheme
from jdisagg.messages.ports import Child
from jdisagg.prompt.hints import Hints
from jdisagg.request import Request, SamplingParams
from jdisagg.router.candidates import FAILURES
from jdisagg.router.cluster_state import OWN, Description
from jdisagg.router.decision import NoRouterEvents, PlacementOutcome, PlacementQuery
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.scheduler.residency import BlockNames
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from tests.dispatch.desk import LOOK_SECONDS, Desk
from tests.router.fleets import H100, decode_status, prefill_status

FIRST_SECONDS = DEFAULT_TIMEOUTS.request.breaker.first_seconds


async def test_what_is_held_goes_as_soon_as_a_worker_says_that_it_has_room() -> None:
    desk = Desk()
    desk.fill()
    waiting = asyncio.create_task(desk.place())
    await asyncio.sleep(0.3)
    assert not waiting.done() and desk.placer.waiting == 1
    passing = await desk.place(1, under_way=True)
    assert passing.decision.decode == "d0", "what was let in does not wait again"
    desk.free()
    placement = await asyncio.wait_for(waiting, 0.02)
    assert (placement.decision.prefill, placement.decision.decode) == ("p0", "d0")
    for placed in (placement, passing):
        placed.prefill_sent()
        placed.prefilled()
        placed.end()
    assert desk.owes() == 0 and desk.placer.waiting == 0


def hinted(request: Request, hints: Hints, most: int = 200) -> PlacementRequest:
    sampling = SamplingParams(max_tokens=most)
    asked = dataclasses.replace(request, hints=hints, sampling=sampling)
    return PlacementRequest(asked, (Child(0),), 0.0, 1e6)


async def test_the_next_turn_of_a_session_goes_where_the_last_one_was() -> None:
    """Of four decode workers that are alike the first is taken, but while it has a sequence."""
    desk, request = Desk(decodes=4), Request("r", (1,) * 100)
    first = await desk.placer.place(hinted(request, Hints("a")))
    second = await desk.placer.place(hinted(request, Hints("b")))
    places = [one.decision.decode for one in (first, second)]
    assert len(set(places)) == 2
    for one in (first, second):
        one.prefilled()
        one.end()
    for key, place in zip("ba", reversed(places), strict=True):
        again = await desk.placer.place(hinted(request, Hints(key)))
        assert again.decision.decode == place and "session" in again.decision.reason
        again.end()
    other = dataclasses.replace(request, tenant="other")
    assert "session" not in (await desk.placer.place(hinted(other, Hints("b")))).decision.reason


@pytest.mark.parametrize(("told", "most", "expected"), [(7, 200, 7), (900, 200, 200)])
async def test_an_expected_length_is_believed_up_to_the_most(
    told: int, most: int, expected: int
) -> None:
    heard: list[PlacementQuery] = []

    class Heard(NoRouterEvents):
        def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
            heard.append(query)

    desk = Desk(events=Heard())
    await desk.placer.place(hinted(Request("r", (1,) * 100), Hints(answer_tokens=told), most))
    assert heard[0].work.expected_tokens == expected


def scoring(number: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request(f"s{number}", tuple(range(100)), sampling, prefill_only=True)


async def test_an_answer_of_a_prefill_worker_alone_neither_waits_for_decode_workers_nor_uses_them():
    desk = Desk()
    desk.fill()
    asked = PlacementRequest(scoring(), (Child(0),), desk.clock.now(), desk.clock.now() + 9.0)
    placement = await asyncio.wait_for(desk.placer.place(asked), 0.01)
    table, row = desk.accounts.state.table, desk.accounts.state.row_of("d0")
    assert placement.decision.workers == {"p0"}
    assert not any(table[column][row] for column in OWN)
    for _ in range(FAILURES):
        desk.placer.failed("d0")
    placement.prefilled()
    placement.end()
    assert table["barred_until"][row] > 0, "a decode worker that had no part in it"
    assert desk.owes() == 0


async def test_an_answer_of_a_prefill_worker_alone_passes_those_that_wait_for_decode_workers():
    desk = Desk()
    desk.fill()
    waiting = asyncio.create_task(desk.place())
    await asyncio.sleep(0.3)
    asked = PlacementRequest(scoring(), (Child(0),), desk.clock.now(), desk.clock.now() + 9.0)
    assert (await asyncio.wait_for(desk.placer.place(asked), 0.01)).decision.workers == {"p0"}
    assert not waiting.done()
    waiting.cancel()


async def test_sequences_that_leave_a_worker_spread_before_the_others_report() -> None:
    desk = Desk(decodes=3)
    placements = [await desk.place(number) for number in range(4)]
    moved = []
    for number, placement in enumerate(placements):
        asked = desk.seek(number)
        worker, placed = await desk.placer.another_decode(
            frozenset({"d0"}), "d0", asked.request, asked.children
        )
        placement.moved(placed)
        moved.append(worker)
    assert sorted(moved) == ["d1", "d1", "d2", "d2"]
    table, state = desk.accounts.state.table, desk.accounts.state
    rows = [state.row_of(f"d{number}") for number in range(3)]
    assert table["committed_pages"][rows[0]] == 0 < table["committed_pages"][rows[1]]
    for placement in placements:
        placement.end()
    assert desk.owes() == 0


async def test_prompts_of_a_worker_that_failed_spread_over_the_others() -> None:
    desk = Desk()
    placements = [await desk.place(number, under_way=True) for number in range(4)]
    for name in ("p1", "p2"):
        desk.accounts.state.describe(name, Description("r", H100))
        desk.accounts.heard(prefill_status(name), desk.clock.now())
    workers = []
    for placement in placements:
        worker = await desk.placer.another_prefill(frozenset({"p0"}), "d0", frozenset())
        placement.prefill_at(worker)
        workers.append(worker)
    assert sorted(workers) == ["p1", "p1", "p2", "p2"]
    desk.accounts.forget("p0")
    for placement in placements:
        placement.end()
    assert desk.owes() == 0


async def test_answers_of_prefill_workers_alone_tell_nothing_of_the_length_of_others() -> None:
    desk = Desk()
    chat = dataclasses.replace(scoring(), prefill_only=False)
    for _ in range(20):
        desk.placer.ended(chat, 500)
    for number in range(300):
        desk.placer.ended(scoring(number), 1)
    assert desk.placer.lengths.predict("", 100, 2000) == desk.placer.lengths.typical_tokens == 500


async def test_observers_hear_once_of_each_placement_also_of_one_that_queued() -> None:
    heard: list[PlacementQuery] = []

    class Heard(NoRouterEvents):
        def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
            heard.append(query)

    desk = Desk(events=Heard())
    desk.fill()
    first = asyncio.create_task(desk.place())
    await asyncio.sleep(0.3)
    desk.free()
    await desk.place(1)  # asks before the queue has heard of the room
    await first
    assert len(heard) == 2


async def test_who_waits_may_leave_and_nothing_of_it_stays() -> None:
    desk = Desk()
    desk.fill()
    beating = asyncio.create_task(desk.keep_alive())
    waiting = [asyncio.create_task(desk.place(number)) for number in range(5)]
    await asyncio.sleep(0.5)
    for task in waiting[:4]:
        task.cancel()
    await asyncio.gather(*waiting[:4], return_exceptions=True)
    assert desk.placer.waiting == 1 and desk.owes() == 0
    desk.free()
    waiting[4].cancel()  # at the very moment at which it would be placed
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(1.0)
    assert desk.placer.waiting == 0 and desk.owes() == 0
    beating.cancel()


async def test_who_can_no_longer_come_in_time_is_refused_when_its_turn_comes() -> None:
    desk = Desk(RoutingConfig(ttft_slo_seconds=2.0))
    desk.accounts.heard(decode_status("d0", (200,), (60000,), free=(0,)), 0.0)
    beating = asyncio.create_task(desk.keep_alive())
    began = desk.clock.now()
    with pytest.raises(OverloadedError, match="2 s is the limit"):
        await desk.place()
    assert desk.clock.now() - began <= 2.0 + 2 * LOOK_SECONDS, "as soon as that is known"
    assert desk.counters["rejections"] == 1 and desk.owes() == 0
    past = desk.placer.status().decisions[0]
    assert past.kind == "refused: ttft" and "limit" in past.reason and past.decode == ""
    beating.cancel()


async def test_a_worker_that_fails_in_a_row_is_left_alone_for_a_while_and_heals() -> None:
    desk = Desk(decodes=2)
    beating = asyncio.create_task(desk.keep_alive())

    async def attempt(fails: bool) -> str:
        placement = await desk.place()
        decode = placement.decision.decode
        if not fails:
            placement.prefilled()
        placement.end([decode] if fails else [])
        return decode

    assert [await attempt(True) for _ in range(FAILURES)] == ["d0"] * FAILURES, (
        "the first of two alike"
    )
    assert {await attempt(False) for _ in range(5)} == {"d1"}
    assert desk.placer.status().accounts[1].barred_seconds > 0
    await asyncio.sleep(FIRST_SECONDS)
    probe = await desk.place()
    assert probe.decision.decode == "d0"
    assert (await desk.place()).decision.decode == "d1", "one probe at a time"
    probe.prefilled()
    probe.end()
    assert await attempt(False) == "d0"
    beating.cancel()


async def test_the_end_of_a_long_answer_lets_nobody_back_who_has_failed_since() -> None:
    desk = Desk(decodes=2)
    long = await desk.place()
    worker = long.decision.decode
    long.prefilled()
    long.worked([worker])
    for _ in range(FAILURES):
        desk.placer.failed(worker)
    long.end()
    barred = {
        account.worker for account in desk.placer.status().accounts if account.barred_seconds > 0
    }
    assert barred == {worker}


def undescribed(times: StepTimes | None, routing: RoutingConfig | None = None) -> Desk:
    described = Description("r", replace(H100, hardware=None))
    desk = Desk(routing)
    for status in (prefill_status("p0"), decode_status("d0")):
        desk.accounts.state.describe(status.name, described)
        desk.accounts.heard(msgspec.structs.replace(status, times=times), desk.clock.now())
    return desk


MEASURED = StepTimes((512,), ((512, 0, 0.05),), (1, 8), ((1, 1, 0.01), (8, 1, 0.012)))


async def test_after_one_late_first_token_one_request_at_a_time_tries_whether_it_is_over() -> None:
    desk = undescribed(MEASURED, RoutingConfig(ttft_slo_seconds=2.0))
    slow = await desk.place()
    slow.prefilled()
    slow.measured_ttft(60.0)
    slow.end()
    for number in range(8):
        trying = await desk.place(number)
        if not number:
            with pytest.raises(OverloadedError, match="2 s is the limit"):
                await desk.place(100)
        trying.prefilled()
        trying.measured_ttft(0.05)
        trying.end()
    await asyncio.gather(*(desk.place(number) for number in range(200, 204)))


@pytest.mark.parametrize(("times", "told"), [(None, "assumed"), (MEASURED, "learned")])
async def test_only_outcomes_of_measured_times_correct_the_predictions_of_all(
    times: StepTimes | None, told: str
) -> None:
    desk = undescribed(times)
    for number in range(30):
        placement = await desk.place(number)
        placement.measured_ttft(5.0)
        placement.end()
    assert {account.prices for account in desk.placer.status().accounts} == {told}


async def test_what_was_predicted_is_held_against_what_came() -> None:
    told: list[tuple[str, float, float]] = []

    class Told(NoRouterEvents):
        def measured(self, what: str, predicted: float, actual: float) -> None:
            told.append((what, predicted, actual))

    desk = Desk(events=Told())
    asked = desk.seek()
    placement = await desk.placer.place(asked)
    placement.measured_ttft(0.5)
    placement.measured_tpot(0.02)
    past = desk.placer.status().decisions[0]
    assert past.request_id == asked.request.request_id != ""
    assert told == [
        ("ttft", past.predicted_ttft_seconds, 0.5),
        ("tpot", past.predicted_step_seconds, 0.02),
    ]
    assert past.ttft_seconds == 0.5 and past.tpot_seconds == 0.02 and past.prompt_tokens == 100
    assert past.decode == "d0"


async def test_a_quota_is_kept_by_nobody_who_was_not_placed() -> None:
    """A request costs 200: the burst is enough for one."""
    desk = Desk(RoutingConfig(tenant_quotas="t=20", quota_burst_seconds=10.0, ttft_slo_seconds=2.0))
    desk.fill()
    waiting = asyncio.create_task(desk.place(tenant="t"))
    await asyncio.sleep(0.3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    desk.accounts.forget("d0")
    with pytest.raises(NoWorkerError):
        await desk.place(tenant="t")
    desk.accounts.heard(prefill_status("p0"), desk.clock.now())
    desk.free()
    await desk.place(tenant="t")
    with pytest.raises(OverloadedError, match="used up"):
        await desk.place(tenant="t")


async def test_while_requests_wait_workers_are_asked_now_and_then_and_not_for_having_answered():
    desk, asked = Desk(), 0
    desk.fill()

    async def ask_workers() -> None:
        nonlocal asked
        asked += 1
        for status in desk.accounts.state.statuses():
            desk.accounts.heard(status, desk.clock.now())

    placer = Placer(desk.accounts, PlacerSettings(), desk.clock, desk.counters, refresh=ask_workers)
    waiting = asyncio.create_task(placer.place(desk.seek()))
    await asyncio.sleep(20 * LOOK_SECONDS)
    assert 10 <= asked <= 23 and placer.waiting == 1
    desk.free()
    assert (await waiting).decision.decode == "d0"


async def test_breakers_of_processes_that_left_are_not_kept() -> None:
    desk = Desk(decodes=3)
    for worker in ("d0", "d1"):
        desk.placer.failed(worker)
        desk.accounts.forget(worker)
    desk.placer.failed("d1")
    desk.placer.failed("d2")
    assert list(vars(vars(desk.placer)["_breakers"])["_breakers"]) == [("d2",)]


async def test_a_prompt_is_hashed_once_however_often_it_is_looked_at() -> None:
    hashed = list[str]()

    class CountingNames(BlockNames):
        def chain(self, request: Request, *others: Any) -> Sequence[bytes]:
            hashed.append(request.request_id)
            return super().chain(request, *others)

    known = KnownBlocks(b"secret", names=CountingNames)
    known.joined("p0", KeptScheme("model", 16, 16))
    desk = Desk(affinity=known)
    desk.fill()
    beating = asyncio.create_task(desk.keep_alive())
    waiting = asyncio.create_task(desk.place())
    await asyncio.sleep(20 * LOOK_SECONDS)
    # the index is read again each time
    prompt = desk.seek().request
    chain = BlockNames(b"secret", "model", 16).chain(prompt, prompt.prompt_token_ids, 16)
    told = b"".join(name[:TOLD_BYTES] for name in chain)
    known.told(KeptNews("p0", 1, 0, told, whole=True))
    desk.free()
    assert (await waiting).decision.cached_tokens == 96 and hashed == ["r0"]
    beating.cancel()
