"""The decode scheduler by hand: plans, results that come one step late, overrun, growth,
preemption."""

import pytest

from jdisagg.messages.step_commands import SampledToken
from jdisagg.request import FinishReason, Grammar, GrammarKind
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.sequences import Stage
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.bench import STOP, Bench, granted, waiting


def test_the_next_step_is_planned_before_the_last_is_read() -> None:
    bench = Bench(toy_limits())
    group = bench.ready(1)
    first, second = bench.plan(), bench.plan()
    assert first.admits[0].position == 4 and not second.admits
    bench.result(first, (2,))
    bench.result(second, (3,))
    assert group.children[0].generated == [1, 2, 3]


def test_tokens_behind_a_stop_are_overrun_and_dropped() -> None:
    bench = Bench(toy_limits(), steps=3)
    (child,) = bench.ready(1).children
    bench.result(bench.plan(), (5,))
    wide, late = bench.plan(), bench.plan()
    assert wide.steps == 3
    bench.state.take_news()
    bench.result(wide, (6, STOP, 7))
    bench.result(late, (8, 9, 10))
    assert child.generated == [1, 5, 6, STOP]
    news = bench.state.take_news()
    assert [(progress.token_ids, progress.finish) for progress in news] == [
        ((6, STOP), FinishReason.STOP)
    ]
    assert bench.state.ledgers[0].free_pages == 64


def test_a_sequence_is_stepped_to_its_limit_and_no_further() -> None:
    bench = Bench(toy_limits(), steps=4)
    bench.ready(1, max_tokens=4)
    admit = bench.plan()
    assert admit.admits[0].limit == 4 + 4 - 1
    last = bench.plan()
    assert bench.batches.next_step(9, True) is None, (
        "nothing is left to issue, though nothing is read"
    )
    bench.result(admit, (2,))
    bench.result(last, (3, 4, -1, -1))
    assert bench.state.take_news()[-1].finish is FinishReason.LENGTH


def test_a_dispatch_of_several_steps_ends_with_the_longest_sequence() -> None:
    bench = Bench(toy_limits(), steps=4)
    bench.ready(1, max_tokens=4)
    bench.ready(2, max_tokens=8)
    plans = [bench.plan() for _ in range(3)]
    assert [plan.steps for plan in plans] == [1, 4, 2], (
        "seven steps are left for the longer one after its first token"
    )


def test_a_step_under_a_grammar_may_bring_a_run_or_nothing_and_the_next_plan_knows() -> None:
    bench = Bench(toy_limits(page_size=4), growth_tokens=4)
    (child,) = bench.ready(1, grammar=Grammar(GrammarKind.REGEX, "a*")).children
    first, second, third = bench.plan(), bench.plan(), bench.plan()
    assert first.masked and first.admits[0].limit == 8
    bench.result(first, (2,))
    assert (child.position, child.issued_position) == (5, 7)
    bench.result(second, (3, 4, 5))
    assert (child.position, child.issued_position) == (8, 9), "one is counted with, two more came"
    grown = bench.plan()
    assert [grow.limit for grow in grown.grows] == [16], "the slot stands at its limit of 8"
    bench.result(third, (-1,))
    bench.result(grown, (6,))
    assert (child.position, child.issued_position) == (9, 9)
    assert child.generated == [1, 2, 3, 4, 5, 6]
    assert bench.batches.forced_tokens == 2


def test_a_stop_id_within_a_run_ends_the_sequence_there() -> None:
    bench = Bench(toy_limits())
    (child,) = bench.ready(1, grammar=Grammar(GrammarKind.REGEX, "a*")).children
    bench.result(bench.plan(), (2, STOP, 4))
    assert child.generated == [1, 2, STOP]
    assert bench.state.take_news()[-1].finish is FinishReason.STOP
    assert bench.state.ledgers[0].free_pages == 64


def test_without_a_grammar_a_step_brings_what_was_due() -> None:
    bench = Bench(toy_limits())
    bench.ready(1)
    with pytest.raises(AssertionError, match="2 tokens came back, 1 were due"):
        bench.result(bench.plan(), (2, 3))


def test_growth_comes_before_the_limit_is_reached() -> None:
    bench = Bench(toy_limits(page_size=4), growth_tokens=4)
    bench.ready(1, max_tokens=20)
    plans = [bench.plan() for _ in range(6)]
    assert plans[0].admits[0].limit == 8
    assert [[(grow.limit, len(grow.pages)) for grow in plan.grows] for plan in plans] == [
        [],
        [],
        [],
        [],
        [(12, 3)],
        [],
    ]


def test_the_youngest_is_preempted_and_its_tokens_in_flight_are_dropped() -> None:
    bench = Bench(toy_limits(pages_per_rank=5, page_size=4), growth_tokens=1)
    (old,), (young,) = bench.ready(1).children, bench.ready(2).children
    in_flight = [bench.plan() for _ in range(5)]
    for plan in in_flight:
        rows = ((2,),) if len(plan.slots[0]) == 1 else ((2,), (3,))
        bench.result(plan, *rows)
    assert (old.stage, young.stage) == (Stage.RUNNING, Stage.ENDED)
    preempted = [progress for progress in bench.state.take_news() if progress.preempted]
    assert len(preempted) == 1 and preempted[0].first_index == len(young.generated) == 1
    assert bench.state.preemptions == 1


def test_children_whose_kv_is_still_to_come_are_preempted_together_and_counted_one_by_one() -> None:
    bench = Bench(toy_limits(pages_per_rank=12, page_size=4), growth_tokens=1)
    (needy,) = bench.ready(1).children
    both = waiting(bench.state, toy_request(2, 4, n=2), 2, children=2)
    group = granted(bench.admission, both)
    ledger = bench.state.ledgers[0]
    ledger.extend(needy.key, ledger.free_pages)
    assert len(group.alive) == 2 and bench.state.preempt_for(needy) and ledger.free_pages
    assert bench.state.preemptions == sum(one.preempted for one in bench.state.take_news()) == 2


def test_a_lone_sequence_that_fits_the_rank_is_never_preempted() -> None:
    bench = Bench(toy_limits(pages_per_rank=6, page_size=4), growth_tokens=1)
    (child,) = bench.ready(1, max_tokens=20).children
    for token in range(19):
        bench.result(bench.plan(), (token,))
    assert bench.state.take_news()[-1].finish is FinishReason.LENGTH
    assert bench.state.preemptions == 0
    assert len(child.generated) == 20


def test_ready_sequences_wait_for_a_slot_oldest_first() -> None:
    bench = Bench(toy_limits(slots_per_rank=1))
    running = bench.ready(1)
    bench.plan()
    waiting = bench.ready(2)
    assert not bench.plan().admits
    bench.state.end_group(running)
    plan = bench.plan()
    assert [admit.sequence for admit in plan.admits] == [waiting.children[0].key]
    assert plan.slots == ((0,),)


def test_an_admission_carries_the_tokens_that_penalties_count() -> None:
    bench = Bench(toy_limits())
    bench.ready(1)
    bench.plan()
    request = toy_request(2, temperature=0.7, presence_penalty=1.0)
    group = granted(bench.admission, waiting(bench.state, request, 2))
    bench.state.advance(group, HandoffEvent.GENERATE, 9.0)
    bench.batches.ready(group, (SampledToken(group.key, 0, 42),), 0, 9.0)
    plan = bench.plan()
    assert plan.admits[0].sample.prompt_history == request.prompt_token_ids
    assert plan.admits[0].sample.output_history == (42,), (
        "the slot's own token is part of the history"
    )
