"""Sequences that are preempted, over fake meshes that check what lies in every page they read: they
find their blocks in the cache again, streams are those of the oracle, and what is not there any
more, or not as it was, is computed anew."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import DeadlineExceededError
from jdisagg.messages.step_commands import ExtractBlock
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_executor import Costs
from tests.router.fleets import H100
from tests.worker.appends import SLOW, appending
from tests.worker.conversations import NAMES, SEEDS, Talk, limits, storm
from tests.worker.peering import fleet, settled
from tests.worker.preempting import ROOMY, check_empty, flip_all, forget_tails, hits, long, scarce
from tests.worker.tiers import FAST


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_preempted_sequence_finds_its_blocks_in_pages_and_host_memory(mode: Mode) -> None:
    async with scarce(mode=mode) as cluster:
        await cluster.collect_all([long(1), long(2)])
        again = cluster.path.counters["preemptions"]
        assert again == cluster.decode._state.preemptions > 0
        assert sum(hits(cluster).values()) >= 32 * again
        assert hits(cluster)["host"] > 0
        await check_empty(cluster)


@pytest.mark.parametrize("without", [{"names": None}, {"decode_tiers": TierRoom()}])
async def test_without_host_memory_or_cache_more_is_computed_again(
    without: dict[str, object],
) -> None:
    async with scarce(**without) as cluster:
        await cluster.collect_all([long(1), long(2)])
        assert cluster.path.counters["preemptions"] > 0
        assert not cluster.decode_mesh.ran(ExtractBlock)
        await check_empty(cluster)


async def test_blocks_of_a_preempted_sequence_are_copied_though_nobody_asks_for_others() -> None:
    async with scarce(replace(ROOMY, always=False), pages=60) as cluster:
        for number in range(10, 60):
            await cluster.ask(long(number, max_tokens=1))
        cluster.decode._host.blocks.asked._share = 0.0
        declined = cluster.decode.counters["host_blocks_declined"]
        written = cluster.decode.counters["host_blocks_written"]
        await cluster.collect_all([long(number) for number in (1, 2, 3, 4)])
        counters = cluster.decode.counters
        assert cluster.path.counters["preemptions"] > 0
        assert counters["host_blocks_written"] > written
        assert counters["host_blocks_declined"] > declined, "others' blocks"
        await check_empty(cluster)


async def test_a_decode_worker_computes_the_rest_itself_where_it_may() -> None:
    async with Cluster(
        appends=(SLOW, H100),
        decode=appending(pages=24),
        prefill=limits(pages=400),
        names=NAMES,
        growth_tokens=4,
        costs=FAST,
        decode_tiers=ROOMY,
    ) as cluster:
        forget_tails(cluster.decode)
        await cluster.collect_all([long(1), long(2)])
        again = cluster.path.counters["preemptions"]
        assert 0 < again == cluster.decode.counters["prompts_appended"]
        await check_empty(cluster)


async def test_a_prefill_worker_fetches_a_preempted_sequence_from_the_worker_that_had_it() -> None:
    async with fleet(
        prefills=1,
        decode=limits(pages=24),
        prefill=limits(pages=400),
        growth_tokens=4,
        decode_tiers=ROOMY,
    ) as cluster:
        forget_tails(cluster.decode_worker("decode0"))
        running = [asyncio.ensure_future(cluster.ask(long(number))) for number in (1, 2)]
        await until(lambda: cluster.path.counters["preemptions"] > 0)
        decode, prefill = cluster.decode_worker("decode0"), cluster.prefill_worker("prefill0")
        prefill._kept.clear()
        for one in running:
            await one
        assert decode.counters["host_tokens_restored"] > 0
        assert prefill.counters["peer_tokens_restored"] >= 32, "of 40 and a few"
        await settled(cluster)


@SEEDS
@pytest.mark.parametrize(
    ("mode", "page_size", "ranks", "names"),
    [
        (Mode.DISAGGREGATED, 4, 1, None),
        (Mode.DISAGGREGATED, 8, 2, NAMES),
        (Mode.DISAGGREGATED, 4, 2, replace(NAMES, grid_tokens=32)),
        (Mode.CHUNKED, 4, 1, NAMES),
        (Mode.UNIFIED, 4, 2, None),
    ],
)
async def test_streams_are_the_oracles_whoever_is_preempted_and_nothing_is_left(
    seed: int, mode: Mode, page_size: int, ranks: int, names: BlockNames | None
) -> None:
    """Conversations with n > 1, seeds, penalties, stops and cancels, in pages for a few of them."""
    async with scarce(
        mode=mode, decode=limits(ranks, 320 // page_size, page_size), names=names, seed=seed
    ) as cluster:
        await storm(cluster, Talk(seed), requests=90, at_once=10, cancels=0.15)
        assert cluster.path.counters["preemptions"] > 0
        assert (sum(hits(cluster).values()) > 0) is (names is not None)
        assert cluster.decode.counters["host_blocks_broken"] == 0
        await check_empty(cluster)


async def test_a_byte_that_flips_in_host_memory_is_a_miss_and_costs_no_token() -> None:
    async with scarce() as cluster:
        running = asyncio.ensure_future(cluster.collect_all([long(1), long(2)]))
        await until(lambda: cluster.decode.counters["host_blocks_written"])
        assert flip_all(cluster.decode_mesh) > 0
        await running
        assert cluster.decode.counters["host_blocks_broken"] > 0
        await check_empty(cluster)


async def test_a_request_whose_deadline_passes_while_it_has_no_pages_leaves_nothing() -> None:
    async with scarce(costs=Costs(decode_step=0.1, pull=1e-5, other=1e-5)) as cluster:
        late = replace(long(2), deadline_seconds=2.5)
        first = asyncio.ensure_future(cluster.ask(long(1)))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceededError):
            await cluster.collect(late)
        assert cluster.path.counters["preemptions"] == 1
        await first
        await check_empty(cluster)


async def test_one_that_is_cancelled_on_its_way_back_writes_to_nobodys_pages() -> None:
    """The mesh asserts what lies in every page that the others read."""
    async with scarce(costs=Costs(pull=0.1, other=1e-5)) as cluster:
        waiting = [asyncio.ensure_future(cluster.collect(long(one))) for one in (1, 2)]
        await until(lambda: len(cluster.decode._sources._owned))
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await cluster.collect_all([long(number) for number in range(3, 6)])
        await asyncio.sleep(1.0)
        await check_empty(cluster)


@SEEDS
async def test_random_room_and_random_flips_cost_no_token(seed: int) -> None:
    rng = random.Random(seed)
    async with scarce(
        TierRoom(rng.choice((200, 500, 2000)) * 16, always=True), decode=limits(2, 64, 4), seed=seed
    ) as cluster:
        flipped = 0

        async def spoil() -> None:
            nonlocal flipped
            while True:
                await asyncio.sleep(rng.random() / 4)
                flipped += flip_all(cluster.decode_mesh)

        spoiling = asyncio.ensure_future(spoil())
        await storm(cluster, Talk(seed), requests=80, at_once=10, cancels=0.1)
        spoiling.cancel()
        counters = cluster.decode.counters
        assert flipped > 0 and counters["host_blocks_broken"] > 0
        assert counters["host_blocks_restored"] > 0
        await check_empty(cluster)
