"""What a decode worker beside prefill workers appends itself: the decision, worked out again by
hand, and who is protected."""

from dataclasses import replace

import msgspec
import pytest

from jdisagg.costs.measured import StepTimes
from jdisagg.costs.speeds import Speed
from jdisagg.errors import UnavailableError
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.cost_terms import STEPS_TO_JOIN, paced_until
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide
from jdisagg.router.predictor import Corrections, LearnedCorrections, PromptWay
from tests.router.decisions import APPEND, TURN, appends, decision
from tests.router.fleets import H100, accounts_of, prefill_status, state_of

POLICY = PlacementPolicy(hold_seconds=1e9)


def test_what_is_missing_is_appended_where_the_history_is_kept() -> None:
    state = state_of(prefill_status("p0"), appends("d0"), appends("d1"))
    chosen = decision(state, TURN, POLICY)
    assert (chosen.prefill, chosen.decode, chosen.kind) == (None, "d0", "local")
    assert chosen.cached_tokens == 4000 and "4000 tokens cached" in chosen.reason
    seconds = Speed(H100).prefill_seconds(200, 4000, APPEND)
    assert chosen.ttft_seconds == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize("missing", [APPEND, APPEND + 1])
def test_what_is_more_than_one_chunk_goes_to_a_prefill_worker(missing: int) -> None:
    state = state_of(prefill_status("p0"), appends("d0"))
    query = replace(TURN, work=Work(4000 + missing, expected_tokens=100))
    chosen = decision(state, query, POLICY)
    if missing <= APPEND:
        assert chosen.prefill is None
    else:
        assert chosen.prefill == "p0"
        assert f"compute {missing} tokens, more than --append_tokens={APPEND}" in chosen.reason


@pytest.mark.parametrize("running", [1, 16, 64])
@pytest.mark.parametrize("queued", [0, 500, 4000, 20_000])
@pytest.mark.parametrize("known", [0, 3968])
def test_the_way_that_is_chosen_is_the_cheaper_one(running: int, queued: int, known: int) -> None:
    """Of a prefill worker that knows some or none of it, and has more or less to do, and of a
    decode worker where more or fewer sequences run: seconds worked out by hand."""
    contexts, speed = running * 600, Speed(H100)
    state = state_of(prefill_status("p0", queued), appends("d0", running, contexts))
    query = replace(TURN, cached={"d0": 4000, **({"p0": known} if known else {})})
    policy = replace(POLICY, local_gain=0.0)
    chosen = decision(state, query, policy)
    assert chosen.terms is not None
    step = chosen.terms.step
    per_token, per_pair = speed.backlog_rates(2048)
    queue = queued * per_token + queued * (queued + 1) / 2 * per_pair
    apart = queue + speed.prefill_seconds(4200 - known, known, 2048) + STEPS_TO_JOIN * step
    chunk = speed.prefill_seconds(200, 4000, APPEND)
    # its own turn behind a step, its first own step, and what the others lose
    alone = chunk + step + step + chunk
    assert abs(apart - alone) > 0.05 * alone, "too close to tell"
    assert (chosen.prefill is None) == (alone < apart), chosen.reason


@pytest.mark.parametrize(
    ("running", "cached", "prefill"),
    [(0, 4000, None), (1, 4000, "p0"), (0, 0, "p0"), (0, 150, "p0")],
)
def test_the_required_gain_covers_other_streams_and_new_prompts_alone(
    running: int, cached: int, prefill: str | None
) -> None:
    """With a required gain that nothing reaches, an idle decode worker still continues a history
    that it has cached."""
    state = state_of(prefill_status("p0"), appends("d0", running, running * 600))
    work = Work(cached + 200, expected_tokens=100)
    query = replace(TURN, work=work, cached=dict.fromkeys(("p0", "d0"), cached) if cached else {})
    assert decision(state, query, replace(POLICY, local_gain=0.0)).prefill is None
    assert decision(state, query, replace(POLICY, local_gain=0.999)).prefill == prefill


def test_no_stream_there_waits_for_a_token_longer_than_the_bound() -> None:
    running = appends("d0", 50, 50_000)
    # so that only the bound speaks for the prefill worker
    state = state_of(prefill_status("p0", 20_000), running)
    free = decision(state, TURN, POLICY)
    assert free.prefill is None and free.terms is not None
    longest = Speed(H100).prefill_seconds(200, 4000, APPEND) + free.terms.step
    for bound, prefill in ((1.07 * longest, None), (0.93 * longest, "p0")):
        chosen = decision(state, TURN, replace(POLICY, tpot_slo_seconds=bound))
        assert chosen.prefill == prefill
    assert "its streams would wait" in chosen.reason
    idle = state_of(prefill_status("p0", 20_000), appends("d0"))
    alone = decision(idle, TURN, replace(POLICY, tpot_slo_seconds=0.93 * longest))
    assert alone.prefill is None, "nobody waits there"


def test_appends_are_as_far_apart_as_the_bound_leaves_time_for_and_others_go_elsewhere() -> None:
    """In the mean streams keep the bound: what a chunk takes of it they get back first."""
    accounts = accounts_of(
        {
            prefill_status("p0", 20_000): Description("r", H100),
            appends("d0", 50, 50_000): Description("r", H100),
        }
    )
    policy = replace(POLICY, tpot_slo_seconds=0.05)
    first = decision(accounts.state, TURN, policy, now=1.0)
    assert first.prefill is None and first.terms is not None
    until = paced_until(accounts.state, TURN, first, policy, 1.0)
    assert until is not None
    accounts.state.pace("d0", until)
    chunk = Speed(H100).prefill_seconds(200, 4000, APPEND)
    steps = (until - 1.0 - chunk) / first.terms.step
    assert (until - 1.0) / steps <= policy.tpot_slo_seconds
    second = decision(accounts.state, TURN, policy, now=(1.0 + until) / 2)
    assert second.prefill == "p0" and "has just computed a prompt" in second.reason
    assert decision(accounts.state, TURN, policy, now=until).prefill is None


def test_a_prompt_whose_logprobs_are_wanted_is_not_appended() -> None:
    """The programs for it are compiled when they are first asked for."""
    state = state_of(prefill_status("p0", 20_000), appends("d0"))
    short = replace(TURN, work=Work(100, expected_tokens=100), cached={"d0": 64})
    assert decision(state, short, POLICY).prefill is None
    chosen = decision(state, replace(short, whole=True), POLICY)
    assert chosen.prefill == "p0"
    assert "does not compute log-probabilities" in chosen.reason


def test_without_a_prefill_worker_short_prompts_are_served_and_long_ones_are_not() -> None:
    """A long one would hold all streams up."""
    state = state_of(appends("d0"))
    assert decision(state, TURN, POLICY).prefill is None
    with pytest.raises(UnavailableError, match="no prefill worker"):
        decide(state, replace(TURN, cached={}), 0.0, POLICY)


# Times of the shipped model on a CPU: the prefill mesh is faster for a prompt of the same length.
SMALL_PREFILL = StepTimes((64, 128), ((64, 0, 0.003), (128, 0, 0.005), (128, 1024, 0.008)))
SMALL_DECODE = StepTimes(
    (64, 128, 256),
    ((64, 0, 0.007), (128, 0, 0.010), (256, 0, 0.020), (256, 1024, 0.024)),
    (1, 8),
    ((1, 1, 0.0013), (8, 1, 0.0015), (8, 1000, 0.003)),
)


def small_state() -> ClusterState:
    return state_of(
        msgspec.structs.replace(prefill_status("p0"), times=SMALL_PREFILL, chunk_tokens=128),
        msgspec.structs.replace(appends("d0"), times=SMALL_DECODE),
        kind=replace(H100, hardware=None),
    )


@pytest.mark.parametrize("tokens", [130, 200])
@pytest.mark.parametrize("first_seconds", [0.02, 0.2, 2.0])
def test_the_second_of_two_equal_prompts_goes_where_the_first_one_is_kept(
    tokens: int, first_seconds: float
) -> None:
    """However long the first one took there: first requests are often slow."""
    learned = LearnedCorrections()
    for _ in range(20):
        learned.observe(PromptWay.PREFILL, 0.010, 0.012)
    learned.observe(PromptWay.APPEND, 0.016, first_seconds)
    query = PlacementQuery(
        Work(tokens, expected_tokens=16), cached={"d0": 128}, corrections=learned.current
    )
    chosen = decision(small_state(), query, PlacementPolicy())
    assert (chosen.prefill, chosen.cached_tokens) == (None, 128), chosen.reason


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_what_a_kept_prefix_saves_counts_once_more_for_the_requests_behind(share: float) -> None:
    """A decode worker may be slower than a prefill worker by as much as its kept prefix saves."""
    state, policy = small_state(), PlacementPolicy(local_gain=0.0)
    query = PlacementQuery(Work(200, expected_tokens=1), cached={"d0": 128})
    never = decision(state, replace(query, corrections=Corrections(append=(9.0, 1.0))), policy)
    alone = decision(state, query, policy)
    assert never.prefill == "p0" and never.handoff_gap_seconds and never.ttft_seconds
    assert alone.prefill is None and alone.handoff_gap_seconds and alone.ttft_seconds
    less = (never.ttft_seconds + never.handoff_gap_seconds) - (
        alone.ttft_seconds + alone.handoff_gap_seconds
    )
    speed = Speed(replace(H100, hardware=None, times=SMALL_DECODE))
    saved = speed.prefill_seconds(200, 0, APPEND) - speed.prefill_seconds(72, 128, APPEND)
    slower = Corrections(append=(less + share * saved, 1.0))
    chosen = decision(state, replace(query, corrections=slower), policy)
    assert (chosen.prefill is None) == (share < 1.0), chosen.reason
