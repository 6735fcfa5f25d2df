"""Prefix caches of simulated workers, which the router hears of; and workers that change their role
in the midst of a run."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.costs.hardware import accelerator
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import PrefillRow, SampleSpec
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import SamplingParams
from jdisagg.router.elastic import ElasticConfig
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.prefix_cache import MOST_BEGUN, PrefixCache, blocks_of, prompt_of
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival
from tests.simulator.test_conservation import small_fleet


def row(sequence: int, tokens: tuple[int, ...], start: int = 0, last: bool = True) -> PrefillRow:
    samples = (SampleSpec(0, SamplingParams()),) if last else ()
    return PrefillRow(sequence, 0, 0, tokens, start, (), samples)


def test_a_prompt_says_which_blocks_it_is_made_of() -> None:
    prompt = prompt_of((0, 7, 9), 1100, 512)
    assert len(prompt) == 1100 and blocks_of(prompt, 512) == (1, 8, 10)
    assert blocks_of((0,) * 600, 512) == ()


def test_blocks_are_cached_once_computed_and_chunks_go_on_where_they_were() -> None:
    cache = PrefixCache(10, 4)
    first = prompt_of((5, 6, 7), 12, 4)
    assert cache.cached_tokens(row(1, first)) == 0
    assert cache.cached_tokens(row(2, first)) == 0, "nothing is known before it is computed"
    cache.computed(row(1, first))
    assert cache.cached_tokens(row(3, prompt_of((5, 6, 8), 12, 4))) == 8
    # In two chunks, the second of which begins within a block.
    assert cache.cached_tokens(row(4, first[:6], last=False)) == 8
    assert cache.cached_tokens(row(4, first[6:], start=6)) == 12


def test_prompts_that_were_given_up_half_way_are_forgotten() -> None:
    cache = PrefixCache(10, 4)
    prompt = prompt_of((5, 6, 7), 12, 4)
    for sequence in range(3 * MOST_BEGUN):
        cache.cached_tokens(row(sequence, prompt[:8], last=False))
    assert len(cache._chains) == MOST_BEGUN
    cache.cached_tokens(row(3 * MOST_BEGUN - 1, prompt[8:], start=8))
    cache.computed(row(3 * MOST_BEGUN - 1, prompt[8:], start=8))
    assert cache.cached_tokens(row(0, prompt)) == 12


def test_equal_beginnings_cost_nothing_the_second_time_and_go_where_they_are_known() -> None:
    fleet = replace(small_fleet(pages=512), cache_blocks=64)
    blocks = tuple(range(1, 5))
    arrivals = [Arrival(4.0 * number, 2048, 4, blocks) for number in range(6)]
    cached = simulate(fleet, arrivals)
    plain = simulate(replace(fleet, cache_blocks=0), arrivals)
    first, *others = [outcome.ttft or 0.0 for outcome in cached.outcomes]
    assert max(others) < 0.3 * first
    assert min(outcome.ttft or 0.0 for outcome in plain.outcomes) > 0.9 * first
    assert (
        cached.counters["prefix_asked_tokens"] == 6 * 2048
        and cached.counters["prefix_hit_tokens"] == 5 * 2048
    )
    assert "prefix_asked_tokens" not in plain.counters
    busy = {usage.worker: usage.busy_seconds for usage in cached.usage if usage.role == "prefill"}
    assert min(busy.values()) == 0.0, "all went to the worker that knew their beginning"


def test_a_worker_changes_sides_under_load_and_no_stream_breaks() -> None:
    async def switch(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(3.0)
        await cluster.switch_role("prefill-1", WorkerRole.DECODE, seconds=2.0)
        await cluster.clock.sleep(4.0)
        assert (
            cluster.seats["prefill-1"].role is WorkerRole.DECODE
            and "prefill-1" in cluster.membership.decode
        )
        await cluster.switch_role("prefill-1", WorkerRole.PREFILL, seconds=2.0, drain_seconds=5.0)

    arrivals = [Arrival(0.2 * number, 500, 40) for number in range(100)]
    result = simulate(small_fleet(pages=512), arrivals, hooks=[switch], settle_seconds=40.0)
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    assert all(outcome.output_tokens == 40 for outcome in result.outcomes)
    assert result.counters["roles_switched"] == 2 and result.pages_lost == 0


def test_there_is_no_other_side_in_one_pool() -> None:
    async def switch(cluster: SimulatedCluster) -> None:
        await cluster.switch_role("mixed-0", WorkerRole.PREFILL, seconds=1.0)

    with pytest.raises(ConfigError, match="no such pool"):
        simulate(
            small_fleet(Mode.CHUNKED), [Arrival(0.0, 100, 4), Arrival(5.0, 100, 4)], hooks=[switch]
        )


def test_roles_that_cannot_change_are_refused_before_anything_is_served() -> None:
    two = small_fleet()
    assert two.prefill is not None
    wider = replace(two.prefill, instance=replace(two.prefill.instance, layout=Layout(tp=2)))
    other = replace(two.prefill, hardware=accelerator("h100"))
    for fleet, said in (
        (small_fleet(Mode.CHUNKED), "no such pool"),
        (replace(two, prefill=wider), "devices an instance, 2 and 1"),
        (replace(two, prefill=other), "h100 and l40s"),
    ):
        with pytest.raises(ConfigError, match=said):
            simulate(fleet, [Arrival(0.0, 100, 4)], hooks=[elastic(ElasticConfig(), 1.0)])
