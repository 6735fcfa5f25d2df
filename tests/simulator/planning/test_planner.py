"""The planner's search over runs with a known answer: a fake runner with a given capacity, no
simulator."""

import bisect
import re
from collections.abc import Sequence

import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning import planner
from jdisagg.simulator.planning.bounds import Demand, Goal
from jdisagg.simulator.planning.candidates import Candidate, NothingFits, Site
from jdisagg.simulator.planning.measure import MOST_RUNS, highest_rate
from jdisagg.simulator.planning.planner import Plan, Planner, Search, Told
from jdisagg.simulator.planning.trials import (
    Loss,
    Lost,
    Runner,
    Runners,
    TrialRun,
    Trier,
    requests_at,
    settled,
)
from jdisagg.simulator.planning.verdict import Trial
from jdisagg.simulator.report import RequestOutcome, attainment
from jdisagg.simulator.workloads import Arrival, Fixed, mean_rate, poisson
from tests.costs.named import H100, L40S, LLAMA_70B
from tests.simulator.planning.plans import GOAL, SITE, WORKLOAD, Capacity, Servers, best_of, both


def one_server(seconds_each: float) -> Runner:
    """Answers of one token, one after the other: carries 1 / seconds_each a second and no more
    (Lindley's recursion)."""

    def run(candidate: Candidate, arrivals: Sequence[Arrival], lost: Lost) -> TrialRun:
        free, outcomes = 0.0, []
        for item in arrivals:
            free = max(free, item.at_seconds) + seconds_each
            outcomes.append(RequestOutcome("", item.at_seconds, free, item.prompt_tokens, 1, free))
        return TrialRun(tuple(outcomes))

    return run


def batch(most: int, seconds: float) -> Runner:
    """Each request stays `seconds`; its tokens are late where `most` came before it within that
    time: carries most / seconds a second."""

    def run(candidate: Candidate, arrivals: Sequence[Arrival], lost: Lost) -> TrialRun:
        times = [item.at_seconds for item in arrivals]
        late = [
            index - bisect.bisect_left(times, at - seconds) >= most
            for index, at in enumerate(times)
        ]
        return TrialRun(
            tuple(
                RequestOutcome("", at, at + seconds * (10 if slow else 1), 900, 100, at + 0.1)
                for at, slow in zip(times, late, strict=True)
            )
        )

    return run


def tried(
    runner: Runner, rate: float, goal: Goal, workload: Sequence[Arrival], most_requests: int = 4000
) -> Trial:
    return Trier(goal, workload, Demand.of(workload), most_requests).trial(
        runner, Candidate(Mode.UNIFIED, Layout(), 1), rate
    )


def plan(capacity: Capacity, late: str = "ttft", site: Site = SITE, **options: object) -> Plan:
    servers, search = Servers(capacity, late), Search(**options)  # type: ignore[arg-type]
    return Planner(LLAMA_70B, site, GOAL, both(servers), search).plan(WORKLOAD)


@pytest.mark.parametrize("guess", [0.3, 1.0, 7.0, 40.0])
def test_bisection_finds_a_known_capacity_from_guesses_far_and_near(guess: float):
    calls: list[float] = []

    def attained(rate: float) -> float:
        calls.append(rate)
        return min(1.0, 6.0 / rate)  # 90 % at 6.67

    found = highest_rate(attained, guess, 0.9)
    assert found == pytest.approx(6.0 / 0.9, rel=0.04) and len(calls) <= MOST_RUNS


@pytest.mark.ci
def test_two_pools_are_simulated_with_and_without_stages_and_the_verdict_has_both():
    def capacity(item: Candidate) -> float:
        return 12.0 if item.staged else 4.0 if item.prefill else 1.0

    site = Site(L40S, 8)
    goal, modes = Goal(8.0, 5.0), (Mode.DISAGGREGATED, Mode.CHUNKED)
    runners, search = both(Servers(capacity)), Search(finalists=1, modes=modes)
    found = Planner(LLAMA_70B, site, goal, runners, search).plan(WORKLOAD)
    rates = {(item.candidate.mode, item.candidate.staged): item for item in found.findings}
    assert all(item.simulated for item in rates.values()) and len(rates) == 3
    staged, plain = (rates[Mode.DISAGGREGATED, stages] for stages in (True, False))
    assert staged.rate / plain.rate == pytest.approx(3.0, rel=0.1)
    assert f"With pipeline stages two pools serve {staged.per_accelerator:.3g}" in found.verdict
    assert f"without {plain.per_accelerator:.3g} ({plain.candidate.name})" in found.verdict


def test_only_candidates_close_to_the_best_by_stepping_are_simulated():
    """Of two pools the second carries half of the first, and the third 0.5 % less than it. In
    simulation the third carries 20 % more than by stepping."""
    order: dict[object, int] = {}

    def key(item: Candidate) -> object:
        return item.prefill, item.decode

    def stepped(item: Candidate) -> float:
        if item.mode is not Mode.DISAGGREGATED:
            return 4.0 if item.mode is Mode.CHUNKED else 1.0
        at = order.setdefault(key(item), min(3, len(order)))
        return (8.0, 4.0, 7.96, 1.0)[at]

    def simulated(item: Candidate) -> float:
        return stepped(item) * (1.2 if order.get(key(item)) == 2 else 1.0)

    live = Servers(simulated)
    runners = Runners(live, Servers(stepped))
    found = Planner(LLAMA_70B, SITE, GOAL, runners).plan(WORKLOAD)
    best = found.findings[0]
    assert best.simulated and order[key(best.candidate)] == 2
    assert best.rate == pytest.approx(7.96 * 1.2 / 0.9, rel=0.05)
    two = {order[key(item)] for item in live.asked if item.prefill}
    assert two == {0, 2} and not any(item.mode is Mode.UNIFIED for item in live.asked)
    rows = [item for item in found.findings if not item.simulated]
    assert rows and {item.candidate.mode for item in rows} >= {Mode.UNIFIED}
    assert found.findings[-len(rows) :] == tuple(rows)


def test_the_next_by_stepping_is_simulated_if_the_best_carries_less_than_it():
    """Of two pools, stepping finds 7.5 for the first and 8.0 for the second; simulated, the second
    carries 6.0."""
    order: dict[object, int] = {}

    def stepped(item: Candidate) -> float:
        if item.mode is not Mode.DISAGGREGATED:
            return 1.0
        at = order.setdefault((item.prefill, item.decode), min(2, len(order)))
        return (7.5, 8.0, 1.0)[at]

    def simulated(item: Candidate) -> float:
        return 6.0 if stepped(item) == 8.0 else stepped(item)

    runners = Runners(Servers(simulated), Servers(stepped))
    best = Planner(LLAMA_70B, SITE, GOAL, runners).plan(WORKLOAD).findings[0]
    assert best.simulated and best.rate == pytest.approx(7.5 / 0.9, rel=0.05)


def test_nothing_is_simulated_if_a_run_needs_too_many_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "SIMULATED_REQUESTS", 2000)
    live, search = Servers(lambda item: 700.0), Search(modes=(Mode.CHUNKED,))
    runners = Runners(live, Servers(lambda item: 700.0))
    found = Planner(LLAMA_70B, SITE, GOAL, runners, search).plan(WORKLOAD)
    assert not live.asked and not any(item.simulated for item in found.findings)
    assert found.findings[0].rate == pytest.approx(700 / 0.9, rel=0.05)
    (needed,) = re.findall(r"most_requests=(\d+) permits it", found.verdict)
    assert int(needed) > 3 * 1.09 * 700  # requests that arrive in three times a request's time
    search = Search(modes=(Mode.CHUNKED,), most_requests=int(needed))
    found = Planner(LLAMA_70B, SITE, GOAL, runners, search).plan(WORKLOAD)
    assert live.asked and found.findings[0].simulated


def test_a_search_from_an_expected_rate_needs_few_runs_if_the_rate_is_right():
    for factor, most in ((1.0, 2), (1.03, 3), (0.9, 6), (1.3, 8), (0.3, 14)):
        calls: list[float] = []

        def attained(rate: float) -> float:
            calls.append(rate)
            return min(1.0, 6.0 / rate)  # 90 % at 6.67

        rate = highest_rate(attained, factor * 6.0 / 0.9, 0.9, near=True)
        assert rate == pytest.approx(6.0 / 0.9, rel=0.041) and len(calls) <= most, factor


def test_what_is_never_attained_is_zero_after_three_tries():
    calls: list[float] = []
    assert highest_rate(lambda rate: calls.append(rate) or 0.5, 10.0, 0.9) == 0.0
    assert len(calls) == 3 and min(calls) == pytest.approx(0.1)


def test_the_better_mode_wins_by_what_it_carries_more():
    found = plan(lambda item: 10.0 if item.mode is Mode.DISAGGREGATED else 8.0)
    assert found.findings[0].candidate.mode is Mode.DISAGGREGATED
    assert found.findings[0].rate == pytest.approx(10 / 0.9, rel=0.04)
    assert found.findings[0].per_accelerator == found.findings[0].rate / 8
    assert found.verdict.startswith("Two pools win by 2") and "carries" in found.verdict
    assert found.verdict.split(":")[0].endswith(("against chunked", "against unified"))
    assert {item.candidate.mode for item in found.findings} == {
        Mode.DISAGGREGATED,
        Mode.CHUNKED,
        Mode.UNIFIED,
    }
    rates = [item.per_accelerator for item in found.findings if item.simulated]
    assert len(rates) > 1 and rates == sorted(rates, reverse=True)


def test_one_pool_wins_plainly_and_the_figures_say_why():
    found = plan(lambda item: 4.0 if item.mode is Mode.DISAGGREGATED else 8.0)
    assert found.findings[0].candidate.prefill is None
    assert found.verdict.startswith("One pool wins by 1") or found.verdict.startswith(
        "One pool wins by 9"
    )
    assert "few instances allow no better ratio (busy: decode" in found.verdict


@pytest.mark.parametrize(("fused", "said"), [(True, "one program"), (False, "in turns")])
def test_the_verdict_says_which_chunked_rival_it_is_against(fused: bool, said: str):
    def chunked_is_best(item: Candidate) -> float:
        return 8.0 if item.mode is Mode.CHUNKED else 6.0

    assert said in plan(chunked_is_best, fused=fused).verdict
    assert said not in plan(lambda item: 8.0, fused=fused, modes=(Mode.UNIFIED,)).verdict


def test_equals_are_called_equal():
    assert plan(lambda item: 8.0).verdict.startswith("No clear winner")


@pytest.mark.parametrize(
    ("late", "binding"), [("ttft", "TTFT"), ("tpot", "TPOT"), ("refused", "refused")]
)
def test_what_binds_is_what_the_runs_beyond_the_rate_missed(late: str, binding: str):
    found = plan(lambda item: 5.0, late)
    assert all(binding in item.binding for item in found.findings)
    assert all(item.report.attainment and item.report.attainment >= 0.9 for item in found.findings)


def test_too_few_accelerators_for_two_pools_are_said():
    found = plan(lambda item: 5.0, site=Site(H100, 2))
    assert found.left_out == ("disaggregated: two pools need 4 accelerators at least, there are 2",)
    assert "Nothing to compare with (disaggregated" in found.verdict
    assert best_of(found, Mode.DISAGGREGATED) is None


def test_a_goal_that_nothing_attains_is_told_with_the_nearest():
    with pytest.raises(
        NothingFits,
        match=(
            r"nothing fits, because no candidate keeps 90% of requests within TTFT 0.5 s .* miss"
            r" TTFT"
        ),
    ):
        plan(lambda item: 0.0)
    with pytest.raises(NothingFits, match=r"100% do not finish\); most of these because: no pages"):
        plan(lambda item: 0.0, "refused")
    with pytest.raises(NothingFits, match="the weights of llama-3-70b"):
        plan(lambda item: 1.0, site=Site(L40S, 2))


class Noted(Told):
    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.answers: list[str] = []

    def progress(self, text: str, done: int, total: int) -> None:
        self.steps.append((text, done, total))

    def answer(self, text: str) -> None:
        self.answers.append(text)


def test_a_first_answer_by_stepping_comes_before_anything_is_simulated():
    said = Noted()

    def simulated(item: Candidate) -> float:
        assert said.answers
        return 6.0

    runners = Runners(Servers(simulated), Servers(lambda item: 6.0))
    search = Search(finalists=1)
    found = Planner(LLAMA_70B, SITE, GOAL, runners, search, said).plan(WORKLOAD)
    assert said.steps[-1][0] == "done" and said.steps[-1][1] == said.steps[-1][2]
    lines = said.answers[0].splitlines()
    assert len(lines) == 4 and all("requests/s per accelerator" in line for line in lines[1:])
    for item in found.findings:
        name = f"{item.candidate.mode.value} {item.candidate.name}: {item.per_accelerator:.3g}"
        assert item.simulated is any(line.startswith(name) for line in said.answers[1:])


def test_the_best_chunk_size_by_stepping_is_found():

    def capacity(item: Candidate) -> float:
        if item.mode is Mode.CHUNKED:
            return {512: 6.0, 1024: 7.5, 2048: 9.0}.get(item.chunk_tokens, 3.0)
        return 5.0

    best = plan(capacity, finalists=1).findings[0]
    assert (best.candidate.mode, best.candidate.chunk_tokens) == (Mode.CHUNKED, 2048)
    assert best.rate == pytest.approx(9.0 / 0.9, rel=0.04)


def test_error_bars_are_the_rates_with_slower_and_faster_steps():
    """A request of 0.1 s until its first token misses a TTFT limit of 0.5 s only if its step takes
    five times as long, so that the capacity of the servers alone scales with the error."""
    found = plan(lambda item: 8.0)
    said = re.search(r"carries ([\d.]+) or ([\d.]+) requests/s per accelerator", found.verdict)
    assert said is not None and "15% more or 15% less" in found.verdict
    each = found.findings[0].per_accelerator
    low, high = (float(value) / each for value in said.groups())
    assert low == pytest.approx(1 / 1.15, rel=0.05) and high == pytest.approx(1 / 0.85, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_goal_is_called_lost_only_where_the_whole_run_misses_it(seed: int):
    arrivals = poisson(5.0, 300, Fixed(900, 100), seed=seed)
    bad = np.random.default_rng(seed).random(300) < 0.02 * (seed + 3)
    outcomes = [
        RequestOutcome(
            str(index), item.at_seconds, item.at_seconds + 2, 900, 100, item.at_seconds + 9.0 * late
        )
        for index, (item, late) in enumerate(zip(arrivals, bad, strict=True))
    ]
    loss = Loss(GOAL, arrivals, 5.0)
    lost = [index for index, item in enumerate(outcomes) if loss(item)]
    kept = attainment(settled(outcomes, 5.0), GOAL.slo)
    assert not (lost and kept >= GOAL.attainment)
    assert lost or kept > GOAL.attainment - 0.02
    if lost:
        early = Loss(GOAL, arrivals, 5.0)
        for item in outcomes[: lost[0] + 1]:
            early(item)
        assert attainment(early.judged, GOAL.slo) < GOAL.attainment


def test_of_chunked_each_layout_is_simulated_with_its_best_chunk_size_alone():
    live = Servers(lambda item: 1.0)
    runners = Runners(live, Servers(lambda item: 1.0))
    search = Search(modes=(Mode.CHUNKED,), finalists=3)
    Planner(LLAMA_70B, SITE, GOAL, runners, search).plan(WORKLOAD)
    layouts = [item.decode for item in dict.fromkeys(live.asked)]
    assert len(layouts) == 3 and len(set(layouts)) == 3


def test_requests_at_a_rate_are_the_workloads_own_in_order_with_the_same_gaps_at_every_rate():
    one = requests_at(WORKLOAD, 10.0, 500, "poisson", 3)
    two = requests_at(WORKLOAD, 20.0, 500, "poisson", 3)
    assert len(one) == 500 and mean_rate(one) == pytest.approx(10, rel=0.1)
    assert [item.at_seconds for item in two] == pytest.approx([item.at_seconds / 2 for item in one])
    own = requests_at(WORKLOAD, 10.0, 100, "trace", 3)
    assert mean_rate(own) == pytest.approx(10) and len(own) == 100
    named = [Arrival(index, 600, 5, (index, index + 1)) for index in range(20)]
    assert len(requests_at(named, 10.0, 500, "poisson", 3)) == 20, "named blocks are not sent twice"
    assert len(requests_at([Arrival(0.0, 10, 5), *named], 10.0, 500, "poisson", 3)) == 21, (
        "whichever request names them"
    )


def test_requests_that_arrive_while_the_cluster_fills_are_not_judged():
    def outcomes(times: Sequence[float]) -> list[RequestOutcome]:
        return [RequestOutcome("", at, at + 1, 10, 10, at + 0.5) for at in times]

    assert [item.arrival for item in settled(outcomes(range(10)), 2.0)] == list(range(2, 10))
    assert [item.arrival for item in settled(outcomes(range(10)), 50.0)] == list(range(3, 10))


def test_a_queue_that_grows_too_slowly_to_miss_the_limit_within_a_run_is_an_overload():
    """At 1000 a second 4000 requests last 4 seconds: half of them wait for the other half, and none
    for more than the limit of 10."""
    goal, workload = Goal(10.0, 0.05), poisson(1.0, 100, Fixed(800, 1))
    found = highest_rate(
        lambda rate: tried(one_server(1 / 500), rate, goal, workload).lasting_attainment, 800.0, 0.9
    )
    assert found == pytest.approx(500, rel=0.04)
    over = tried(one_server(1 / 500), 1000.0, goal, workload)
    assert over.attainment == 1 and over.overload and not over.lasting_attainment


def test_a_batch_that_has_not_filled_when_arrivals_end_is_tried_for_longer():
    """5000 requests of 4 seconds are 1250 a second; a run of 4000 never has that many at once."""
    for rate, carried in ((1180.0, True), (1350.0, False), (9000.0, False)):
        found = tried(batch(5000, 4.0), rate, GOAL, WORKLOAD)
        assert (found.lasting_attainment >= 0.9) == carried, rate
        assert found.report.requests > 8000


def test_a_run_that_is_long_enough_is_not_made_twice():
    servers = Servers(lambda item: 8.0)
    assert tried(servers, 8.0, GOAL, WORKLOAD).lasting_attainment >= 0.9 and len(servers.asked) == 1


def test_a_trace_that_ends_too_soon_to_tell_is_told_and_what_it_shows_is_the_least():
    """Named blocks are not sent twice: 200 requests that stay 1.1 seconds show 60 a second for
    three such stays, and no more."""
    named = [
        Arrival(item.at_seconds, item.prompt_tokens, item.output_tokens, (index,))
        for index, item in enumerate(WORKLOAD)
    ]
    asked = Planner(
        LLAMA_70B,
        SITE,
        GOAL,
        both(Servers(lambda item: 1e9)),
        Search(modes=(Mode.UNIFIED,), finalists=1),
    )
    found = asked.plan(named)
    assert found.findings[0].rate == pytest.approx(200 / (3 * 1.09), rel=0.05)
    assert found.findings[0].short
    assert (
        "These rates are lower bounds, because the requests end too soon at higher ones (unified"
        in found.verdict
    )
    with pytest.raises(
        NothingFits,
        match=(
            "no rate is known to be carried: .* end too soon to tell for how long; give a longer"
            " workload"
        ),
    ):
        Planner(
            LLAMA_70B, SITE, GOAL, both(one_server(0.1)), Search(modes=(Mode.UNIFIED,), finalists=1)
        ).plan(named[:1])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"finalists": 0}, "finalists=0"),
        ({"modes": ()}, "modes must not be empty"),
        ({"most_requests": 1}, "most_requests"),
    ],
)
def test_a_search_that_could_find_nothing_is_refused(bad: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        plan(lambda item: 1.0, **bad)  # type: ignore[arg-type]
