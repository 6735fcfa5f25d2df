"""The disk behind the host memory of a prefill worker, over fake meshes that check what lies in
every page they read: blocks that were used twice come back, in this life of the worker or in the
next, streams are those of the oracle, and a disk that fails costs no token."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.errors import UnavailableError
from jdisagg.messages.step_commands import (
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
    StepCommand,
    StepResult,
)
from jdisagg.request import Request
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_disk import FakeDisk
from tests.lanes import first_quick
from tests.worker.conversations import NAMES, Talk, limits, storm
from tests.worker.tiers import (
    BLOCK_TOKENS,
    FAST,
    again,
    host,
    known_on_disk,
    other,
    room,
    until_quiet,
    worker_on,
)


async def test_what_was_used_twice_comes_back_from_disk_when_host_memory_has_no_room_for_it():
    disk = FakeDisk()
    async with worker_on(disk, wire=True) as cluster:
        await known_on_disk(cluster)
        assert await again(cluster, 1) == 80 - 64
        counters = cluster.prefill.counters
        assert counters["disk_tokens_restored"] == 64 and counters["disk_blocks_read"] == 4
        assert counters["disk_errors"] == counters["host_blocks_broken"] == 0
        assert len(disk.blocks) == 4  # those used once were never written


async def test_what_was_used_twice_is_known_to_the_next_life_of_the_worker() -> None:
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        for _ in range(2):
            assert await again(cluster, 1) in (80, 16)
        await again(cluster, 2)
        await until_quiet(cluster)
    async with worker_on(disk, seed=7) as cluster:
        assert cluster.prefill.counters["disk_blocks_found"] == 4
        assert len(cluster.prefill._kept.log) == 4  # routers are told
        assert await again(cluster, 1) == 16
        assert await again(cluster, 2) == 80  # used once


@pytest.mark.parametrize("what", ["secret", "model", "grain"])
async def test_another_namespace_knows_nothing_of_it(what: str) -> None:
    names = {
        "secret": replace(NAMES, secret=b"another"),
        "model": replace(NAMES, model="another"),
        "grain": replace(NAMES, grain_tokens=32),
    }[what]
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        await known_on_disk(cluster)
    async with worker_on(disk, names=names) as cluster:
        assert await again(cluster, 1) == 80
        assert cluster.prefill.counters["disk_blocks_found"] == 0


def kept_for(seconds: float) -> TierRoom:
    return replace(room(12, 200), disk_ttl_seconds=seconds)


async def test_what_was_written_too_long_ago_is_computed_and_its_files_are_removed() -> None:
    disk = FakeDisk()
    async with worker_on(disk, tiers=kept_for(600.0)) as cluster:
        await known_on_disk(cluster)
        counters = cluster.prefill.counters
        await asyncio.sleep(300.0)
        assert await again(cluster, 1) == 80 - 64, "it is not too old"
        for number in range(2, 7):  # and in host memory no longer
            await again(cluster, number)
        await until_quiet(cluster)
        assert len(disk.blocks) == 4
        await asyncio.sleep(305.0)
        assert not disk.blocks and not len(cluster.prefill._disk.blocks)
        assert counters.labelled()["disk_blocks_dropped", (("cause", "expired"),)] == 4
        read = counters["disk_blocks_read"]
        assert await again(cluster, 1) == 80
        assert counters["disk_blocks_read"] == read


@pytest.mark.parametrize(("seed",), first_quick([(seed,) for seed in range(3)]))
@pytest.mark.parametrize(
    ("page_size", "ranks", "rows", "blocks"), [(4, 1, 1, 10), (8, 2, 3, 12), (32, 1, 2, 10)]
)
async def test_streams_are_the_oracles_whatever_comes_back_and_nothing_is_left(
    seed: int, page_size: int, ranks: int, rows: int, blocks: int
) -> None:
    """Two lives over one disk, with room for a part of it."""
    disk, talk = FakeDisk(), Talk(seed, tenants=("", "a", "b"))
    for life in range(2):
        cluster = Cluster(
            decode=limits(ranks, 640 // page_size, page_size),
            prefill=limits(ranks, 320 // page_size, page_size, rows),
            names=NAMES,
            costs=FAST,
            tiers=room(blocks, 40, max(1, page_size // BLOCK_TOKENS)),
            wire=True,
            seed=10 * seed + life,
        )
        cluster.prefill_mesh.disk = disk
        async with cluster:
            await storm(cluster, talk, requests=60, at_once=4, cancels=0.1)
            await until_quiet(cluster)
            worker, mesh = cluster.prefill, cluster.prefill_mesh
            tier = worker._host
            assert worker.counters["disk_blocks_written"] > 0
            # the first life begins with an empty disk and may never need what it puts there
            assert worker.counters["disk_tokens_restored"] > 0 or not life
            assert worker.counters["disk_errors"] == worker.counters["host_blocks_broken"] == 0
            assert (worker.counters["disk_blocks_found"] > 0) == (life > 0)
            assert not mesh.pulled
            kept = list(tier.blocks._blocks.values())
            assert all(block.written and not block.readers for block in kept)
            assert set(mesh.host) == {one for block in kept for one in block.offer_ids}
            # what lies on disk is what the worker knows of, and nothing else
            saved = worker._disk.blocks._blocks
            assert all(one.written and not one.readers for one in saved.values())
            assert set(saved) == {name for _, name in disk.blocks} and len(saved) <= 40


@pytest.mark.parametrize("word", ["spoiled", "truncated", "gone", "failed"])
async def test_a_block_that_cannot_be_read_is_computed_and_forgotten(word: str) -> None:
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        await known_on_disk(cluster)
        disk.fails[LoadBlock] = word
        assert await again(cluster, 1) == 80
        counters = cluster.prefill.counters
        assert disk.refused == counters["disk_errors"] == 4
        assert counters["disk_blocks_dropped"] == 4
        await until_quiet(cluster)
        assert not disk.blocks and not len(cluster.prefill._disk.blocks)
        del disk.fails[LoadBlock]
        assert await again(cluster, 1) == 16  # of its pages, and written once more
        await until_quiet(cluster)
        assert len(disk.blocks) == 4


async def test_a_block_that_passes_its_digest_and_is_not_what_it_was_is_computed_and_forgotten():
    """Whoever forged it does not know the key of the sums."""
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        await known_on_disk(cluster)
        for key, (pieces, sums) in disk.blocks.items():
            (band, entries), *rest = pieces
            position, token, chain = entries[3]
            forged = (*entries[:3], (position, token, chain ^ 1), *entries[4:])
            disk.blocks[key] = (((band, forged), *rest), sums)
        assert await again(cluster, 1) == 80
        counters = cluster.prefill.counters
        assert counters["host_blocks_broken"] == 4 and counters["disk_tokens_restored"] == 0
        assert counters["disk_blocks_dropped"] == 4
        await until_quiet(cluster)
        assert not disk.blocks


@pytest.mark.parametrize("kind", [FindSaved, SaveBlock, RemoveSaved])
@pytest.mark.parametrize("word", ["full", "read_only", "gone"])
async def test_a_disk_that_fails_costs_no_token(kind: type, word: str) -> None:
    disk = FakeDisk(fails={kind: word})
    async with worker_on(disk, disk_blocks=6) as cluster:
        for number in (1, 1, 2, 2, 3, 3, 1, 2):
            await again(cluster, number)
            await until_quiet(cluster)
        assert disk.refused > 0
        assert cluster.prefill.counters["disk_errors"] == disk.refused
        assert (len(disk.blocks) > 0) == (kind is RemoveSaved)


class Stuck:
    """A mesh whose disk does not answer to commands of a kind before its deadline; then it says
    that it was slow."""

    def __init__(self, mesh: Executor, kind: type) -> None:
        self._mesh, self.kind, self.stuck = mesh, kind, 0
        self.limits, self.card = mesh.limits, mesh.card

    def run(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        if not isinstance(command, self.kind):
            return self._mesh.run(command)  # type: ignore[return-value]
        self.stuck += 1
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(
            command.deadline_seconds,  # type: ignore[attr-defined]
            lambda: future.done() or future.set_result(DiskResult(command.step, "slow")),
        )
        return future

    def close(self) -> None:
        self._mesh.close()


@pytest.mark.parametrize("kind", [FindSaved, SaveBlock, LoadBlock])
async def test_a_disk_that_does_not_answer_holds_nothing_up_for_longer_than_computing(
    kind: type,
) -> None:
    disk, meshes = FakeDisk(), []

    def wrap(name: str, mesh: Executor) -> Executor:
        if name != "prefill0":
            return mesh
        meshes.append(Stuck(mesh, type(None)))
        return meshes[0]

    tiers = room(12, 200, always=False)
    if kind is not FindSaved:
        async with worker_on(disk, tiers=tiers) as cluster:
            await known_on_disk(cluster)
    cluster = host(tiers=tiers, wrap_mesh=wrap)
    cluster.prefill_mesh.disk = disk
    meshes[0].kind = kind
    async with cluster:
        for number in (5, 1, 5, 1):
            began = cluster.clock.now()
            await again(cluster, number)
            assert cluster.clock.now() - began < 5.0  # the disk's deadline is at 10
        assert meshes[0].stuck > 0
        await asyncio.sleep(1000.0)
        counters = cluster.prefill.counters
        assert cluster.prefill._sources.quiet
        assert counters["disk_errors"] + counters["host_restores_late"] > 0
        assert cluster.prefill._loop.failure is None
        await cluster.check_quiet()


async def test_a_reset_empties_the_disk_and_says_so_where_it_cannot() -> None:
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        await known_on_disk(cluster)
        disk.fails[RemoveSaved] = "read_only"
        with pytest.raises(UnavailableError, match="could not be removed .read_only."):
            await cluster.prefill.reset_cache()
        assert await again(cluster, 1) == 80  # not used again all the same
        assert await again(cluster, 1) == 16
        del disk.fails[RemoveSaved]
        disk.blocks.clear()
        await until_quiet(cluster)
        assert await cluster.path.reset_cache() > 0
        assert not disk.blocks and not len(cluster.prefill._disk.blocks)
        assert await again(cluster, 1) == 80
    async with worker_on(disk) as cluster:
        assert cluster.prefill.counters["disk_blocks_found"] == 0


async def test_a_reset_while_blocks_are_written_leaves_none_of_them() -> None:
    disk = FakeDisk()
    async with worker_on(disk) as cluster:
        await again(cluster, 1)
        request: Request = replace(other(1), request_id="second use")
        running = asyncio.ensure_future(cluster.collect(request))
        await until(lambda: cluster.prefill._disk.blocks.writing, 1e-5)
        await cluster.prefill.reset_cache()
        await running
        await until_quiet(cluster)
        assert not disk.blocks and not len(cluster.prefill._disk.blocks)
