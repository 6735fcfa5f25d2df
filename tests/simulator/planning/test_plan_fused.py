"""The rival of two pools, chunks within decode steps: its arithmetic against the simulator."""

import math

import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import Demand, Estimator, Goal
from jdisagg.simulator.planning.candidates import (
    CHUNKS,
    Candidate,
    Fitting,
    Site,
    fitting_layouts,
    one_pool,
)
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.fused import FusedChunks, FusedPace, StepTable
from jdisagg.simulator.planning.trials import Trier
from jdisagg.simulator.workloads import Fixed, poisson
from tests.costs.named import GB200, H100, L40S, LLAMA_31_8B, QWEN_235B

MODEL = LLAMA_31_8B
SITE = Site(L40S, 1)
WORKLOAD = poisson(1.0, 400, Fixed(1000, 200), seed=0)
DEMAND = Demand.of(WORKLOAD)
GOAL = Goal(1.0, 0.05)


def one_card(chunk: int) -> Candidate:
    return Candidate(Mode.CHUNKED, Layout(), 1, chunk)


def estimated(fused: bool) -> Estimator:
    return Estimator(SITE, DEMAND, GOAL, fitting_layouts(MODEL, SITE, 1200), fused=fused)


def test_small_chunks_within_steps_carry_more_than_large_ones_though_taking_turns_says_otherwise():
    turns, fused = (
        [estimated(known).bounds(one_card(chunk)).rate for chunk in CHUNKS]
        for known in (False, True)
    )
    assert max(turns) > turns[0] and max(fused) == fused[0]
    assert 1.15 < fused[0] / fused[-1] < 1.4  # the simulator says 1.26 (5.6 against 4.44)


@pytest.mark.parametrize("chunk", [512, 8192])
def test_what_arithmetic_lets_a_fused_engine_carry_is_near_what_the_simulator_carries(chunk: int):
    rate = estimated(fused=True).bounds(one_card(chunk)).rate
    trier, runner = Trier(GOAL, WORKLOAD, DEMAND, 400), FleetMaker(MODEL, SITE).run
    under, over = (
        trier.trial(runner, one_card(chunk), factor * rate).lasting_attainment
        for factor in (0.8, 1.2)
    )
    assert under >= GOAL.attainment > over


def test_a_mean_time_per_token_spreads_as_the_chunks_that_a_sequence_meets_by_chance():
    """Compares the normal approximation with draws of the binomial distribution."""
    steps = FusedChunks(
        StepTable(fitting_layouts(MODEL, SITE, 1200)[0].model), 512, np.array([1000]), 1100.0, 199.0
    )
    none = np.zeros(1)
    met, chunk, decode = 0.3, 0.08, 0.02
    pace = FusedPace(9.0, decode, decode + met * chunk, chunk, met, met, none, none)
    outputs, limit = np.array([1, 21, 201]), 0.05
    draws = np.random.default_rng(0)
    kept = [1.0] + [
        float((decode + chunk * draws.binomial(count, met, 20_000) / count <= limit).mean())
        for count in outputs[1:] - 1
    ]
    assert steps.within(pace, limit, outputs) == pytest.approx(np.mean(kept), abs=0.03)
    still = FusedPace(9.0, decode, decode, chunk, 0.0, 0.0, none, none)
    assert (steps.within(still, 0.03, outputs), steps.within(still, 0.01, outputs)) == (1.0, 1 / 3)


def test_what_comes_faster_than_chunks_can_be_run_has_no_pace():
    model = fitting_layouts(MODEL, SITE, 1200)[0].model
    steps = FusedChunks(StepTable(model), 512, np.array([1000] * 8), 1100.0, 199.0)
    slow, fast = steps.pace(0.5), steps.pace(4.0)
    assert slow is not None and fast is not None
    assert (fast.step, fast.sequences, fast.busy) > (slow.step, slow.sequences, slow.busy)
    assert steps.pace(1 / model.prefill([(1000, 0)]).seconds * 3) is None
    assert fast.sequences == pytest.approx(4.0 * 199 * fast.step, rel=0.01)  # Little


def test_layouts_that_cost_the_same_are_one_and_wide_experts_are_candidates_of_one_pool():
    large, site = QWEN_235B, Site(GB200, 16)
    fitting = fitting_layouts(large, site, 7000)
    layouts = [item.layout for item in fitting]
    assert Layout(tp=4) in layouts and Layout(tp=4, ep=4) not in layouts
    listed = {item.decode for item in one_pool(fitting, site, (Mode.CHUNKED,))}
    assert {Layout(dp=2, tp=4, ep=8), Layout(dp=4, tp=2, ep=8)} <= listed
    costs = [costs_of(item) for item in fitting]
    assert len(set(costs)) == len(costs)


def costs_of(item: Fitting) -> tuple[int, float, float, int]:
    model = item.model
    return (
        item.layout.devices,
        model.prefill([(700, 0)]).seconds,
        model.decode([900] * 40).seconds,
        item.kv_tokens,
    )


def test_a_rate_is_a_number_for_every_chunk_and_layout():
    fitting = fitting_layouts(MODEL, Site(H100, 4), 1200)
    made = Estimator(Site(H100, 4), DEMAND, GOAL, fitting, fused=True)
    for candidate in one_pool(fitting, made.site, (Mode.CHUNKED,)):
        limits = dict(made.bounds(candidate).limits)
        assert all(math.isfinite(rate) and rate > 0 for rate in limits.values())
        assert max(limits["TTFT"], limits["TPOT"]) <= 1.001 * limits["KV memory"]
