"""Differences of the modes: chunks in turn with steps or fused with them, whole prefills, and the
stalls that each causes."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival
from tests.costs.named import H100, LLAMA_31_8B, LLAMA_31_70B

# Four streams that decode, and a long prompt that comes in their midst.
ARRIVALS = [*(Arrival(0.1 * number, 200, 300) for number in range(4)), Arrival(0.8, 8000, 10)]


def run(mode: Mode, fused: bool = False, chunk_tokens: int = 1024) -> Result:
    instance = replace(INSTANCE, chunk_tokens=chunk_tokens, layout=Layout(tp=2))
    pool = Pool(1, H100, instance)
    fleet = Fleet(
        LLAMA_31_8B, pool, pool if mode is Mode.DISAGGREGATED else None, mode, fused=fused
    )
    result = simulate(fleet, ARRIVALS)
    assert [(outcome.end, outcome.output_tokens) for outcome in result.outcomes] == [
        ("finished", 300)
    ] * 4 + [("finished", 10)]
    assert result.pages_lost == 0
    return result


def stall(result: Result) -> float:
    """Returns the longest gap of a running stream, without its hand-off."""
    gaps = [outcome.gaps for outcome in result.outcomes[:4] if outcome.gaps]
    return max(max(item.longest, 0.0) for item in gaps)


def test_a_long_prompt_stalls_streams_least_where_it_has_a_mesh_of_its_own() -> None:
    apart, chunked, whole = run(Mode.DISAGGREGATED), run(Mode.CHUNKED), run(Mode.UNIFIED)
    assert stall(apart) < stall(chunked) < stall(whole)
    long = [result.outcomes[4].ttft or 0.0 for result in (apart, chunked, whole)]
    assert long[0] < long[1], "chunks take turns with steps"
    assert long[2] < long[1], "a whole prefill waits for nobody"


def test_fused_chunks_cost_less_than_chunks_and_steps_in_turn() -> None:
    turns, fused = run(Mode.CHUNKED), run(Mode.CHUNKED, fused=True)
    assert (fused.outcomes[4].ttft or 0.0) < (turns.outcomes[4].ttft or 0.0)
    assert sum(usage.busy_seconds for usage in fused.usage) < sum(
        usage.busy_seconds for usage in turns.usage
    )


def test_smaller_chunks_stall_less_and_take_longer() -> None:
    small, large = run(Mode.CHUNKED, chunk_tokens=512), run(Mode.CHUNKED, chunk_tokens=4096)
    assert stall(small) < stall(large)
    assert (small.outcomes[4].ttft or 0.0) > (large.outcomes[4].ttft or 0.0)


def test_fleets_that_cannot_be_are_refused_with_what_does_not_fit() -> None:
    pool = Pool(1, H100, INSTANCE)
    with pytest.raises(ConfigError, match="prefill pool"):
        Fleet(LLAMA_31_8B, pool)
    with pytest.raises(ConfigError, match="no room for KV"):
        Fleet(LLAMA_31_70B, pool, mode=Mode.CHUNKED)
    with pytest.raises(LayoutError):
        Fleet(
            LLAMA_31_8B,
            replace(pool, instance=replace(INSTANCE, layout=Layout(tp=3))),
            mode=Mode.CHUNKED,
        )
    with pytest.raises(ConfigError, match="at least 1"):
        Pool(0, H100)


def test_an_instance_wider_than_the_fast_link_pays_for_the_slower_one() -> None:
    """`host_devices` bounds the fast link for tensor parallelism as well as for hand-offs."""
    pool = Pool(1, H100, replace(INSTANCE, layout=Layout(tp=8)))
    within, beyond = (
        simulate(Fleet(LLAMA_31_8B, pool, pool, host_devices=devices), [Arrival(0.0, 4000, 2)])
        .outcomes[0]
        .ttft
        for devices in (8, 4)
    )
    assert within and beyond and beyond > 2 * within


def test_pools_stand_side_by_side_on_hosts_and_large_instances_take_whole_ones() -> None:
    half = replace(INSTANCE, layout=Layout(tp=4))
    fleet = Fleet(LLAMA_31_8B, Pool(2, H100, half), Pool(2, H100, half))
    prefill, decode = fleet.places()
    assert (
        [place.split("/")[1] for place in prefill]
        == [place.split("/")[1] for place in decode]
        == ["host0", "host1"]
    )
    between = fleet.link_between()
    assert between(prefill[0], decode[0]).name == "nvlink4"
    assert between(prefill[0], decode[1]).name == "infiniband-ndr"
    whole = replace(INSTANCE, layout=Layout(dp=2, tp=8))
    places = Fleet(LLAMA_31_8B, Pool(2, H100, whole), mode=Mode.CHUNKED).places()[0]
    assert [place.split("/")[1] for place in places] == ["host0", "host2"]
