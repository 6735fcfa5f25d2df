"""Plans of several pools of accelerators, against brute force over runs with a known answer, plans
of each pool alone, and the simulator."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Link, accelerator, link
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning import planner
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import (
    Best,
    Candidate,
    NothingFits,
    Site,
    fitting_layouts,
    handoff_path,
)
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.planning.pools import PoolPlan, plan_pools, uses
from jdisagg.simulator.workloads import Fixed, Mixture, poisson
from tests.costs.named import H100, H200, LLAMA_8B
from tests.simulator.planning.plans import GOAL, Servers, both

MODEL = LLAMA_8B
A100 = replace(accelerator("a100"), dollars_per_hour=1.0)
FIRST = Site(replace(H100, dollars_per_hour=2.5), 3)
SECOND = Site(A100, 2)
WORKLOAD = poisson(5.0, 100, Fixed(900, 100), seed=1)
# Requests per second of a device that prefills, that decodes, and that does both.
SPEEDS = {"h100": (10.0, 6.0, 3.0), "a100": (2.0, 12.0, 2.0)}


def carried(site: Site, candidate: Candidate) -> float:
    decoding = candidate.devices - candidate.prefill_devices
    prefills, decodes = SPEEDS[site.accelerator.name], SPEEDS[site.decodes.accelerator.name]
    if candidate.prefill is None:
        return decoding * decodes[2]
    return min(candidate.prefill_devices * prefills[0], decoding * decodes[1])


def planned(
    pools: Sequence[Site],
    best: Best = "rate",
    between: Link | None = None,
    capacity: Callable[[Site, Candidate], float] = carried,
) -> PoolPlan:
    def planner_of(site: Site) -> Planner:
        modes = (Mode.DISAGGREGATED, Mode.UNIFIED)[: 1 if site.decoding else 2]
        servers = Servers(lambda candidate: capacity(site, candidate))
        search = Search(modes=modes, finalists=1, best=best)
        return Planner(MODEL, site, GOAL, both(servers), search)

    return plan_pools(planner_of, [*uses(pools, between)], WORKLOAD, best)


def by_brute_force(what: Best) -> float:
    """Returns the most requests per second, dollar an hour or watt that any numbers of devices
    carry."""
    kinds = {"h100": (3, 2.5, 700.0), "a100": (2, 1.0, 400.0)}
    found = []
    for (one, (most, *spent)), (other, (others, *more)) in product(kinds.items(), repeat=2):
        for prefill, decode in product(range(most + 1), range(others + 1)):
            if one == other and prefill + decode > most:
                continue
            rate = min(prefill * SPEEDS[one][0], decode * SPEEDS[other][1])
            if not prefill:  # all of the kind that decodes do both
                rate = decode * SPEEDS[other][2]
            at = {"dollars": 0, "joules": 1}.get(what)
            cost = 1.0 if at is None else prefill * spent[at] + decode * more[at]
            found.append(rate / cost if cost else 0.0)
    return max(found)


@pytest.mark.parametrize("best", ["rate", "dollars", "joules"])
def test_the_best_use_of_two_pools_is_that_of_brute_force(best: Best) -> None:
    plan = planned([FIRST, SECOND], best)
    found = plan.rows[0].finding
    assert found.value == pytest.approx(by_brute_force(best) / GOAL.attainment, rel=0.05)
    assert plan.rows[0].site.decoding is not None, "prefill and decode on a kind each"
    values = [row.finding.value for row in plan.rows if row.finding.simulated]
    assert values == sorted(values, reverse=True) and plan.verdict.startswith("Best: disagg")


def test_each_pool_alone_and_each_pair_in_both_orders_are_planned() -> None:
    found = [
        (site.accelerator.name, site.decodes.accelerator.name) for site in uses([FIRST, SECOND])
    ]
    assert found == [("h100", "h100"), ("a100", "a100"), ("h100", "a100"), ("a100", "h100")]


@pytest.mark.parametrize(("best", "most"), [("rate", 4), ("dollars", 2), ("joules", 2)])
def test_with_two_kinds_only_what_may_be_the_best_of_all_is_simulated(
    best: Best, most: int
) -> None:
    """For each mode one candidate, or one of each pool side by side, in place of one of each mode
    and use of the pools, which are six."""
    rows = planned([FIRST, SECOND], best).rows
    for two in (False, True):
        of_mode = [row for row in rows if (row.finding.candidate.prefill is not None) is two]
        assert max(of_mode, key=lambda row: row.finding.value).finding.simulated
    assert sum(row.finding.simulated for row in rows) <= most


def test_one_pool_is_planned_as_by_the_planner_of_one_kind() -> None:
    servers = Servers(lambda candidate: carried(FIRST, candidate))
    search = Search(modes=(Mode.DISAGGREGATED, Mode.UNIFIED), finalists=1)
    alone = Planner(MODEL, FIRST, GOAL, both(servers), search).plan(WORKLOAD)
    plan = planned([FIRST])
    assert tuple(row.finding for row in plan.rows) == alone.findings
    assert plan.verdict.startswith(alone.verdict)


def test_a_pool_that_cannot_be_used_leaves_the_plan_of_the_other_and_its_reason() -> None:
    small = Site(replace(A100, memory_bytes=1e9), 2)
    plan = planned([FIRST, small])
    assert [row.finding for row in plan.rows] == [row.finding for row in planned([FIRST]).rows]
    (reason,) = plan.left_out
    assert reason.startswith("2 a100; 3 h100 and 2 a100; 2 a100 and 3 h100: nothing fits")
    with pytest.raises(NothingFits, match="2 a100"):
        planned([small, Site(replace(H100, memory_bytes=1e9), 2)])


def test_pools_that_do_both_carry_their_sum_side_by_side() -> None:
    def one_is_better(site: Site, candidate: Candidate) -> float:
        return carried(site, candidate) * (0.1 if candidate.prefill else 1.0)

    plan = planned([FIRST, SECOND], capacity=one_is_better)
    total = (3 * 3 + 2 * 2) / GOAL.attainment
    first, second = plan.verdict.split(" beside ")[:2]
    assert first.startswith("Best: unified h100") and second.startswith("unified a100")
    said = float(second.split(" carries ")[1].split()[0])
    assert said == pytest.approx(total, rel=0.05)
    assert "Do not disaggregate" in plan.verdict


def test_pools_side_by_side_are_named_by_their_rows() -> None:
    def one_is_better(site: Site, candidate: Candidate) -> float:
        return carried(site, candidate) * (0.1 if candidate.prefill else 1.0)

    plan = planned([FIRST, SECOND], capacity=one_is_better)
    (numbers,) = re.findall(r"clusters of their own, rows (\d+) and (\d+)\.", plan.verdict)
    named = [plan.rows[int(number) - 1].site.accelerator.name for number in numbers]
    assert named == ["h100", "a100"]


def test_a_pool_with_two_roles_beside_one_that_does_both_is_a_plan_with_disaggregation() -> None:
    speeds = {("h100", True): 9.0, ("h100", False): 6.0, ("a100", True): 1.0, ("a100", False): 3.0}

    def by_pool(site: Site, candidate: Candidate) -> float:
        if site.decoding is not None:
            return 1.0
        return speeds[site.accelerator.name, candidate.prefill is not None]

    verdict = planned([FIRST, SECOND], capacity=by_pool).verdict
    assert verdict.startswith("Best: disaggregated h100")
    assert "beside unified a100" in verdict.split(" carries ")[0]
    assert "Disaggregate: without" in verdict and "Do not" not in verdict


def test_rates_by_stepping_are_not_compared_with_simulated_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pools together need too many requests for a simulation, and one of them alone does
    not."""
    monkeypatch.setattr(planner, "SIMULATED_REQUESTS", 250)

    def one_is_better(site: Site, candidate: Candidate) -> float:
        fast = 100.0 if site.accelerator.name == "h100" else 1.0
        return fast * carried(site, candidate) * (0.1 if candidate.prefill else 1.0)

    plan = planned([FIRST, SECOND], capacity=one_is_better)
    assert not any(row.finding.simulated for row in plan.rows)
    assert plan.rows[0].site.accelerator.name == "h100"
    assert "All rates are from the stepped cost model" in plan.verdict


def test_an_instance_that_cannot_hold_longer_prompts_carries_none_of_them() -> None:
    """Prompts of 5,000 tokens fit on each device of the first kind, and four times as long ones
    only on two together."""
    room = CostModel(MODEL, A100, Layout()).kv_tokens_per_rank(0.1)
    less = (room - 10_000) * MODEL.kv_bytes_per_token("bfloat16")
    small = Site(replace(A100, memory_bytes=A100.memory_bytes - less / 0.9), 2)
    site = replace(small, decoding=Site(H100, 1))
    search = Search(modes=(Mode.DISAGGREGATED,), finalists=1)
    servers = Servers(lambda item: 4.0 if item.prefill == Layout() else 1.0)
    made = Planner(MODEL, site, GOAL, both(servers), search)
    (found, *_) = made.plan(poisson(5.0, 100, Fixed(5000, 100), seed=1)).findings
    assert made.stepped_rate(found, poisson(5.0, 100, Fixed(20_000, 100), seed=1)) == 0.0


def test_the_verdict_tells_with_which_link_the_other_mode_wins() -> None:
    slow = replace(link("ethernet-10g"), name="slow")

    def by_link(site: Site, candidate: Candidate) -> float:
        path = handoff_path(site, candidate)[0] if candidate.prefill else slow
        fast = path.bytes_per_second / slow.bytes_per_second
        return 2.0 * min(8.0, fast) if candidate.prefill else 8.0

    site = Site(replace(H100, scale_up=slow, scale_out=slow), 4)
    lost = planned([site], capacity=by_link).verdict
    for said, times in (
        ("With a link 8 times as fast (80 Gb/s), of these two, two pools would carry", 2.0),
        (
            "With prompts 4 times as long (3,600 tokens on average), of these two, still one pool"
            " would carry",
            4.0,
        ),
    ):
        assert said in lost
        assert float(lost.split(said)[1].split()[0]) == pytest.approx(times, rel=0.08)
    (equal,) = re.findall(r"they are equal at about ([\d.]+) Gb/s", lost)
    assert float(equal) == pytest.approx(4 * 10, rel=0.2)
    won = planned([Site(H100, 4)], capacity=by_link).verdict
    assert re.search(r"Up to [89]\.\d* requests/s, one pool meets the limits as well", won)
    assert "With a link 1/8 times as fast" in won


def test_a_price_that_is_unknown_is_asked_for() -> None:
    """Before anything is run, also if only the last pool lacks it."""

    def never(site: Site, candidate: Candidate) -> float:
        raise AssertionError

    for pools in ([Site(H200, 2)], [FIRST, Site(H200, 2)]):
        with pytest.raises(ConfigError, match="best=dollars needs the price of 2 h200"):
            planned(pools, "dollars", capacity=never)
    weightless = Site(replace(H200, watts=None), 2)
    with pytest.raises(ConfigError, match="best=joules needs the power of 2 h200.*`watts`"):
        planned([FIRST, weightless], "joules", capacity=never)


# ---- two kinds in one fleet

PAIR = Site(H100, 4, decoding=Site(A100, 8, domain_devices=4), between=link("infiniband-hdr"))
CANDIDATE = Candidate(Mode.DISAGGREGATED, Layout(tp=2), 2, 8192, Layout(tp=2), 1)


def test_each_role_has_the_memory_the_domain_and_the_price_of_its_own_kind() -> None:
    fleet = FleetMaker(MODEL, PAIR).fleet(CANDIDATE)
    assert fleet.prefill is not None
    assert [pool.hardware.name for pool in fleet.pools] == ["h100", "a100"]
    for pool, card in ((fleet.prefill, H100), (fleet.decode, A100)):
        model = CostModel(MODEL, card, Layout(tp=2))
        assert fleet.cost_model(pool).kv_tokens_per_rank(0.1) == model.kv_tokens_per_rank(0.1)
    assert fleet.hardware_of(fleet.decode).domain_devices == 4
    assert handoff_path(PAIR, CANDIDATE) == (link("infiniband-hdr"), 2)
    assert handoff_path(replace(PAIR, between=None), CANDIDATE)[0] == A100.scale_out
    assert PAIR.spent(CANDIDATE, "joules") == 2 * 700 + 4 * 400
    assert PAIR.spent(CANDIDATE, "dollars") == 2 * 4.75 + 4 * 1.0
    assert PAIR.spent(replace(CANDIDATE, prefill=None, prefill_instances=0), "joules") == 1600
    longest = max(item.kv_tokens for item in fitting_layouts(MODEL, PAIR.decodes, 1000))
    assert longest > 0


@pytest.mark.ci
@pytest.mark.parametrize("best", ["dollars", "joules"])
def test_machines_of_the_splitwise_paper_rank_as_in_the_simulation_of_its_clusters(
    best: Best,
) -> None:
    """BLOOM on machines of eight, at the prices and powers of the paper, in three designs: HH, HA
    (prompts on H100, tokens on A100) and AA. benchmarks/results/papers_splitwise.md has 1.17, 0.90
    and 0.83 requests per price, and 1.44, 0.96 and 0.83 per power, of an A100 machine."""
    shape, goal = geometry("bloom-176b"), Goal(0.75, 0.05)
    lengths = Mixture(((0.5, Fixed(600, 130)), (0.3, Fixed(1200, 240)), (0.2, Fixed(2400, 400))))
    workload, many = poisson(1.0, 300, lengths, seed=1), 24
    first, second = Site(H100, many), Site(accelerator("a100"), many)
    values = []
    for site in (first, replace(first, decoding=second), second):
        maker = FleetMaker(replace(shape, context_tokens=16_384), site)
        search = Search(modes=(Mode.DISAGGREGATED,), most_requests=400, best=best)
        found = Planner(maker.geometry, site, goal, maker.runners, search).stepped(workload)
        values.append(found[0].value)
    assert values == sorted(values, reverse=True)
