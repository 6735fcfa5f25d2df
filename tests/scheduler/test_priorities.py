"""Who is set aside for a request of higher priority, on which rank, and in which order prompts of
several priorities are computed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.messages.step_commands import SampledToken
from jdisagg.scheduler.admission import Admitted
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.sequences import (
    MOST_PRIORITY,
    PRIORITY_SECONDS,
    Sequence,
    Stage,
    YieldingSequence,
    to_preempt,
    yields,
)
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.bench import Bench, granted, waiting
from tests.scheduler.prompts import Sender, batches, job

NUMBERS = st.integers(-20, 20)


@given(NUMBERS, NUMBERS, st.floats(0.0, 1000.0))
def test_only_a_lower_priority_yields_and_not_for_ever(mine: int, other: int, aside: float) -> None:
    if yields(mine, aside, other):
        assert mine < other
        assert aside < 2 * MOST_PRIORITY * PRIORITY_SECONDS
        assert yields(mine, aside / 2, other)
    assert yields(0, PRIORITY_SECONDS - 1, 1) and not yields(0, PRIORITY_SECONDS, 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=8),
    st.integers(-3, 20),
    st.integers(-2, 6),
)
def test_the_lowest_and_newest_are_preempted_and_no_more_than_needed(
    shapes: list[tuple[int, int, bool]], pages: int, sequences: int
) -> None:
    holders = [
        YieldingSequence(key, priority, (float(key), key, 0), count, computed)
        for key, (priority, count, computed) in enumerate(shapes)
    ]
    chosen = to_preempt(holders, pages, sequences)
    if chosen is None:
        assert sum(one.pages for one in holders) < pages or len(holders) < sequences
        return
    assert sum(one.pages for one in chosen) >= pages and len(chosen) >= sequences
    for one in chosen:
        rest = [other for other in chosen if other is not one]
        assert sum(other.pages for other in rest) < pages or len(rest) < sequences
    if pages <= 0 < sequences:  # each of them would do as well
        ranked = sorted(holders, key=lambda one: (one.priority, not one.computed, -one.key))
        assert chosen == ranked[:sequences]


def ready(bench: Bench, number: int, priority: int, prompt_tokens: int = 16) -> Sequence:
    """A sequence that has all its KV."""
    request = toy_request(number, prompt_tokens, max_tokens=30)
    request = replace(request, priority=priority)
    group = granted(bench.admission, waiting(bench.state, request, number))
    bench.state.advance(group, HandoffEvent.GENERATE, 9.0)
    bench.batches.ready(group, (SampledToken(group.key, 0, 1),), 0, 9.0)
    return group.children[0]


def asks(bench: Bench, number: int, priority: int) -> Admitted:
    """What a request of a priority gets, beside all those that wait already."""
    request = replace(toy_request(number, 16, max_tokens=30), priority=priority)
    bench.admission.enqueue(waiting(bench.state, request, number))
    return bench.admission.admit(9.0)


def full_bench(*priorities: int) -> tuple[Bench, list[Sequence]]:
    """A rank that five pages for each sequence fill."""
    bench = Bench(toy_limits(page_size=4, pages_per_rank=6 * len(priorities)))
    return bench, [ready(bench, at, priority) for at, priority in enumerate(priorities, 1)]


def test_pages_of_the_lowest_priority_and_of_the_newest_go_to_a_higher_one() -> None:
    bench, (most, old, new, more) = full_bench(2, 0, 0, 1)
    assert asks(bench, 9, 0) == Admitted(), "an equal priority yields nothing"
    admitted = asks(bench, 10, 3)
    assert [group.request.priority for group in admitted.groups] == [3]
    assert admitted.yielded == 1 and new.stage is Stage.ENDED
    assert Stage.ENDED not in (most.stage, old.stage, more.stage)
    assert [one.yielded for one in bench.state.take_news()][-1]
    assert [one.priority for one in bench.admission.queue] == [0], "who came before still waits"


@pytest.mark.parametrize("children", [1, 2])
def test_pages_of_prompts_whose_kv_arrives_go_to_a_higher_priority(children: int) -> None:
    bench = Bench(toy_limits(page_size=4, pages_per_rank=7))
    low = granted(bench.admission, waiting(bench.state, toy_request(1, 16), 1, children))
    bench.state.advance(low, HandoffEvent.GENERATE, 9.0)
    assert {child.stage for child in low.children} == {Stage.RESERVED}
    admitted = asks(bench, 9, 1)
    assert [group.request.priority for group in admitted.groups] == [1]
    assert admitted.yielded == children and not low.alive


def test_none_whose_kv_arrives_gives_way_where_its_pages_are_not_enough() -> None:
    bench = Bench(toy_limits(page_size=4, pages_per_rank=9))
    low = granted(bench.admission, waiting(bench.state, toy_request(1, 4), 1, 2))
    high = granted(
        bench.admission, waiting(bench.state, replace(toy_request(2, 12), priority=2), 2)
    )
    for group in (low, high):
        bench.state.advance(group, HandoffEvent.GENERATE, 9.0)
    assert asks(bench, 9, 1) == Admitted() and len(low.alive) == 2


def test_one_that_came_back_yields_again_only_after_a_token() -> None:
    bench, (low,) = full_bench(0)
    assert low.yields_to(1)
    low.accepted = len(low.generated)
    assert not low.yields_to(1)
    low.generated.append(3)
    assert low.yields_to(1)
    low.aside_seconds = PRIORITY_SECONDS
    assert not low.yields_to(1) and low.yields_to(2), "it has aged by one step"
    assert asks(bench, 9, 1) == Admitted()


def test_one_that_yielded_waits_as_if_it_had_come_then() -> None:
    bench, _ = full_bench(0)
    for number, since in ((8, None), (7, 9.0)):
        request = toy_request(number, 16, max_tokens=30)
        asked = waiting(bench.state, request, number)
        bench.admission.enqueue(replace(asked, since=since))
    assert [waiting.arrival for waiting in bench.admission.queue] == [8.0, 7.0]


def test_a_ready_sequence_takes_the_slot_of_the_newest_of_lower_priority() -> None:
    bench = Bench(toy_limits(slots_per_rank=2))
    first, second = ready(bench, 1, 0), ready(bench, 2, 0)
    bench.plan()
    assert first.slot >= 0 and second.slot >= 0
    ready(bench, 3, 5)
    assert bench.batches.yielding_slots() == [second]
    bench.state.end_child(second, preempted=True)
    assert bench.batches.yielding_slots() == [], "a slot is free"


def test_growth_takes_no_page_of_a_higher_priority() -> None:
    bench, (low, high) = full_bench(0, 1)
    assert max((low, high), key=lambda one: one.precedence) is low, "though it is the older"


def test_a_prompt_of_higher_priority_goes_between_the_chunks_of_a_lower_one() -> None:
    packer = batches()
    packer.add(job(1, 150))
    assert [row.sequence for row in packer.next_chunk(0).rows] == [1]  # type: ignore[union-attr]
    packer.add(job(2, 10, arrival=-1.0))
    packer.add(job(3, 20, priority=1))
    rows = []
    while (chunk := packer.next_chunk(0)) is not None:
        rows.append([row.sequence for row in chunk.rows])
    assert rows == [[3], [1], [1, 2]]


def test_prompts_that_have_not_begun_give_their_pages_to_a_higher_priority() -> None:
    for pages, priority, placed, waits in (
        (6, 1, {1, 3}, {2}),
        (6, 0, {1, 2}, {3}),
        (12, 1, {1, 2}, {3}),  # none gives way where that is not enough
    ):
        queue = Sender(pages=11)
        queue.waits(1, 4)
        queue.waits(2, 4)
        queue.admit()
        queue.waits(3, pages, arrival=0.0, priority=priority)
        queue.admit()
        assert {one.key for one in queue.prompts.placed} == placed
        assert {one.key for one in queue.admission.queue} == waits
