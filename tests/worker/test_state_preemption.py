"""Preempted and suspended sequences of models with recurrent state, over fake meshes that verify
the state of each pass: they go on from a snapshot, or their state is computed anew."""

from dataclasses import replace

import pytest

from jdisagg.config import Mode
from tests.fakes.fake_states import with_state
from tests.worker.conversations import NAMES, SEEDS, Talk, limits, storm
from tests.worker.preempting import check_empty, hits, long, resting, roomy, scarce
from tests.worker.states import check_snapshots, stateful


async def test_a_preempted_sequence_on_a_mesh_that_only_decodes_gets_its_state_anew() -> None:
    async with scarce(decode=with_state(limits(pages=24)), prefill=stateful(1, 400)) as cluster:
        await cluster.collect_all([long(1), long(2)])
        assert cluster.path.counters["preemptions"] > 0
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
        assert cluster.path.counters["preemptions"] > 0
        assert check_snapshots(cluster) > 0
        await check_empty(cluster)


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.UNIFIED])
async def test_a_suspended_request_goes_on_from_a_snapshot_of_its_state(mode: Mode) -> None:
    mesh = stateful(1, 400)
    async with roomy(mode=mode, decode=mesh, prefill=mesh) as cluster:
        async with resting(cluster, long(1)):
            pass
        assert hits(cluster)["pages"] == 48
