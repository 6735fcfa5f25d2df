"""Admission, fairness and breakers in a whole simulated cluster: overload, a flood of one tenant,
workers that fail and recover."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, RoutingConfig
from jdisagg.costs.engines import Software
from jdisagg.layout.axes import Layout
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.simulator import workloads
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.report import RequestOutcome, SloLimits
from jdisagg.simulator.run import Result, simulate
from tests.costs.named import DEEPSEEK, GB200, H100, H200, LLAMA_31_8B, QWEN_235B

SLO = SloLimits(ttft_seconds=1.0, tpot_seconds=0.03)
ROUTING = RoutingConfig(ttft_slo_seconds=SLO.ttft_seconds, tpot_slo_seconds=SLO.tpot_seconds)
LENGTHS = workloads.Fixed(1500, 60)
CAPACITY = 36.0  # requests per second: one H100 prefills 1,500 tokens of an 8B model in 27 ms
SECONDS = 8.0


def fleet(routing: RoutingConfig = ROUTING) -> Fleet:
    return Fleet(
        LLAMA_31_8B, Pool(2, H100), Pool(1, H100, INSTANCE), routing=routing, context_tokens=8192
    )


def run(load: float, routing: RoutingConfig = ROUTING) -> Result:
    rate = load * CAPACITY
    return simulate(fleet(routing), workloads.poisson(rate, int(rate * SECONDS), LENGTHS), seed=0)


def goodput(outcomes: tuple[RequestOutcome, ...] | list[RequestOutcome]) -> float:
    return sum(SLO.attained(outcome) for outcome in outcomes) / SECONDS


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.UNIFIED])
def test_one_pool_beyond_its_capacity_takes_no_more_prompts_than_its_streams_can_bear(
    mode: Mode,
) -> None:
    """Each prompt delays all decoding streams, so that prompts in time for their first token may
    still be too many. The backlog that an idle router may hold (routing.hold_seconds) is admitted
    at once."""
    good = {}
    for rate in (20.0, 80.0):
        pool = Pool(2, H100, replace(INSTANCE, chunk_tokens=2048))
        one_pool = Fleet(LLAMA_31_8B, pool, mode=mode, routing=ROUTING, context_tokens=8192)
        result = simulate(one_pool, workloads.poisson(rate, int(rate * SECONDS), LENGTHS), seed=0)
        admitted = [
            outcome
            for outcome in result.outcomes
            if outcome.end != "refused" and outcome.arrival > 1.0
        ]
        assert sum(SLO.attained(outcome) for outcome in admitted) >= 0.95 * len(admitted), rate
        good[rate] = goodput(result.outcomes)
    assert good[80.0] > good[20.0] > 18.0, good


def test_who_is_admitted_is_served_in_time_where_dp_ranks_wait_for_each_other() -> None:
    """Long prompts come among short ones. All ranks of a mesh wait for the longest, which no
    prediction from sums covers."""
    wide = Pool(1, GB200, replace(INSTANCE, layout=Layout(dp=8, ep=8)))
    lengths = workloads.Mixture(((0.8, workloads.Fixed(500, 8)), (0.2, workloads.Fixed(6000, 8))))
    routing = RoutingConfig(ttft_slo_seconds=1.5)
    result = simulate(
        Fleet(QWEN_235B, wide, wide, routing=routing), workloads.poisson(90.0, 900, lengths), seed=0
    )
    admitted = [
        outcome for outcome in result.outcomes if outcome.end != "refused" and outcome.arrival > 2.0
    ]
    late = sum((outcome.ttft or 0.0) > 1.5 for outcome in admitted)
    assert late <= 0.05 * len(admitted), (late, len(admitted))
    assert 200 < len(admitted) < len(result.outcomes) - 100


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
def test_requests_held_at_the_router_leave_no_dp_rank_idle(mode: Mode) -> None:
    """One chunk takes longer than `hold_seconds`. An instance that gets prompts for some of its
    ranks alone computes them in the time of all."""
    wide = Pool(1, H200, replace(INSTANCE, layout=Layout(dp=8, ep=8)))
    arrivals = workloads.poisson(16.0, 200, workloads.LogNormal(2000, 1.0, 8, 1.0, longest=16000))
    software = Software.of("sglang", "fp8", None)
    ends = []
    for hold_seconds in (0.5, 1e9):
        site = Fleet(
            software.shape(DEEPSEEK),
            wide,
            wide if mode is Mode.DISAGGREGATED else None,
            mode,
            routing=RoutingConfig(hold_seconds=hold_seconds),
            fused=mode is Mode.CHUNKED,
            software=software,
        )
        ends.append(max(o.first_token or 0.0 for o in simulate(site, arrivals).outcomes))
    assert ends[0] < 1.1 * ends[1], ends


def test_a_flood_of_one_tenant_takes_nothing_from_the_others() -> None:
    """Two tenants request little, and one several times the capacity."""
    small = [
        workloads.poisson(4.0, 16, LENGTHS, seed=seed, tenant=f"small{seed}") for seed in (1, 2)
    ]
    flood = workloads.poisson(3 * 36.0, int(3 * 36 * 4), LENGTHS, seed=3, tenant="flood")
    result = simulate(fleet(), workloads.merge(*small, flood), seed=0)
    kept = Counter(outcome.tenant for outcome in result.outcomes if SLO.attained(outcome))
    asked = Counter(outcome.tenant for outcome in result.outcomes)
    assert result.counters["rejections"] > asked["flood"] / 3, "it was overloaded"
    for tenant in ("small1", "small2"):
        assert kept[tenant] >= 0.95 * asked[tenant], (kept, asked)
    assert kept["flood"] > kept["small1"], "and what they leave is not wasted"


def test_a_decision_log_has_what_was_asked_and_the_answer_of_each_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "decisions.jsonl"
    with DecisionLog("~/decisions.jsonl") as log:
        result = simulate(
            fleet(),
            workloads.poisson(100.0, 150, workloads.LogNormal(800, 0.8, 60, 0.6)),
            seed=0,
            events=log,
        )
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    placed = [entry for entry in entries if "decision" in entry]
    assert len(placed) >= result.counters["placements"] > 50
    assert all(entry["refusal"]["reason"] for entry in entries if "decision" not in entry)
    served = {outcome.decode for outcome in result.outcomes if outcome.decode}
    assert {entry["decision"]["decode"] for entry in placed} >= served
    assert all(entry["query"]["work"]["tokens"] > 0 and entry["now"] >= 0 for entry in entries)
