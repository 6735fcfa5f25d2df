"""KV that stays on workers of a model with recurrent state: a sequence goes on from a snapshot. The
fake meshes verify the state that each pass starts from, besides each page that it reads, so that a
snapshot in the wrong place, of other tokens or overwritten too early fails at once."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.messages.step_commands import SaveBlock
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker.disk_tier import SNAPSHOT_MARK
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_disk import FakeDisk
from tests.worker.conversations import NAMES, SEEDS, Talk, asked, cached_of, prompt, storm
from tests.worker.states import check_snapshots, residencies, stateful


def cluster_of(mode: Mode, seed: int = 0, **more) -> Cluster:
    mesh = stateful(**more)
    # a mesh that only decodes makes no snapshots
    decode = mesh if mode is not Mode.DISAGGREGATED else replace(mesh, snapshots_per_rank=0)
    return Cluster(mode, decode=decode, prefill=mesh, names=NAMES, wire=True, seed=seed)


@pytest.mark.parametrize("mode", list(Mode))
@SEEDS
async def test_a_sequence_that_goes_on_from_a_snapshot_has_the_tokens_of_one_that_does_not(
    mode: Mode, seed: int
) -> None:
    async with cluster_of(mode, seed, ranks=1 + seed % 2, rows=2) as cluster:
        await storm(cluster, Talk(seed), requests=40, at_once=4, cancels=0.1)
        assert check_snapshots(cluster) > 0
        hits = cluster.prefill.counters if mode is Mode.DISAGGREGATED else None
        hits = hits or cluster.decode.counters
        assert hits["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_snapshots_go_where_pages_or_slots_are_few(mode: Mode) -> None:
    """So few that blocks and snapshots are dropped and running sequences preempted."""
    async with cluster_of(mode, 7, pages=72, snapshots=5) as cluster:
        await storm(cluster, Talk(7), requests=60, at_once=6)
        assert check_snapshots(cluster) > 0
        kept = residencies(cluster)
        assert sum(one.evicted for each in kept for one in each.snapshots) > 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_second_of_two_prompts_that_branch_reveals_where_the_third_goes_on(
    mode: Mode,
) -> None:
    """The first leaves a snapshot at its own end only."""
    async with cluster_of(mode) as cluster:
        first, other = prompt(70), prompt(40) + (3,) * 30
        assert await cached_of(cluster, asked(1, first)) == 0
        assert await cached_of(cluster, asked(2, first)) == 64
        assert await cached_of(cluster, asked(3, other)) == 0
        assert await cached_of(cluster, asked(4, prompt(40) + (5,) * 30)) == 32
        assert await cached_of(cluster, asked(5, other)) == 64
        check_snapshots(cluster)


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.UNIFIED])
async def test_the_next_turn_goes_on_from_the_last_whole_block_of_an_answer(mode: Mode) -> None:
    async with cluster_of(mode) as cluster:
        request = asked(1, prompt(30), 40)
        collected = await cluster.collect(request)
        history = request.prompt_token_ids + tuple(collected.tokens[0])
        assert await cached_of(cluster, asked(2, history + (1, 2, 3))) == 64


async def test_a_decode_worker_receives_the_state_and_the_kv_that_it_lacks() -> None:
    async with cluster_of(Mode.DISAGGREGATED) as cluster:
        whole = await cluster.collect(asked(1, prompt(64)))
        part = await cluster.collect(asked(2, prompt(64, tail=16)))
        cluster.check(asked(2, prompt(64, tail=16)), part)
        assert whole.timings is not None and part.timings is not None
        kv, state = 8 * 64 * cluster.prefill_mesh.limits.layer_groups, 8
        assert whole.timings.kv_bytes_moved in (kv + state, kv // 2 + state)
        assert part.timings.kv_bytes_moved - state == (whole.timings.kv_bytes_moved - state) / 4


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_reset_drops_snapshots_and_those_of_running_sequences(mode: Mode) -> None:
    async with cluster_of(mode) as cluster:
        await cluster.collect(asked(1, prompt(60)))
        assert await cluster.path.reset_cache() > 0
        assert all(len(one) == 0 for kept in residencies(cluster) for one in kept.snapshots)
        assert await cached_of(cluster, asked(3, prompt(60))) == 0
        assert await cached_of(cluster, asked(4, prompt(60))) == 48
        check_snapshots(cluster)


def with_host_memory(
    pages: int = 24, snapshots: int = 24, seed: int = 0, always: bool = True
) -> Cluster:
    """A prefill worker with few pages, whose host memory has room for all that they lose."""
    mesh = stateful(pages=pages, snapshots=snapshots, rows=2)
    decode = replace(stateful(pages=160), snapshots_per_rank=0)
    room = TierRoom(1 << 20, always=always)
    return Cluster(decode=decode, prefill=mesh, names=NAMES, tiers=room, wire=True, seed=seed)


async def lost_from_pages(cluster: Cluster, number: int) -> None:
    """Another prompt takes all pages of the prefill worker."""
    await cluster.collect(asked(number, (number % 89,) * 92))
    await asyncio.sleep(1.0)


@SEEDS
async def test_snapshots_come_back_from_host_memory(seed: int) -> None:
    async with with_host_memory(72, 3 + seed, seed) as cluster:
        await storm(cluster, Talk(seed), requests=60, at_once=4, cancels=0.1)
        assert check_snapshots(cluster) > 0
        counters = cluster.prefill.counters
        assert counters["host_snapshots_restored"] > 0 and counters["host_tokens_restored"] > 0
        assert counters["host_snapshots_broken"] == counters["host_blocks_broken"] == 0


async def test_a_prefix_comes_back_with_its_snapshot() -> None:
    async with with_host_memory() as cluster:
        assert await cached_of(cluster, asked(1, prompt(70))) == 0
        await lost_from_pages(cluster, 2)
        assert await cached_of(cluster, asked(3, prompt(70))) == 64
        assert cluster.prefill.counters["host_snapshots_restored"] == 1
        check_snapshots(cluster)


async def test_snapshots_that_no_prompt_asks_for_are_no_longer_copied_until_some_are() -> None:
    async with with_host_memory(always=False) as cluster:
        counters = cluster.prefill.counters
        for number in range(360):
            await cluster.collect(asked(number, (number % 89, number // 89) * 46))
        assert counters["host_snapshots_declined"] > 0
        written = counters["host_snapshots_written"]
        for number in range(360, 460):  # six prompts in turn, which evict each other
            await cluster.collect(asked(number, (88 - number % 6, 80) * 46))
        assert counters["host_snapshots_written"] > written
        assert counters["host_snapshots_restored"] > 0
        check_snapshots(cluster)


async def test_a_spoiled_snapshot_in_host_memory_is_a_miss() -> None:
    async with with_host_memory() as cluster:
        await cluster.collect(asked(1, prompt(70)))
        await lost_from_pages(cluster, 2)
        chain = cluster.prefill._kept.chain(asked(1, prompt(70)), prompt(70))
        (piece,) = cluster.prefill._host.snapshots.arrived(chain[3]).pieces
        groups, (entry,) = cluster.prefill_mesh.host[piece.offer.offer_id]
        flipped = (entry[0], entry[1], entry[2] ^ 1)
        cluster.prefill_mesh.host[piece.offer.offer_id] = (groups, [flipped])
        assert await cached_of(cluster, asked(3, prompt(70))) == 0
        assert cluster.prefill.counters["host_snapshots_broken"] == 1
        assert await cached_of(cluster, asked(4, prompt(70))) == 64
        check_snapshots(cluster)
        assert await cluster.path.reset_cache() > 0
        assert len(cluster.prefill._host.snapshots) == 0


def with_disk(disk: FakeDisk, seed: int = 0) -> Cluster:
    mesh, room = stateful(pages=24, rows=2), TierRoom(1 << 14, 1 << 20, always=True)
    decode = replace(stateful(pages=160), snapshots_per_rank=0)
    cluster = Cluster(decode=decode, prefill=mesh, names=NAMES, tiers=room, seed=seed)
    cluster.prefill_mesh.disk = disk
    return cluster


async def written_to_disk(disk: FakeDisk) -> None:
    """A prefix that was used twice lies on disk with its snapshot."""
    async with with_disk(disk) as cluster:
        assert await cached_of(cluster, asked(1, prompt(70))) == 0
        assert await cached_of(cluster, asked(2, prompt(70))) == 64
        await until(lambda: cluster.prefill._sources.quiet, 0.1)
        assert cluster.prefill.counters["disk_snapshots_written"] == 1


async def test_a_prefix_comes_back_with_its_snapshot_in_the_next_life_of_the_worker() -> None:
    disk = FakeDisk()
    await written_to_disk(disk)
    async with with_disk(disk, seed=7) as cluster:
        assert cluster.prefill.counters["disk_blocks_found"] == 4
        assert await cached_of(cluster, asked(3, prompt(70))) == 64
        counters = cluster.prefill.counters
        assert counters["disk_snapshots_restored"] == 1
        assert counters["disk_tokens_restored"] == 64
        check_snapshots(cluster)


async def test_of_snapshots_that_a_failing_disk_passes_over_nothing_is_remembered() -> None:
    disk = FakeDisk(fails={SaveBlock: "full"})
    async with with_disk(disk) as cluster:
        for number in range(4):
            for again in range(2):
                request = asked(
                    2 * number + again, tuple((7 * one + number) % 89 for one in range(70))
                )
                assert await cached_of(cluster, request) == 64 * again
        await until(lambda: cluster.prefill._sources.quiet, 0.1)
        tier = cluster.prefill._disk
        assert disk.refused > 0 and tier.snapshots.wanted == 0
        assert not tier._named


async def test_a_spoiled_snapshot_on_disk_is_a_miss_and_is_removed() -> None:
    disk = FakeDisk()
    await written_to_disk(disk)
    (key,) = [one for one in disk.blocks if one[1].startswith(SNAPSHOT_MARK)]
    (((band, ((tokens, zero, chain),)),), sums) = disk.blocks[key]
    disk.blocks[key] = (((band, ((tokens, zero, chain ^ 1),)),), sums)
    async with with_disk(disk, seed=7) as cluster:
        assert await cached_of(cluster, asked(3, prompt(70))) == 0
        assert cluster.prefill.counters["disk_snapshots_broken"] == 1
        await until(lambda: cluster.prefill._sources.quiet, 0.1)
        assert cluster.prefill.counters["disk_blocks_dropped"] == 0, "it is no block"
        assert key not in disk.blocks
        assert await cached_of(cluster, asked(4, prompt(70))) == 64
        check_snapshots(cluster)
