"""A simulated cluster does what its router decides, and the router knows the simulated network."""

from dataclasses import replace

import pytest

from jdisagg.costs.hardware import LINKS, Link
from jdisagg.layout.axes import Layout
from jdisagg.router.decision import Decision, NoRouterEvents, PlacementOutcome, PlacementQuery
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival, poisson
from tests.costs.named import H100, LLAMA_31_8B
from tests.simulator.fleets import LENGTHS, small_fleet


def test_simulated_requests_run_where_the_router_has_placed_them() -> None:
    answers: list[PlacementOutcome] = []

    class Recorded(NoRouterEvents):
        def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
            answers.append(answer)

    result = simulate(small_fleet(pages=512), poisson(4.0, 40, LENGTHS, 1), events=Recorded())
    assert len(answers) == 40
    for answer, outcome in zip(answers, result.outcomes, strict=True):
        assert isinstance(answer, Decision)
        assert outcome.prefill == answer.prefill
        assert outcome.decode in (answer.decode, answer.prefill)
    assert {outcome.prefill for outcome in result.outcomes} == {"prefill-0", "prefill-1"}


@pytest.mark.parametrize("link", [None, LINKS["ethernet-25g"]], ids=["scale-out", "ethernet"])
def test_the_router_expects_the_network_that_joins_the_simulated_racks(
    link: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdisagg.simulator.fleet.HOSTS_PER_RACK", 1)
    answers: list[PlacementOutcome] = []

    class Listed(NoRouterEvents):
        def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
            answers.append(answer)

    pool = Pool(1, H100, replace(INSTANCE, layout=Layout(tp=8)))
    fleet = Fleet(LLAMA_31_8B, decode=pool, prefill=pool, link=link)
    simulate(fleet, [Arrival(0.0, 2000, 4)], events=Listed())
    (decision,) = answers
    assert isinstance(decision, Decision) and decision.terms is not None
    far = link or H100.scale_out
    moving = far.latency_seconds + 2000 * fleet.geometry.kv_bytes_per_token("bfloat16") / 8 / (
        far.bytes_per_second * far.efficiency
    )
    assert decision.terms.transfer == pytest.approx(moving, rel=0.01)
