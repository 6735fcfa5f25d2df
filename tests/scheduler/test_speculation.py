"""Which drafts a step verifies: predictions from the sequence's own tokens, and their worth."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from jdisagg.messages.step_commands import DecodeResult, DecodeSteps, SampledToken
from jdisagg.scheduler.admission import Admission
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.draft_worth import (
    LEAST_REST,
    LEAST_SAMPLES,
    MOST_CREDIT,
    PRIOR,
    REMEASURE,
    Acceptance,
)
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.ngram import MOST_SEARCHED, NgramSearch
from jdisagg.scheduler.sequences import Sequence
from jdisagg.scheduler.speculation import CHAIN, Draft, NgramDrafter, Speculation
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import toy_limits
from tests.scheduler.bench import granted, prompts_of, waiting

LIMITS = replace(toy_limits(context_tokens=400, pages_per_rank=400), speculates=True)


def test_the_tokens_after_an_earlier_occurrence_are_the_prediction() -> None:
    index = NgramSearch([7, 1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert index.predict([4], 3) == (0, (5, 6, 1)), "four tokens occurred before"
    assert index.predict([4, 9], 3) is None
    assert index.predict([4, 9, 5, 6], 2) == (1, (1, 2)), "two did"


def test_the_latest_occurrence_counts_and_longer_ones_come_first() -> None:
    assert NgramSearch([1, 2, 3, 1, 2, 4, 1, 2]).predict([], 2) == (1, (4, 1))
    index = NgramSearch([9, 8, 1, 2, 3, 1, 2, 4, 9, 8, 1])
    assert index.predict([2], 1) == (0, (3,))


def test_a_prediction_beyond_the_end_goes_on_with_its_own_tokens() -> None:
    assert NgramSearch([1, 2, 1, 2, 1]).predict([], 5) == (1, (2, 1, 2, 1, 2))
    assert NgramSearch([5, 5]).predict([5], 4) == (1, (5, 5, 5, 5))


@pytest.mark.parametrize("prompt_tokens", [4, 9000])
def test_only_the_newest_tokens_are_searched_and_kept(prompt_tokens: int) -> None:
    tokens = list(range(40_000))
    search = NgramSearch(tokens[:prompt_tokens])
    for end in range(prompt_tokens, len(tokens), 512):
        assert search.predict(tokens[prompt_tokens:end], 1) is None
    recent = len(tokens) + 2 - MOST_SEARCHED
    generated = [*tokens[prompt_tokens:], recent, recent + 1]
    assert search.predict(generated, 2) == (1, (recent + 2, recent + 3))
    assert search.predict([*generated, recent - 20, recent - 19], 1) is None, "too old"
    assert len(search._tokens) == 4 * MOST_SEARCHED


def test_bytes_that_begin_within_a_token_are_no_occurrence() -> None:
    """The bytes of 0x100 and 0x1 are in those of 0x10001 and 0x0, a byte later."""
    assert NgramSearch([0x10001, 0x100, 0, 7, 8]).predict([0x100, 0x1], 1) is None
    inside = [0x100, 1, 9, 0x10000, 0x100, 1 << 8, 7, 0x100]
    assert NgramSearch(inside).predict([1], 1) == (1, (9,))


def test_predictions_are_those_of_a_search_through_all_tokens() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(400)]
    index = NgramSearch(tokens[:50])
    for end in range(50, 400):
        found, known = index.predict(tokens[50:end], 1), tokens[:end]
        wanted = None
        for kind, size in enumerate((4, 2)):
            ends = [at for at in range(size, end) if known[at - size : at] == known[-size:]]
            if ends:
                wanted = (kind, (known[ends[-1]],))
                break
        assert found == wanted


class Bench:
    """The planner of a mesh with speculation, beside a model whose next token is a function of the
    position."""

    def __init__(self, limits: MeshLimits = LIMITS, text: Iterable[int] = ()) -> None:
        self.state = DecodeState(limits)
        self.admission = Admission(self.state, prompts_of(self.state), growth_tokens=64)
        self.speculation = Speculation(limits, NgramDrafter())
        self.batches = DecodeBatches(self.state, 64, 1, speculation=self.speculation)
        self.text = list(text)
        self.at: dict[int, int] = {}
        self.step = 0

    def ready(self, number: int, prompt: list[int], max_tokens: int = 300) -> Sequence:
        request = replace(
            toy_request(number, 1, max_tokens=max_tokens), prompt_token_ids=tuple(prompt)
        )
        group = granted(self.admission, waiting(self.state, request, number))
        self.state.advance(group, HandoffEvent.GENERATE, 9.0)
        self.batches.ready(group, (SampledToken(group.key, 0, self.text[0]),), 0, 9.0)
        (child,) = group.children
        self.at[child.key] = 0
        return child

    def plan(self) -> DecodeSteps:
        self.step += 1
        plan = self.batches.next_step(self.step, True)
        assert plan is not None
        return plan

    def run(self, plan: DecodeSteps, seconds: float = 1.0) -> list[int]:
        """What a mesh does with a plan. The number of tokens of each row."""
        drafts = {one.row: one for one in plan.drafts}
        rows: list[tuple[int, ...]] = []
        for row, slot in enumerate(plan.slots[0]):
            child = self.state.slots[0][slot]
            assert child is not None
            begin = self.at[child.key]
            count = 1
            if row in drafts:
                one = drafts[row]
                first = begin + child.group.prompt_tokens - one.start + 1
                for draft in one.tokens[first : first + one.count]:
                    if draft != self.text[begin + count]:
                        break
                    count += 1
            self.at[child.key] += count
            rows.append(tuple(self.text[begin + 1 : begin + 1 + count]))
        self.batches.apply(DecodeResult(plan.step, (tuple(rows),)), seconds)
        return [len(row) for row in rows]

    def measure_plain(self) -> None:
        """Runs the steps before drafts are tried first."""
        for _ in range(LEAST_SAMPLES):
            plan = self.plan()
            assert plan.drafts == ()
            self.run(plan)


LOOP = [1, 2, 3, 4, 5] * 60


def test_a_sequence_that_repeats_itself_takes_several_tokens_a_step_one_step_ahead() -> None:
    bench = Bench(text=LOOP)
    child = bench.ready(1, LOOP[:20])
    bench.measure_plain()
    ahead, taken = bench.plan(), []
    for _ in range(20):
        planned = bench.plan()
        taken += bench.run(ahead)
        ahead = planned
    assert child.generated == bench.text[: len(child.generated)]
    assert sum(taken) > 5 * len(taken), taken
    assert bench.speculation.accepted <= bench.speculation.drafted


def test_text_without_repetition_takes_no_drafts() -> None:
    bench = Bench(text=list(range(200)))
    bench.ready(1, [300, 301])
    for _ in range(30):
        plan = bench.plan()
        assert plan.drafts == ()
        bench.run(plan)


@pytest.mark.parametrize(("ratio", "pays"), [(1.2, True), (9.0, False)])
def test_drafts_are_taken_as_long_as_the_measured_step_is_worth_it(
    ratio: float, pays: bool
) -> None:
    bench = Bench(text=LOOP)
    bench.ready(1, LOOP[:20], max_tokens=290)
    drafted = 0
    for number in range(26):
        plan = bench.plan()
        bench.run(plan, ratio if plan.drafts else 1.0)
        drafted += bool(plan.drafts) and number >= 8
    assert (drafted > 12) == pays and (drafted == 0) != pays


def test_wrong_predictions_stop_drafts() -> None:
    rng = random.Random(1)
    # each pair occurred before, and something else followed
    text = [rng.randrange(3) for _ in range(280)]
    bench = Bench(text=text)
    bench.ready(1, [rng.randrange(3) for _ in range(60)])
    drafted = 0
    for _ in range(120):
        plan = bench.plan()
        bench.run(plan, 1.9 if plan.drafts else 1.0)
        drafted += bool(plan.drafts)
    assert 3 <= drafted < 40


def test_extra_rows_go_to_the_sequences_whose_drafts_are_accepted() -> None:
    bench = Bench(text=LOOP)
    children = [bench.ready(number, LOOP[:20]) for number in (1, 2, 3)]
    bench.measure_plain()
    for child, hits in zip(children, (0.0, 400.0, 250.0), strict=True):
        child.acceptance[0] = Acceptance(hits, 500.0)
    counts = {one.row: one.count for one in bench.plan().drafts}
    assert sum(counts.values()) == LIMITS.extra_rows(4)
    assert 0 not in counts and 1 <= counts[2] < counts[1]


def test_drafts_stop_before_the_limit_of_a_sequence() -> None:
    bench = Bench(text=LOOP)
    child = bench.ready(1, LOOP[:20], max_tokens=9)
    while child.generated[-1:] and len(child.generated) < 9:
        bench.run(bench.plan())
    assert len(child.generated) == 9 and bench.state.ledgers[0].free_pages == 400


def test_both_kinds_of_steps_are_measured_again_after_a_while() -> None:
    bench = Bench(limits=replace(LIMITS, context_tokens=12000, pages_per_rank=12000))
    bench.text = [1, 2, 3, 4, 5] * 2400
    bench.ready(1, bench.text[:20], max_tokens=11000)
    plain = []
    for number in range(2 * REMEASURE + 30):
        plan = bench.plan()
        if not plan.drafts:
            plain.append(number)
        bench.run(plan)
    assert len([number for number in plain if number > 20]) >= 2


def test_an_estimate_begins_at_the_prior_and_follows_what_comes() -> None:
    counts = Acceptance()
    assert counts.estimate() == PRIOR
    for _ in range(20):
        counts.add(3, 3)
    assert counts.estimate() > 0.95
    for _ in range(60):
        counts.add(0, 1)
    assert counts.estimate() < 0.2


def test_predictions_are_counted_without_drafts_so_that_drafts_begin_where_text_repeats() -> None:
    rng = random.Random(2)
    bench = Bench(text=[rng.randrange(3) for _ in range(100)] + LOOP[:180])
    child = bench.ready(1, [rng.randrange(3) for _ in range(60)], max_tokens=270)
    drafted: list[int] = []
    while len(child.generated) < 260:
        plan = bench.plan()
        if plan.drafts:
            drafted.append(len(child.generated))
        bench.run(plan, 2.2 if plan.drafts else 1.0)
    assert sum(at < 100 for at in drafted) < 12 and sum(at > 120 for at in drafted) > 8


def test_a_large_batch_without_drafts_makes_no_predictions_for_some_steps() -> None:
    class Counting(NgramDrafter):
        calls = 0

        def draft(self, child: Sequence, most: int) -> Draft | None:
            self.calls += 1
            return super().draft(child, most)

    limits = replace(LIMITS, slots_per_rank=16, batch_buckets=(16,))
    bench, drafter = Bench(limits, text=list(range(200))), Counting()
    bench.speculation._drafter = drafter
    for number in range(16):
        bench.ready(number + 1, [300, 301])
    for _ in range(20):
        bench.run(bench.plan())
    assert drafter.calls == 16 * 7, "in steps 1 to 4, 6, 9 and 14"


@pytest.mark.parametrize(("seconds", "least", "most"), [(1e-6, 30, 40), (2e-3, 8, 18)])
def test_predictions_that_take_long_are_made_less_often(
    seconds: float, least: int, most: int
) -> None:
    """A step takes 10 ms. Predictions may take 0.5 % of the time: 2 ms is that of 40 steps."""

    class Slow(NgramDrafter):
        now, calls = 0.0, 0

        def draft(self, child: Sequence, most: int) -> Draft | None:
            self.now, self.calls = self.now + seconds, self.calls + 1
            return None

    bench, drafter = Bench(text=list(range(300))), Slow()
    bench.batches.speculation = Speculation(LIMITS, drafter, lambda: drafter.now)
    bench.ready(1, [300, 301])
    for _ in range(270):
        bench.run(bench.plan(), 1e-2)
    assert least <= drafter.calls <= most


class MeshBench(Bench):
    """A mesh that drafts by itself, of whose drafts the first `right` are accepted."""

    def __init__(self, right: int) -> None:
        limits = replace(LIMITS, draft_layer="mtp")
        super().__init__(limits, range(300))
        speculation = Speculation.of(limits, lambda: 0.0)
        assert speculation is not None and speculation.source == "mtp"
        self.speculation = self.batches.speculation = speculation
        self.right = right

    def run(self, plan: DecodeSteps, seconds: float = 1.0) -> list[int]:
        count = 1 + min(self.right, *(one.count for one in plan.drafts)) if plan.drafts else 1
        child = self.state.slots[0][plan.slots[0][0]]
        assert child is not None and len(plan.slots[0]) == 1
        begin = self.at[child.key] + 1
        self.at[child.key] += count
        tokens = tuple(self.text[begin : begin + count])
        self.batches.apply(DecodeResult(plan.step, ((tokens,),)), seconds)
        return [count]


def test_a_step_verifies_the_drafts_of_the_step_before_which_is_not_read_yet() -> None:
    bench = MeshBench(right=2)
    child = bench.ready(1, [1, 2])
    bench.measure_plain()
    first, second = bench.plan(), bench.plan()
    assert [(one.tokens, one.count) for one in first.drafts] == [((), 0)], "none are made yet"
    assert [(one.tokens, one.count) for one in second.drafts] == [((), CHAIN)]
    assert bench.run(first) + bench.run(second) == [1, 3]
    assert child.generated == list(range(8))
    drafts = bench.speculation
    assert (drafts.source, drafts.drafted, drafts.accepted) == ("mtp", 3, 2)


def tried_again(bench: Bench) -> DecodeSteps:
    """The first step of the next trial, once it is due."""
    for worth in bench.speculation._worth.values():
        worth.credit, worth.rested = MOST_CREDIT, LEAST_REST
    for _ in range(20):
        plan = bench.plan()
        if plan.drafts:
            return plan
        bench.run(plan)
    raise AssertionError("drafts were not tried again")


def test_after_a_step_without_drafts_there_are_none_to_verify() -> None:
    bench = MeshBench(right=3)
    bench.ready(1, [1, 2])
    bench.measure_plain()
    plan = bench.plan()
    assert plan.drafts
    while plan.drafts:
        bench.run(plan, 9.0)  # which does not pay
        plan = bench.plan()
    bench.run(plan)
    assert [one.count for one in tried_again(bench).drafts] == [0]


def test_acceptance_of_a_mesh_with_drafts_that_pay_is_not_forgotten() -> None:
    bench = MeshBench(right=3)
    child = bench.ready(1, [1, 2])
    bench.measure_plain()
    for _ in range(30):
        bench.run(bench.plan())
    assert child.acceptance[0].estimate() > 0.9


def test_acceptance_may_be_forgotten_while_drafts_are_in_flight() -> None:
    """Those of steps of another kind, such as another batch size."""
    bench = MeshBench(right=2)
    child = bench.ready(1, [1, 2])
    bench.measure_plain()
    flight = [bench.plan(), bench.plan()]
    for worth in bench.speculation._worth.values():
        worth.credit, worth.rested = MOST_CREDIT, LEAST_REST
        worth.drafted.extend([1.0] * LEAST_SAMPLES)
    flight.append(bench.plan())
    assert child.acceptance[0] == Acceptance()
    assert [bench.run(plan) for plan in flight] == [[1], [3], [3]]
    assert bench.speculation.accepted == 4


def test_drafts_of_a_mesh_that_were_seldom_accepted_are_tried_again_later() -> None:
    bench = MeshBench(right=0)
    bench.text = list(range(300)) * 4
    child = bench.ready(1, [1, 2], max_tokens=800)
    drafted = []
    for number in range(200):
        plan = bench.plan()
        if plan.drafts:
            drafted.append(number)
        bench.run(plan, 1.5 if plan.drafts else 1.0)
    assert drafted and max(drafted) < 60, "it stops"
    assert child.acceptance[0].estimate() < 0.6 * PRIOR
    tried_again(bench)
    assert child.acceptance[0].estimate() == PRIOR
