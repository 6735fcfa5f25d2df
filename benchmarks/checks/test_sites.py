"""Fleets beyond two pools: prefill workers at another site behind one shared link, and decode
workers that also prefill."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.simulator_engines.cluster import StudyCluster, TrunkChannel, simulate
from benchmarks.simulator_engines.fleet import StudyFleet, StudyPool
from jdisagg.config import RoutingConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import Link, accelerator
from jdisagg.errors import ConfigError
from jdisagg.simulator.fleet import INSTANCE, Pool
from jdisagg.simulator.workloads import Fixed, Mixture, poisson
from tests.simulator.test_channel_and_timeline import LINK, arrivals


def two_sites(threshold: int = 0) -> StudyFleet:
    """Returns a fleet with a prefill worker near, one far, and a decode worker near."""
    shape = geometry("llama-3.1-8b")
    return StudyFleet(
        shape,
        Pool(1, accelerator("a100")),
        Pool(1, accelerator("a100")),
        more_prefill=(StudyPool(1, accelerator("h100"), site="far"),),
        site_link=Link("between", 12.5e9, 1e-3, 1.0),
        overlap=1,
        routing=RoutingConfig(far_prefill_tokens=threshold),
    )


def test_pulls_with_no_end_in_common_share_the_trunk() -> None:
    pulls = [(0.0, "a", "x", 100.0), (0.0, "b", "y", 200.0)]
    assert arrivals(pulls, links=8) == pytest.approx([0.5 + 1 / 8, 0.5 + 2 / 8])
    # Each sends 100 bytes at half the trunk's speed, then the longer one continues alone.
    trunk = partial(TrunkChannel, trunk=LINK)
    assert arrivals(pulls, links=8, make=trunk) == pytest.approx([2.5, 3.5])


def test_between_sites_goes_what_the_far_prefill_worker_computed_and_no_more() -> None:
    fleet = two_sites()
    near, decode, far = (places[0] for places in fleet.places())
    between = fleet.link_between()
    assert between(far, decode) is fleet.site_link and between(near, decode) is not fleet.site_link
    crossed: list[float] = []

    async def watch(cluster: StudyCluster) -> None:
        while True:
            await asyncio.sleep(0.5)
            assert isinstance(cluster.channel, TrunkChannel)
            crossed.append(cluster.channel.crossed_bytes())

    arrivals = poisson(2.0, 60, Fixed(4000, 20))
    result = simulate(fleet, arrivals, hooks=[watch], settle_seconds=1.0)
    by = Counter(item.prefill for item in result.outcomes)
    assert set(by) == {"prefill-0", "prefill-1"} and result.pages_lost == 0
    kept = fleet.geometry.kv_bytes_per_token("bfloat16")
    assert crossed[-1] == pytest.approx(by["prefill-1"] * 4000 * kept, rel=0.01)


def test_prompts_below_the_threshold_stay_and_those_above_it_may_go_far() -> None:
    lengths = Mixture(((1.0, Fixed(1000, 8)), (1.0, Fixed(6000, 8))))
    result = simulate(two_sites(4000), poisson(1.0, 80, lengths))
    by: dict[str, set[int]] = {item.prefill: set() for item in result.outcomes}
    for item in result.outcomes:
        by[item.prefill].add(item.prompt_tokens)
    assert 1000 in by["prefill-0"] and by["prefill-1"] == {6000}


def test_sites_need_a_link_between_them() -> None:
    pool = StudyPool(1, accelerator("a100"))
    with pytest.raises(ConfigError, match="site_link"):
        StudyFleet(geometry("llama-3.1-8b"), pool, replace(pool, site="far"))


def test_a_decode_worker_that_prefills_takes_hand_offs_too() -> None:
    """It prefills prompts that fit one chunk."""
    small = replace(INSTANCE, chunk_tokens=2048, min_chunk_tokens=256)
    fleet = StudyFleet(
        geometry("llama-3.1-8b"),
        StudyPool(2, accelerator("a100"), small, prefills=True),
        Pool(1, accelerator("a100")),
        fused=True,
    )
    result = simulate(fleet, poisson(12.0, 200, Fixed(1500, 30)))
    assert {item.end for item in result.outcomes} == {"finished"} and result.pages_lost == 0
    own = [item for item in result.outcomes if item.prefill == item.decode]
    handed = [item for item in result.outcomes if item.prefill == "prefill-0"]
    assert own and handed and len(own) + len(handed) == 200
    few = replace(fleet, decode=replace(fleet.decode, instance=replace(small, chunk_tokens=1024)))
    handed_on = simulate(few, poisson(12.0, 200, Fixed(1500, 30))).outcomes
    assert {item.prefill for item in handed_on} == {"prefill-0"}
    assert {item.decode for item in handed} <= {"decode-0", "decode-1"}
