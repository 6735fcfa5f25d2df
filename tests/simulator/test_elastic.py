"""The live controller on a simulated fleet follows the load in both directions, and gives a role
without workers one of the other."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.router.elastic import ElasticConfig
from jdisagg.router.elastic_signals import SloTarget
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.faults import Death, schedule
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.workloads import Arrival, Fixed, merge, poisson
from tests.costs.named import H100
from tests.simulator.fleets import small_fleet

SLO = SloTarget(ttft_seconds=2.0, tpot_seconds=0.2)
CONFIG = ElasticConfig(
    slo=SLO, window_seconds=30, patience_seconds=5, cooldown_seconds=20, horizon_seconds=120
)


def fleet() -> Fleet:
    """Returns a fleet with two workers of each role."""
    return small_fleet(pages=512)


def later(arrivals: list[Arrival], seconds: float) -> list[Arrival]:
    return [replace(one, at_seconds=one.at_seconds + seconds) for one in arrivals]


def run(
    arrivals: list[Arrival], config: ElasticConfig | None = CONFIG, dead: Sequence[str] = ()
) -> tuple[Result, list[str], dict[str, str]]:
    said: list[str] = []
    roles: dict[str, str] = {}

    async def seats(cluster: SimulatedCluster) -> None:
        while True:
            roles.update({name: seat.role.value for name, seat in cluster.seats.items()})
            await cluster.clock.sleep(1.0)

    hooks: list[Hook] = (
        [seats]
        if config is None
        else [seats, elastic(config, 5.0, lambda now, text: said.append(f"{now:.0f} {text}"))]
    )
    if dead:
        hooks.append(schedule([Death(worker, 10.0) for worker in dead]))
    return (
        simulate(fleet(), arrivals, hooks=hooks, mortal=bool(dead), settle_seconds=40.0),
        said,
        roles,
    )


PROMPTS = poisson(20.0, 1200, Fixed(2000, 4))
ANSWERS = poisson(8.0, 700, Fixed(100, 200))


def check(result: Result, changes: int) -> None:
    assert {outcome.end for outcome in result.outcomes} == {"finished"} and result.pages_lost == 0
    assert result.counters["roles_switched"] == changes


def test_prompts_so_long_that_the_router_holds_them_get_one_too() -> None:
    """Each prompt occupies a prefill worker for longer than `hold_seconds`, so that none ever waits
    at the worker."""
    result, said, roles = run(poisson(3.6, 150, Fixed(8000, 4)))
    check(result, 1)
    assert result.counters["requests_held"] > 50
    assert sorted(roles.values()).count("prefill") == 3, said


@pytest.mark.ci
def test_the_ratio_follows_the_load_and_the_same_run_gives_the_same_changes() -> None:
    arrivals = merge(PROMPTS, later(ANSWERS, 90.0))
    result, said, roles = run(arrivals)
    made = [" ".join(text.split()[1:7]) for text in said if "is to become" in text]
    assert "prefill" in made[0]
    assert "decode" in made[-1]
    assert sorted(roles.values()).count("decode") == 3, said
    check(result, len(made))
    assert run(arrivals)[1] == said


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_where_nobody_of_a_role_is_left_the_other_gives_one(role: str) -> None:
    result, said, _ = run(poisson(4.0, 200, Fixed(500, 50)), dead=(f"{role}-0", f"{role}-1"))
    assert result.pages_lost == 0 and result.counters["roles_switched"] == 1, said
    assert {outcome.end for outcome in result.outcomes if outcome.arrival > 30.0} == {"finished"}
    fixed, _, _ = run(poisson(4.0, 200, Fixed(500, 50)), None, dead=(f"{role}-0", f"{role}-1"))
    assert {outcome.end for outcome in fixed.outcomes if outcome.arrival > 30.0} == {"failed"}


def test_roles_that_cannot_change_are_refused_before_anything_is_served() -> None:
    two = small_fleet()
    assert two.prefill is not None
    wider = replace(two.prefill, instance=replace(two.prefill.instance, layout=Layout(tp=2)))
    other = replace(two.prefill, hardware=H100)
    for fleet, said in (
        (small_fleet(Mode.CHUNKED), "no such pool"),
        (replace(two, prefill=wider), "devices an instance, 2 and 1"),
        (replace(two, prefill=other), "h100 and l40s"),
    ):
        with pytest.raises(ConfigError, match=said):
            simulate(fleet, [Arrival(0.0, 100, 4)], hooks=[elastic(ElasticConfig(), 1.0)])
