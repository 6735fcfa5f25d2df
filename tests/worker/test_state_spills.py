"""Preempted and suspended sequences of models with recurrent state: they are set aside with their
state and go on from it, over fake meshes that verify the state of each pass."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from tests.fakes.cluster import until
from tests.fakes.fake_states import with_state
from tests.worker.conversations import NAMES, SEEDS, Talk, limits, storm
from tests.worker.spilling import all_of, check_empty, flip_all, long, resting, roomy, scarce
from tests.worker.states import check_snapshots, stateful

LARGE = with_state(limits(pages=400))


async def test_a_preempted_sequence_goes_on_from_its_state() -> None:
    async with scarce(decode=with_state(limits(pages=24)), prefill=LARGE) as cluster:
        await all_of(cluster, long(1), long(2))
        counters = cluster.decode.counters
        assert counters["spills_restored"] == counters["sequences_spilled"] > 0
        assert cluster.path.counters["preemptions"] == 0
        await check_empty(cluster)


@SEEDS
@pytest.mark.parametrize("mode", list(Mode))
async def test_streams_are_the_oracles_and_no_slot_is_left(mode: Mode, seed: int) -> None:
    mesh = stateful(2, 60, 4, rows=2)
    decode = replace(mesh, snapshots_per_rank=0) if mode is Mode.DISAGGREGATED else mesh
    async with scarce(
        mode=mode, decode=decode, prefill=stateful(1, 400), names=NAMES, seed=seed
    ) as cluster:
        await storm(cluster, Talk(seed), requests=60, at_once=6, cancels=0.15)
        counters = cluster.decode.counters
        assert counters["sequences_spilled"] > 0 and counters["spills_restored"] > 0
        assert counters["spills_missed"] == 0
        assert check_snapshots(cluster) > 0
        await check_empty(cluster)


async def test_a_byte_of_the_state_that_flips_in_host_memory_is_a_miss() -> None:
    async with scarce(decode=with_state(limits(pages=24)), prefill=LARGE) as cluster:
        running = asyncio.ensure_future(all_of(cluster, long(1), long(2)))
        await until(lambda: cluster.decode.counters["sequences_spilled"])
        (spill,) = cluster.decode._spilled.spills
        (state,) = spill.whole
        others = {
            offer_id: piece
            for offer_id, piece in cluster.decode_mesh.host.items()
            if offer_id != state.offer.offer_id
        }
        kept = {offer_id: list(entries) for offer_id, (_, entries) in others.items()}
        flip_all(cluster.decode_mesh)
        for offer_id, entries in kept.items():
            others[offer_id][1][:] = entries
        await running
        assert cluster.decode.counters["spills_missed"] == 1
        assert cluster.path.counters["preemptions"] == 1
        await check_empty(cluster)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_suspended_request_goes_on_from_its_state(mode: Mode) -> None:
    async with roomy(mode=mode, decode=LARGE, prefill=LARGE) as cluster:
        counters = cluster.decode.counters
        async with resting(cluster, long(1)):
            await asyncio.sleep(20.0)
        assert counters["sequences_spilled"] == counters["spills_restored"] == 1
        assert cluster.path.counters["preemptions"] == 0
