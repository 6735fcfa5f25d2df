"""Prompts for workers that do both: as many as those that decode there can bear."""

import math

import pytest

from jdisagg.costs.speeds import Speed
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import Description
from jdisagg.router.cost_terms import paced_until
from jdisagg.router.decision import Decision, Deferred, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide
from tests.router.fleets import H100, M, accounts_of, decode_status, prefill_status

ASK = PlacementQuery(Work(2000, expected_tokens=200))
RUNNING = decode_status("m0", (8,), (8000,), role=M)


def test_prompts_come_to_one_pool_as_far_apart_as_steps_leave_time_for_them() -> None:
    accounts = accounts_of({RUNNING: Description("", H100)})
    policy = PlacementPolicy(tpot_slo_seconds=0.02)
    prompt, now = Speed(H100).prefill_seconds(2000, 0, 2048), 1.0
    for placed in range(3):
        answer = decide(accounts.state, ASK, now, policy)
        assert isinstance(answer, Decision) and answer.terms is not None
        part = 1.0 - answer.terms.step / 0.02
        assert answer.terms.prefill_queue == pytest.approx(placed * prompt / (0.9 * part), rel=0.02)
        until = paced_until(accounts.state, ASK, answer, policy, now)
        assert until is not None
        accounts.state.pace("m0", until)
    accounts.state.pace("m0", now + 0.6)
    assert isinstance(decide(accounts.state, ASK, now, policy), Deferred)
    assert isinstance(decide(accounts.state, ASK, now + 0.2, policy), Decision)


def test_the_pace_of_several_ranks_is_kept_to_the_bound_on_queued_work() -> None:
    """Ranks get three chunks of queued work, but streams that recover get their time."""
    ranks = decode_status("m0", (2,) * 4, (2000,) * 4, role=M)
    accounts = accounts_of({ranks: Description("", H100)})
    policy = PlacementPolicy(tpot_slo_seconds=0.05, hold_seconds=0.02)
    accounts.state.pace("m0", 1.0)
    assert Speed(H100).prefill_seconds(2048, 0, 2048) > 0.04
    assert isinstance(decide(accounts.state, ASK, 0.96, policy), Deferred)
    assert isinstance(decide(accounts.state, ASK, 0.99, policy), Decision)


def test_there_is_no_pace_to_keep_without_a_bound_or_beside_nobody() -> None:
    accounts = accounts_of({RUNNING: Description("", H100)})
    answer = decide(accounts.state, ASK, 0.0, PlacementPolicy())
    assert isinstance(answer, Decision)
    assert (
        paced_until(accounts.state, ASK, answer, PlacementPolicy(tpot_slo_seconds=math.inf), 0.0)
        is None
    )
    idle = accounts_of({decode_status("m0", role=M): Description("", H100)})
    idle.state.pace("m0", 5.0)
    answer = decide(idle.state, ASK, 0.0, PlacementPolicy(tpot_slo_seconds=0.02))
    assert isinstance(answer, Decision)
    assert answer.terms is not None
    assert answer.terms.prefill_queue == 0.0
    apart = accounts_of(
        {prefill_status("p0"): Description("", H100), decode_status("d0"): Description("", H100)}
    )
    answer = decide(apart.state, ASK, 0.0, PlacementPolicy(tpot_slo_seconds=0.02))
    assert isinstance(answer, Decision)
    assert (
        paced_until(apart.state, ASK, answer, PlacementPolicy(tpot_slo_seconds=0.02), 0.0) is None
    )
