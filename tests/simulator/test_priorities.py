"""A storm of requests of high priority on a fleet that long streams of low priority fill: the
router, the workers and the scheduler are the real ones."""

import random
from dataclasses import replace

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival
from tests.simulator.fleets import small_fleet

LOW_TOKENS, HIGH_TOKENS = 400, 20


def ttfts(result: Result, output_tokens: int) -> list[float]:
    """Times to first token of all requests with answers of this length, ascending."""
    ours = [one for one in result.outcomes if one.output_tokens == output_tokens]
    return sorted(one.ttft for one in ours if one.ttft is not None)


@pytest.mark.parametrize("priority", [0, 1])
def test_first_tokens_of_a_higher_priority_come_as_on_an_idle_fleet(priority: int) -> None:
    draw, at = random.Random(3), 1.0
    storm = []
    for _ in range(60):
        at += draw.expovariate(8.0)
        storm.append(Arrival(at, 300, HIGH_TOKENS, priority=priority))
    background = [Arrival(0.01 * number, 300, LOW_TOKENS) for number in range(120)]
    one_pool = small_fleet(Mode.DISAGGREGATED, pages=600)
    fleet = replace(one_pool, prefix=PrefixConfig(True, host_gib=8.0, append_tokens=256))
    idle = ttfts(simulate(fleet, storm), HIGH_TOKENS)
    result = simulate(fleet, sorted(background + storm, key=lambda one: one.at_seconds))
    assert [one.output_tokens for one in result.outcomes].count(LOW_TOKENS) == len(background)
    assert result.pages_lost == 0
    found = ttfts(result, HIGH_TOKENS)
    yielded = result.counters.get("sequences_yielded", 0)
    if priority:
        assert {one.end for one in result.outcomes} == {"finished"}
        assert yielded > 0 and found[-6] < 1.2 * idle[-6]
    else:
        assert yielded == 0 and found[-6] > 10 * idle[-6]
