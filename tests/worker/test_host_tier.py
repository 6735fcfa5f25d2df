"""Host memory behind the pages of a prefill worker, over fake meshes that check what lies in every
page they read: blocks whose pages were given away come back, streams are those of the oracle, and
what is spoiled on the way is computed again."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.errors import UnavailableError
from jdisagg.messages.step_commands import InsertBlock, PrefillChunk, StepCommand, StepResult
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.host_blocks import MOST_WRITING_OF_DECODE, TierRoom
from tests.fakes.cluster import Cluster
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, SEEDS, Talk, limits, storm
from tests.worker.tiers import BLOCK_BYTES, BLOCK_TOKENS, FAST, computed, host, other


async def test_what_pages_had_no_room_for_comes_back_from_host_memory() -> None:
    async with host(wire=True) as cluster:
        counters = cluster.prefill.counters
        assert await computed(cluster, other(1)) == 80
        assert await computed(cluster, other(2)) == 80  # in the pages of the first
        assert counters["host_blocks_written"] > 0
        assert await computed(cluster, replace(other(1), request_id="again")) == 80 - 64
        assert counters["host_tokens_restored"] > 0
        assert counters["host_blocks_broken"] == 0


@SEEDS
@pytest.mark.parametrize(
    ("page_size", "ranks", "rows", "blocks"), [(4, 1, 1, 40), (8, 2, 3, 12), (32, 1, 2, 30)]
)
async def test_streams_are_the_oracles_whatever_comes_back_and_nothing_is_left(
    seed: int, page_size: int, ranks: int, rows: int, blocks: int
) -> None:
    async with Cluster(
        decode=limits(ranks, 640 // page_size, page_size),
        prefill=limits(ranks, 320 // page_size, page_size, rows),
        names=NAMES,
        costs=FAST,
        tiers=TierRoom(blocks * BLOCK_BYTES * max(1, page_size // BLOCK_TOKENS), always=True),
        wire=True,
        seed=seed,
    ) as cluster:
        talk = Talk(seed, tenants=("", "a", "b"))
        await storm(cluster, talk, requests=60, at_once=4, cancels=0.1)
        worker, mesh = cluster.prefill, cluster.prefill_mesh
        tier = worker._host
        assert worker.counters["host_blocks_written"] > 0
        assert worker.counters["host_tokens_restored"] > 0
        assert worker.counters["host_blocks_broken"] == 0
        assert worker._sources.quiet and not mesh.pulled
        kept = list(tier.blocks._blocks.values())
        assert all(block.written and not block.readers for block in kept)
        assert len(kept) + tier.blocks.free == tier.blocks.capacity == blocks
        # what the mesh holds in host memory is what the worker knows of, and nothing else
        assert set(mesh.host) == {one for block in kept for one in block.offer_ids}


class OneFails:
    """A mesh that fails one insertion when it is told to."""

    def __init__(self, mesh: Executor) -> None:
        self._mesh, self.fails = mesh, False
        self.limits, self.card, self.close = mesh.limits, mesh.card, mesh.close

    def run(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        ran = asyncio.ensure_future(self._mesh.run(command))
        if not (self.fails and isinstance(command, InsertBlock)):
            return ran
        self.fails = False
        failed: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        failed.set_exception(UnavailableError("a program on the mesh failed"))
        return failed


async def test_a_restore_of_which_one_insertion_fails_writes_to_none_of_its_pages_afterwards() -> (
    None
):
    meshes: dict[str, OneFails] = {}

    def wrap(name: str, mesh: Executor) -> Executor:
        meshes[name] = OneFails(mesh)
        return meshes[name]

    slow = Costs(pull=0.1, other=1e-5)
    async with host(prefill=limits(pages=40), costs=slow, wrap_mesh=wrap) as cluster:
        first, second = other(1, tokens=150), other(2, tokens=150)
        assert await computed(cluster, first) == await computed(cluster, second) == 150
        log, counters = cluster.prefill_mesh.log, cluster.prefill.counters
        before, meshes["prefill0"].fails = len(log), True
        again = replace(first, request_id="again")
        assert await computed(cluster, again) > 0
        assert counters["host_restores_failed"] == 1
        kinds = [type(command) for command in log[before:]]
        assert InsertBlock in kinds
        assert InsertBlock not in kinds[kinds.index(PrefillChunk) :]


async def test_a_byte_that_flips_in_host_memory_is_a_miss_and_costs_no_token() -> None:
    async with host() as cluster:
        await computed(cluster, other(1))
        await computed(cluster, other(2))
        for _, entries in cluster.prefill_mesh.host.values():
            position, token, chain = entries[3]
            entries[3] = (position, token, chain ^ 1)
        again = replace(other(1), request_id="again")
        assert await computed(cluster, again) == 80
        counters = cluster.prefill.counters
        assert counters["host_blocks_broken"] > 0 and counters["host_tokens_restored"] == 0


async def test_a_reset_empties_host_memory_too_and_copies_under_way_do_not_come_back() -> None:
    async with host() as cluster:
        await computed(cluster, other(1))
        await computed(cluster, other(2))
        assert len(cluster.prefill._host.blocks) > 0
        assert await cluster.path.reset_cache() > 0
        assert len(cluster.prefill._host.blocks) == 0
        await asyncio.sleep(1.0)
        assert not cluster.prefill_mesh.host
        again = replace(other(1), request_id="again")
        assert await computed(cluster, again) == 80


async def test_what_is_dearer_to_bring_back_than_to_compute_is_computed() -> None:
    """After the first try, which measures it."""
    dear = Costs(pull=5.0, other=1e-5)
    async with host(always=False, costs=dear) as cluster:
        for turn in range(4):
            for number in (1, 2):
                request = replace(other(number), request_id=f"{turn} {number}")
                await cluster.collect(request)
        counters = cluster.prefill.counters
        assert counters["host_blocks_written"] > 0
        # the prompt that tried did not wait for longer than computing takes
        assert counters["host_restores_late"] == 1
        await asyncio.sleep(60.0)
        restored = counters["host_tokens_restored"]
        for turn in range(4, 8):
            for number in (1, 2):
                request = replace(other(number), request_id=f"{turn} {number}")
                await cluster.collect(request)
        assert counters["host_tokens_restored"] == restored


async def test_evicted_blocks_that_no_prompt_asks_for_are_no_longer_copied_until_one_does() -> None:
    async with host(always=False) as cluster:
        counters = cluster.prefill.counters
        for number in range(90):  # 5 evicted blocks each
            await cluster.collect(other(number))
        written = counters["host_blocks_written"]
        assert counters["host_blocks_declined"] > 50
        await cluster.collect(other(90))
        assert counters["host_blocks_written"] == written
        for number in range(86, 90):
            await cluster.collect(replace(other(number), request_id=f"again {number}"))
        assert counters["host_blocks_written"] > written
        restored = counters["host_tokens_restored"]
        await cluster.collect(replace(other(88), request_id="once more"))
        assert counters["host_tokens_restored"] > restored


async def test_of_many_blocks_evicted_at_once_those_at_the_start_of_a_prompt_are_copied() -> None:
    """A block is of use only after all blocks before it."""
    async with host(
        decode=limits(pages=62), prefill=limits(pages=400), decode_tiers=TierRoom(9999, always=True)
    ) as cluster:
        long = other(1, tokens=240)
        await cluster.ask(long)
        await cluster.ask(other(2, tokens=240))
        chain = cluster.decode._kept.chain(long, long.prompt_token_ids)
        assert len(chain) == 15 > MOST_WRITING_OF_DECODE
        assert cluster.decode._host.blocks.match(chain, 0) == MOST_WRITING_OF_DECODE
        assert cluster.decode.counters["host_blocks_skipped"] == 15 - MOST_WRITING_OF_DECODE


async def test_host_memory_for_few_blocks_gets_the_start_of_a_prompt_that_is_evicted_at_once() -> (
    None
):
    room = TierRoom(5 * BLOCK_BYTES, always=True)
    async with host(
        decode=limits(pages=62), prefill=limits(pages=400), decode_tiers=room
    ) as cluster:
        long = other(1, tokens=240)
        await cluster.ask(long)
        await cluster.ask(other(2, tokens=240))
        chain = cluster.decode._kept.chain(long, long.prompt_token_ids)
        assert cluster.decode._host.blocks.capacity == 5 < len(chain)
        assert cluster.decode._host.blocks.match(chain, 0) == 5


async def test_the_start_of_a_prompt_stays_longest_in_host_memory() -> None:
    async with host(blocks=8) as cluster:
        first = other(1)
        await computed(cluster, first)
        await computed(cluster, other(2))
        await computed(cluster, other(3))
        tier = cluster.prefill._host
        chain = cluster.prefill._kept.chain(first, first.prompt_token_ids)
        assert 0 < tier.blocks.match(chain, 0) < len(chain)
