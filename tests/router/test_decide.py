"""Placement by predicted seconds, against going through every pair with the cost model itself."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from jdisagg.costs.speeds import speed_of
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.cost_terms import STEPS_ALONE, STEPS_TO_JOIN
from jdisagg.router.decision import Decision, Deferred, PlacementPolicy, PlacementQuery, Refusal
from jdisagg.router.placement import WORTH_TO_OTHERS, decide
from jdisagg.scheduler.prompts import causal_pairs
from tests.router.decisions import ASK, EASY, closeness, decision
from tests.router.fleets import (
    A100,
    H100,
    accounts_of,
    decode_status,
    prefill_status,
    random_fleet,
    state_of,
)


def cheapest_pair(
    state: ClusterState,
    statuses: dict[str, WorkerStatus],
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> tuple[float, str, str]:
    """By the definition, worker by worker: predicted seconds to the end of the pair where they are
    least, less what its prefill worker need not compute, which others gain, too."""
    work, found = query.work, []
    for p in (name for name in statuses if name.startswith("p")):
        ours = state.description(p)
        assert ours.kind is not None
        speed, said = speed_of(ours.kind), statuses[p]
        assert speed is not None
        per_token, per_pair = speed.backlog_rates(said.chunk_tokens)
        queue = said.queued_tokens * per_token + said.queued_pairs * per_pair
        cached = min(query.cached.get(p, 0), work.tokens - 1)
        prefill = speed.prefill_seconds(work.tokens - cached, cached, said.chunk_tokens)
        spared = speed.prefill_seconds(work.tokens, 0, said.chunk_tokens) - prefill
        hardware = ours.kind.hardware
        assert hardware is not None
        links = (
            policy.far,
            hardware.scale_out,
            hardware.host,
            hardware.scale_up,
            hardware.scale_up,
        )
        for d in (name for name in statuses if name.startswith("d")):
            theirs, there = state.description(d), statuses[d]
            assert theirs.kind is not None
            other = speed_of(theirs.kind)
            assert other is not None
            rank = max(range(len(there.free_pages)), key=there.free_pages.__getitem__)
            sequences = max(there.rank_sequences[rank] + 1, *there.rank_sequences)
            contexts = max(there.rank_contexts[rank] + work.tokens, *there.rank_contexts)
            step = other.model.decode_of(sequences, contexts).seconds
            link = links[closeness(ours.place, theirs.place)]
            lanes = min(ours.kind.layout.tp, theirs.kind.layout.tp)
            moved = work.tokens - min(query.cached.get(d, 0), work.tokens - 1)
            transfer = link.seconds(moved * speed.wire_bytes_per_token / lanes)
            joins = (STEPS_TO_JOIN if there.running else STEPS_ALONE) * step
            seconds = queue + prefill + transfer + joins + (work.expected_tokens - 1) * step
            found.append((seconds - WORTH_TO_OTHERS * spared, seconds, p, d))
    return min(found)[1:]


@pytest.mark.parametrize("seed", range(12))
def test_the_pair_of_least_seconds_is_chosen(seed: int) -> None:
    accounts = random_fleet(seed, prefills=7, decodes=9)
    state = accounts.state
    statuses = {
        status.name: msgspec.structs.replace(status, can_prefill=status.name[0] == "p")
        for status in state.statuses()
    }
    for status in statuses.values():
        accounts.heard(status, 0.0)
    known = (
        {name: 16 * ((seed * 7 + at) % 60) for at, name in enumerate(statuses)} if seed % 2 else {}
    )
    query = PlacementQuery(Work(700 + 100 * seed, expected_tokens=20 + 30 * seed), known)
    seconds, prefill, decode = cheapest_pair(state, statuses, query, EASY)
    chosen = decision(state, query)
    assert (
        chosen.prefill is not None and chosen.terms is not None and chosen.tpot_seconds is not None
    )
    assert chosen.ttft_seconds is not None and chosen.handoff_gap_seconds is not None
    total = (
        chosen.ttft_seconds
        + chosen.handoff_gap_seconds
        + (query.work.expected_tokens - 1) * chosen.tpot_seconds
    )
    assert total == pytest.approx(seconds, rel=0.01)
    if (chosen.prefill, chosen.decode) != (prefill, decode):
        assert total <= seconds * 1.002, "another pair only where the grid cannot tell them apart"


def test_prefill_goes_by_seconds_of_work_not_by_requests() -> None:
    """Fewer tokens in the queue of a slow worker than in that of a fast one, and still later."""
    slow, fast = prefill_status("p0", queued_tokens=6000), prefill_status("p1", queued_tokens=8000)
    place = "r/h/d/p"
    state = accounts_of(
        {
            slow: Description(place, A100),
            fast: Description(place, H100),
            decode_status("d0"): Description(place, H100),
        }
    ).state
    assert decision(state).prefill == "p1"
    assert "first token in" in decision(state).reason


def test_long_waiting_prompts_count_by_their_attention_too() -> None:
    """As many tokens, in one prompt and in many: the one has more pairs of positions."""
    one = prefill_status("p0", queued_tokens=8000)
    many = msgspec.structs.replace(
        prefill_status("p1", queued_tokens=8000), queued_pairs=80 * causal_pairs(0, 100)
    )
    chosen = decision(state_of(one, many, decode_status("d0")))
    assert chosen.prefill == "p1"


def test_a_closer_decode_worker_wins_where_the_link_tells() -> None:
    query, place = PlacementQuery(Work(8000, expected_tokens=2)), "rack/host/domain/process"
    workers = {prefill_status("p0"): Description(place, H100)}
    for name, where in (
        ("far", "other"),
        ("rack", "rack/x"),
        ("host", "rack/host/y"),
        ("near", "rack/host/domain/z"),
    ):
        workers[decode_status(name)] = Description(where, H100)
    state = accounts_of(workers).state
    order = []
    while len(state) > 1:
        chosen = decision(state, query)
        order.append((chosen.decode, chosen.terms.transfer if chosen.terms else 0.0))
        state.forget(chosen.decode)
    assert [name for name, _ in order] == ["near", "host", "rack", "far"]
    assert all(first < second for (_, first), (_, second) in zip(order, order[1:], strict=False))


def test_a_short_prompt_is_not_prefilled_in_another_rack_while_there_is_one_at_hand() -> None:
    near, far = prefill_status("near", queued_tokens=20000), prefill_status("far")
    state = accounts_of(
        {
            near: Description("home/h/d/p", H100),
            far: Description("away/h/d/p", H100),
            decode_status("d0"): Description("home/h/d/q", H100),
        }
    ).state
    rules = replace(EASY, far_prefill_tokens=4000)
    for tokens, known, expected in (
        (3000, {}, "near"),
        (5000, {}, "far"),
        (5000, {"far": 2000}, "near"),
    ):
        query = PlacementQuery(Work(tokens, expected_tokens=8), known)
        assert decision(state, query).prefill == "far", "by seconds alone"
        assert decision(state, query, rules).prefill == expected
    state.forget("near")
    assert decision(state, PlacementQuery(Work(3000)), rules).prefill == "far"


def test_known_beginnings_draw_the_request_on_both_sides() -> None:
    state = state_of(
        prefill_status("p0"),
        prefill_status("p1"),
        decode_status("d0"),
        decode_status("d1"),
        place="far",
    )
    chosen = decision(state, replace(ASK, cached={"p1": 800, "d1": 800}))
    assert chosen.prefill == "p1" and chosen.decode == "d1" and chosen.kind == "prefix"
    assert chosen.cached_tokens == 800
    assert decision(state).cached_tokens == 0
    whole = decision(state, replace(ASK, cached={"p1": 10**6}))
    assert whole.cached_tokens == ASK.work.tokens - 1, (
        "one position at least is computed, for its logits"
    )


def test_a_known_beginning_does_not_pin_to_a_worker_that_drains_or_is_silent_or_far_behind() -> (
    None
):
    cached = replace(ASK, cached={"p1": 900})
    drains = state_of(
        prefill_status("p0"), prefill_status("p1", draining=True), decode_status("d0")
    )
    assert decision(drains, cached).prefill == "p0"
    behind = state_of(
        prefill_status("p0"), prefill_status("p1", queued_tokens=20000), decode_status("d0")
    )
    assert decision(behind, cached).prefill == "p0"
    silent = accounts_of({prefill_status("p1"): Description("r", H100)}, now=-2.0)
    for status in (prefill_status("p0"), decode_status("d0")):
        silent.state.describe(status.name, Description("r", H100))
        silent.heard(status, 0.0)
    assert decision(silent.state, cached).prefill == "p0"


def test_the_steps_of_the_fullest_rank_count_and_the_emptiest_rank_takes_the_sequence() -> None:
    """The same number of sequences, on even and on uneven ranks."""
    even = decode_status("even", (50, 50), (20000, 20000))
    uneven = decode_status("uneven", (95, 5), (38000, 2000))
    chosen = decision(state_of(prefill_status("p0"), uneven, even))
    assert chosen.decode == "even"


def test_a_step_beyond_the_bound_is_avoided_and_when_none_is_left_the_request_waits() -> None:
    busy, idle = decode_status("busy", (200,), (30000,)), decode_status("idle", (100,), (60000,))
    steps = {
        name: decision(state_of(prefill_status("p0"), status)).tpot_seconds
        for name, status in (("busy", busy), ("idle", idle))
    }
    bound = np.mean([step for step in steps.values() if step is not None])
    policy = PlacementPolicy(tpot_slo_seconds=float(bound))
    within = min(steps, key=lambda name: steps[name] or 0.0)
    assert decision(state_of(prefill_status("p0"), busy, idle), policy=policy).decode == within
    answer = decide(
        state_of(prefill_status("p0"), busy, idle),
        ASK,
        0.0,
        PlacementPolicy(tpot_slo_seconds=0.001),
    )
    assert isinstance(answer, Deferred) and "room" in answer.reason
    empty = decide(
        state_of(prefill_status("p0"), decode_status("d0")),
        ASK,
        0.0,
        PlacementPolicy(tpot_slo_seconds=0.0001),
    )
    assert isinstance(empty, Decision), "an empty worker is as good as it gets"


def test_pages_for_the_expected_growth_of_all_that_is_there_are_kept() -> None:
    accounts = accounts_of(
        {
            status: Description("r", H100)
            for status in (prefill_status("p0"), decode_status("d0"), decode_status("d1"))
        }
    )
    long = Work(16, expected_tokens=8000)
    for _ in range(8):
        accounts.place("p0", "d0", long, 0.0)
    accounts.heard(decode_status("d0", (8,), (8 * 16,)), 1.0)
    assert accounts.state.table["free_pages"][accounts.state.row("d0")] > 4000, (
        "hardly anything is used yet"
    )
    assert decision(accounts.state, PlacementQuery(long)).decode == "d1", (
        "501 pages each are spoken for"
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_who_waits_for_pages_of_later_growth_waits_for_as_many_ends_as_free_them(
    ranks: int,
) -> None:
    """Eight sequences have used a page each, and will use nearly all: one of them must end."""
    each, pages, long = 8 // ranks, 4096 // ranks, Work(16, expected_tokens=8000)
    worker = msgspec.structs.replace(
        decode_status("d0", (each,) * ranks, (16 * each,) * ranks, (pages - each,) * ranks),
        total_pages=(pages,) * ranks,
    )
    described = Description("r", H100)
    accounts = accounts_of({prefill_status("p0"): described, worker: described})
    for _ in range(8):
        accounts.place("p0", "d0", long, 0.0)
    accounts.heard(worker, 1.0)
    terms = decision(
        accounts.state, PlacementQuery(long, typical_tokens=8000.0, under_way=True)
    ).terms
    assert terms.decode_queue == pytest.approx(8000 * terms.step / 8)


def test_a_full_decode_side_holds_and_the_wait_is_littles_law() -> None:
    full = decode_status("d0", (100,), (100000,), free=(0,))
    query = replace(ASK, typical_tokens=200.0)
    answer = decide(state_of(prefill_status("p0"), full), query, 0.0, PlacementPolicy())
    assert isinstance(answer, Deferred)
    chosen = decision(state_of(prefill_status("p0"), full), replace(query, under_way=True))
    assert chosen.terms is not None
    each = 4096 / 100  # pages a sequence
    needed = np.ceil(-(-1100 // 16) / each)
    assert chosen.terms.decode_queue == pytest.approx(
        needed * 200 * chosen.terms.step / 100, rel=1e-6
    )


def test_no_more_sequences_than_a_worker_has_slots_are_in_a_step_and_leave_at_once() -> None:
    described = Description("a/b/c", H100)
    accounts = accounts_of(
        {prefill_status("p0"): described, decode_status("d0", slots=8): described}
    )
    query = replace(ASK, typical_tokens=200.0, under_way=True)
    for _ in range(100):
        accounts.place("p0", "d0", query.work, 0.0)
    terms = decision(accounts.state, query).terms
    (room,) = accounts.state.decode.room
    assert terms is not None and 8 <= room < 12
    each = query.work.tokens
    assert terms.step == pytest.approx(
        speed_of(H100).model.decode_of(8, 8 * each).seconds, rel=0.03
    )
    waits = 101 - room  # sequences that must end first
    assert terms.decode_queue == pytest.approx(waits * 200 * terms.step / 8, rel=1e-6)


def test_what_would_come_too_late_is_refused_with_the_time_that_it_is_late() -> None:
    state = state_of(prefill_status("p0", queued_tokens=50000), decode_status("d0"))
    predicted = decision(state).ttft_seconds
    assert predicted is not None
    answer = decide(state, replace(ASK, limit_seconds=predicted - 0.5), 0.0, EASY)
    assert isinstance(answer, Refusal) and answer.retry_after_seconds == pytest.approx(0.5)
    assert isinstance(
        decide(state, replace(ASK, limit_seconds=predicted + 0.001), 0.0, EASY), Decision
    )
    late = replace(ASK, limit_seconds=predicted + 0.001, age_seconds=0.1)
    assert isinstance(decide(state, late, 0.0, EASY), Refusal), "it has waited already"
    assert isinstance(decide(state, replace(late, under_way=True), 0.0, EASY), Decision), (
        "what was let in goes on"
    )
    queued = replace(ASK, limit_seconds=predicted + 0.001, ahead_seconds=0.1)
    assert isinstance(decide(state, queued, 0.0, EASY), Refusal), "others are in front of it"


def test_more_work_than_the_bound_at_every_prefill_worker_holds_new_requests_here() -> None:
    state = state_of(prefill_status("p0", queued_tokens=20000), decode_status("d0"))
    answer = decide(state, ASK, 0.0, PlacementPolicy(hold_seconds=0.1))
    assert isinstance(answer, Deferred) and "prefill" in answer.reason
    assert isinstance(
        decide(state, replace(ASK, under_way=True), 0.0, PlacementPolicy(hold_seconds=0.1)),
        Decision,
    )


@pytest.mark.parametrize(("prompt", "placed"), [(2048, 12), (1024, 24), (20_000, 4)])
def test_a_prefill_worker_of_several_ranks_gets_three_full_chunks_before_requests_are_held(
    prompt: int, placed: int
) -> None:
    """A chunk that takes longer than the bound must not be issued with few of the ranks filled:
    one chunk runs, one is issued behind it, one gathers prompts. Each of the prompts longer than
    this gets a rank."""
    policy = PlacementPolicy(hold_seconds=0.001)
    query = PlacementQuery(Work(prompt, expected_tokens=10))

    def outcome(others: int, ranks: int) -> object:
        worker = msgspec.structs.replace(
            prefill_status("p0", queued_tokens=others * prompt),
            queued_pairs=others * causal_pairs(0, prompt),
            layout=f"dp={ranks}",
            free_pages=(4096,) * ranks,
            total_pages=(4096,) * ranks,
        )
        return decide(state_of(worker, decode_status("d0")), query, 0.0, policy)

    assert isinstance(outcome(1, 1), Deferred), "any prompt fills a single rank"
    held = next(others for others in range(99) if isinstance(outcome(others, 4), Deferred))
    assert placed <= held <= placed + placed // 3


def test_who_is_chosen_for_what_it_knows_holds_nobody_back_while_another_is_free() -> None:
    """Else all behind it would wait, too, beside workers that have nothing to do."""
    policy = PlacementPolicy(hold_seconds=0.01)
    query = PlacementQuery(Work(20_000, expected_tokens=10), cached={"p0": 19_000})
    busy = prefill_status("p0", queued_tokens=4000)
    free = state_of(busy, prefill_status("p1"), decode_status("d0"))
    chosen = decision(free, query, policy)
    assert chosen.prefill == "p0" and chosen.terms is not None
    assert chosen.terms.prefill_queue > policy.hold_seconds
    both = state_of(busy, prefill_status("p1", queued_tokens=9000), decode_status("d0"))
    assert isinstance(decide(both, query, 0.0, policy), Deferred)


def test_a_short_prompt_is_prefilled_where_it_is_decoded_when_that_is_cheaper_by_enough() -> None:
    """The prefill workers have much to do, and the decode worker says that it can."""
    able, unable = decode_status("d0", can_prefill=True), decode_status("d0")
    busy = prefill_status("p0", queued_tokens=20000)
    short = PlacementQuery(Work(100, expected_tokens=50))
    local = decision(state_of(busy, able), short)
    assert (local.prefill, local.decode, local.kind) == (None, "d0", "local")
    assert "less in total than p0" in local.reason
    apart = decision(state_of(busy, unable), short)
    assert apart.prefill == "p0" and "d0 alone would be cheaper, but cannot prefill" in apart.reason
    assert "cannot" not in decision(state_of(prefill_status("p0"), unable), ASK).reason
    idle = state_of(prefill_status("p0"), able)
    gain = [decision(idle, short, PlacementPolicy(local_gain=part)).prefill for part in (0.0, 0.99)]
    assert gain[1] == "p0", "nothing is gained by so much"


def test_never_where_a_running_stream_would_wait_for_a_token_beyond_the_bound() -> None:
    running = decode_status("d0", (50,), (50000,), can_prefill=True)
    busy = prefill_status("p0", queued_tokens=20000)
    query = PlacementQuery(Work(1500, expected_tokens=50))
    assert decision(state_of(busy, running), query).prefill is None
    step = decision(state_of(busy, running), query).tpot_seconds
    assert step is not None
    assert (
        decision(
            state_of(busy, running),
            query,
            PlacementPolicy(tpot_slo_seconds=1.5 * step, hold_seconds=1e9),
        ).prefill
        == "p0"
    )


def test_a_worker_that_describes_no_model_is_placed_by_assumed_times() -> None:
    known = {
        prefill_status("p0"): Description("r", H100),
        decode_status("d0", (200,), (80_000,)): Description("r", H100),
    }
    state = accounts_of({**known, decode_status("d1"): Description("r")}).state
    chosen = decision(state)
    assert chosen.decode == "d1" and chosen.tpot_seconds > 0


def test_a_prompt_waits_for_who_knows_it_up_to_twice_what_that_saves() -> None:
    """Of what a worker need not compute half is its own gain and half that of those behind."""
    speed = speed_of(H100)
    assert speed is not None
    cached = replace(ASK, cached={"p1": 900})
    cold = speed.prefill_seconds(ASK.work.tokens, 0, 2048)
    saved = cold - speed.prefill_seconds(ASK.work.tokens - 900, 900, 2048)
    per_token, per_pair = speed.backlog_rates(2048)

    def chosen(tokens: int) -> tuple[str | None, float]:
        busy = prefill_status("p1", tokens)
        found = decision(state_of(prefill_status("p0"), busy, decode_status("d0")), cached)
        return found.prefill, busy.queued_tokens * per_token + busy.queued_pairs * per_pair

    waits = [chosen(tokens) for tokens in range(0, 4000, 100)]
    longest = max(queue for worker, queue in waits if worker == "p1")
    shortest = min(queue for worker, queue in waits if worker == "p0")
    assert saved < longest <= 2.05 * saved, "longer than is saved itself, yet not for ever"
    assert 1.8 * saved < shortest
