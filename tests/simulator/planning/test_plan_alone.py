"""Goals that a single request on idle accelerators misses, and runs that end when their goal is
lost, against the simulator."""

import gc

import pytest

from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import Demand, Goal, RateCeilings
from jdisagg.simulator.planning.candidates import Candidate, NothingFits, Site, fitting_layouts
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, never
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival, Fixed, poisson
from tests.costs.named import H100, LLAMA_31_8B
from tests.simulator.fleets import LENGTHS, small_fleet

MODEL = LLAMA_31_8B
SITE = Site(H100, 2)
TTFT, STEP = 0.5, 0.05


def said(goal: Goal, *arrivals: Arrival, cached: bool = False) -> str:
    longest = max(item.prompt_tokens + item.output_tokens for item in arrivals)
    fitting = fitting_layouts(MODEL, SITE, longest)
    return never(RateCeilings(SITE, Demand.of(arrivals), goal, fitting), cached)


@pytest.mark.parametrize("tokens", [700, 9000])
def test_what_one_request_takes_by_arithmetic_is_what_it_takes_in_the_simulator(tokens: int):
    """The goal is refused just below what a request takes alone on the fastest layout, tp2, and not
    just above."""
    fleet = FleetMaker(MODEL, SITE).fleet(Candidate(Mode.UNIFIED, Layout(tp=2), 1))
    (alone,) = simulate(fleet, [Arrival(0.0, tokens, 3)]).outcomes
    assert alone.ttft is not None and alone.tpot is not None
    request = Arrival(0.0, tokens, 3)
    for factor, refused in ((0.98, True), (1.02, False)):
        first = said(Goal(factor * alone.ttft, 9.0), request)
        step = said(Goal(9.0, factor * alone.tpot), request)
        assert (bool(first), bool(step)) == (refused, refused)
        assert not refused or ("first token on tp2" in first and "decode step" in step)


def test_a_tenth_may_miss_prompts_may_be_known_and_one_token_has_no_steps():
    long, short = Arrival(0.0, 8000, 2), Arrival(0.0, 100, 2)
    goal = Goal(0.1, 1.0)
    assert "8,000 tokens takes" in said(goal, long)
    assert not said(goal, *[long] * 5, *[short] * 95) and said(goal, *[long] * 20, *[short] * 80)
    assert not said(goal, long, cached=True)
    assert "decode step" in said(Goal(9.0, 1e-6), long)
    assert not said(Goal(9.0, 1e-6), Arrival(0.0, 8000, 1))


def test_a_plan_for_such_a_goal_simulates_nothing():
    def runner(*_: object) -> None:
        raise AssertionError("nothing need be simulated")

    planner = Planner(MODEL, SITE, Goal(0.001, 0.05), runner)  # type: ignore[arg-type]
    with pytest.raises(NothingFits, match=r"no candidate keeps 90% .* alone on idle accelerators"):
        planner.plan(poisson(1.0, 50, Fixed(900, 20)))


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(Mode.CHUNKED, Layout(), 2, 512),
        Candidate(Mode.DISAGGREGATED, Layout(), 1, prefill=Layout(), prefill_instances=1),
    ],
)
def test_a_run_that_is_stopped_says_of_its_requests_what_the_whole_run_says(candidate: Candidate):
    arrivals, fleet = poisson(60.0, 200, Fixed(900, 30), seed=1), FleetMaker(MODEL, SITE).fleet
    seen: list[RequestOutcome] = []

    def enough(outcome: RequestOutcome) -> bool:
        seen.append(outcome)
        return len(seen) == 40

    whole = simulate(fleet(candidate), arrivals)
    part = simulate(fleet(candidate), arrivals, enough=enough)
    assert part.stopped and not whole.stopped and part.seconds < whole.seconds
    assert 40 <= len(part.outcomes) < 200 and set(seen) <= set(part.outcomes)
    assert set(part.outcomes) <= set(whole.outcomes)


def test_a_run_that_is_stopped_says_nothing_of_what_it_cut_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[RequestOutcome] = []

    def enough(outcome: RequestOutcome) -> bool:
        ended.append(outcome)
        return len(ended) == 60

    arrivals = poisson(12.0, 150, LENGTHS, seed=1)
    assert simulate(small_fleet(pages=48), arrivals, enough=enough).stopped
    gc.collect()  # tasks say when they are collected that nobody asked how they ended
    assert not caplog.records
