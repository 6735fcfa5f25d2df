"""A decision recorded in a simulated cluster replays to itself, as a live router's does, since the
code is the same."""

from dataclasses import replace

import pytest

from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import LINKS, Link, accelerator
from jdisagg.dispatch.router_events import NoRouterEvents
from jdisagg.layout.axes import Layout
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision, PlacementOutcome, PlacementPolicy, PlacementQuery
from jdisagg.router.decision_record import Record, answer_of, record_of, replay
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival, poisson
from tests.simulator.fleets import LENGTHS, small_fleet


def test_a_simulated_routers_decisions_replay_to_themselves() -> None:
    records: list[Record] = []

    class Recorded(NoRouterEvents):
        def answered(
            self,
            state: ClusterState,
            query: PlacementQuery,
            now: float,
            policy: PlacementPolicy,
            answer: PlacementOutcome,
        ) -> None:
            records.append(record_of(state, query, now, policy, answer))

    result = simulate(small_fleet(pages=512), poisson(4.0, 40, LENGTHS, 1), events=Recorded())
    assert len(records) == 40
    for record, outcome in zip(records, result.outcomes, strict=True):
        answer = replay(record)
        assert answer == answer_of(record) and isinstance(answer, Decision)
        assert outcome.prefill == answer.prefill and outcome.decode in (
            answer.decode,
            answer.prefill,
        )
    assert {outcome.prefill for outcome in result.outcomes} == {"prefill-0", "prefill-1"}


@pytest.mark.parametrize("link", [None, LINKS["ethernet-25g"]], ids=["scale-out", "ethernet"])
def test_the_router_expects_the_network_that_joins_the_simulated_racks(
    link: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdisagg.simulator.fleet.HOSTS_PER_RACK", 1)
    answers: list[PlacementOutcome] = []

    class Listed(NoRouterEvents):
        def answered(
            self,
            state: ClusterState,
            query: PlacementQuery,
            now: float,
            policy: PlacementPolicy,
            answer: PlacementOutcome,
        ) -> None:
            answers.append(answer)

    pool = Pool(1, accelerator("h100"), replace(INSTANCE, layout=Layout(tp=8)))
    fleet = Fleet(geometry("llama-3.1-8b"), decode=pool, prefill=pool, link=link)
    simulate(fleet, [Arrival(0.0, 2000, 4)], events=Listed())
    (decision,) = answers
    assert isinstance(decision, Decision) and decision.terms is not None
    far = link or accelerator("h100").scale_out
    moving = far.latency_seconds + 2000 * fleet.geometry.kv_bytes_per_token("bfloat16") / 8 / (
        far.bytes_per_second * far.efficiency
    )
    assert decision.terms.transfer == pytest.approx(moving, rel=0.01)
