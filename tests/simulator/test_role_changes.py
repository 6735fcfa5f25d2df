"""Workers that change their role during a run."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import ElasticConfig
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival
from tests.costs.named import H100
from tests.simulator.fleets import small_fleet


def test_a_worker_changes_sides_under_load_and_no_stream_breaks() -> None:
    async def switch(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(3.0)
        await cluster.switch_role("prefill-1", WorkerRole.DECODE, seconds=2.0)
        await cluster.clock.sleep(4.0)
        assert cluster.seats["prefill-1"].role is WorkerRole.DECODE
        assert "prefill-1" in cluster.membership.decode
        await cluster.switch_role("prefill-1", WorkerRole.PREFILL, seconds=2.0, drain_seconds=5.0)

    arrivals = [Arrival(0.2 * number, 500, 40) for number in range(100)]
    result = simulate(small_fleet(pages=512), arrivals, hooks=[switch], settle_seconds=40.0)
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    assert all(outcome.output_tokens == 40 for outcome in result.outcomes)
    assert result.counters["roles_switched"] == 2 and result.pages_lost == 0


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
