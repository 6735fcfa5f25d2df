"""Preempted sequences in host memory, over fake meshes that check what lies in every page they
read: what comes back goes on from where it was, streams are those of the oracle, and what does not
come back as it was is computed anew."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import LimitsConfig, Mode
from jdisagg.errors import DeadlineExceededError
from jdisagg.messages.step_commands import ExtractBlock
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from jdisagg.settings.timeouts import HandoffTimeouts, Timeouts
from tests.fakes.cluster import until
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, SEEDS, Talk, limits, storm
from tests.worker.spilling import ROOMY, TOKEN_BYTES, all_of, check_empty, flip_all, long, scarce


async def test_a_preempted_sequence_comes_back_from_host_memory_and_is_not_prefilled_again():
    async with scarce() as cluster:
        await all_of(cluster, long(1), long(2))
        decode, again = cluster.decode, cluster.path.counters["preemptions"]
        assert decode.counters["sequences_spilled"] > 0
        assert decode.counters["spills_restored"] == decode.counters["sequences_spilled"]
        assert decode._state.preemptions == decode.counters["sequences_spilled"]
        assert again == 0  # the request path made no other attempt
        assert cluster.path.counters["sequences_set_aside"] == decode._state.preemptions
        await check_empty(cluster)


async def test_without_host_memory_the_same_is_prefilled_again() -> None:
    async with scarce(TierRoom()) as cluster:
        await all_of(cluster, long(1), long(2))
        assert cluster.path.counters["preemptions"] > 0
        assert not cluster.decode_mesh.ran(ExtractBlock)
        assert cluster.decode.counters["spills_declined"] == 0


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
async def test_streams_are_the_oracles_whoever_is_set_aside_and_nothing_is_left(
    seed: int, mode: Mode, page_size: int, ranks: int, names: BlockNames | None
) -> None:
    """Conversations with n > 1, seeds, penalties, stops and cancels, in pages for a few of them."""
    async with scarce(
        mode=mode, decode=limits(ranks, 320 // page_size, page_size), names=names, seed=seed
    ) as cluster:
        await storm(cluster, Talk(seed), requests=90, at_once=10, cancels=0.15)
        counters = cluster.decode.counters
        assert counters["sequences_spilled"] > 0 and counters["spills_restored"] > 0
        assert counters["spills_missed"] == 0
        await check_empty(cluster)


async def test_a_byte_that_flips_in_host_memory_is_a_miss_and_costs_no_token() -> None:
    async with scarce() as cluster:
        running = asyncio.ensure_future(all_of(cluster, long(1), long(2)))
        await until(lambda: cluster.decode.counters["sequences_spilled"])
        assert flip_all(cluster.decode_mesh) > 0
        await running
        assert cluster.decode.counters["spills_missed"] == 1
        assert cluster.path.counters["preemptions"] == 1  # it was computed anew
        await check_empty(cluster)


async def test_a_sequence_that_finds_no_pages_for_long_goes_on_elsewhere() -> None:
    soon = HandoffTimeouts(spilled_seconds=0.05, heartbeat_seconds=0.04)
    waits = LimitsConfig(timeouts=Timeouts(handoff=soon))
    async with scarce(limits=waits) as cluster:
        await all_of(cluster, long(1, max_tokens=50), long(2, max_tokens=50))
        counters = cluster.decode.counters
        assert counters["spills_missed"] > 0
        assert cluster.path.counters["preemptions"] == counters["spills_missed"]
        assert cluster.decode._state.preemptions == counters["sequences_spilled"]
        await check_empty(cluster)


async def test_a_request_whose_deadline_passes_while_it_is_set_aside_leaves_nothing() -> None:
    async with scarce(costs=Costs(decode_step=0.1, pull=1e-5, other=1e-5)) as cluster:
        late = replace(long(2), deadline_seconds=2.5)
        first = asyncio.ensure_future(all_of(cluster, long(1)))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceededError):
            await cluster.collect(late)
        assert cluster.decode.counters["sequences_spilled"] == 1
        await first
        assert cluster.decode.counters["spills_restored"] == 0
        await check_empty(cluster)


async def test_one_that_is_cancelled_on_its_way_back_writes_to_nobodys_pages() -> None:
    """The mesh asserts what lies in every page that the others read."""
    async with scarce(costs=Costs(pull=0.1, other=1e-5)) as cluster:
        waiting = [asyncio.ensure_future(cluster.collect(long(one))) for one in (1, 2)]
        spilled = cluster.decode._spilled
        await until(lambda: spilled.spills.returning())
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert cluster.decode.counters["spills_restored"] == 0
        await all_of(cluster, *(long(number) for number in range(3, 6)))
        await asyncio.sleep(1.0)
        await check_empty(cluster)


async def test_a_status_says_who_waits_and_what_lies_in_host_memory() -> None:
    async with scarce() as cluster:
        running = asyncio.ensure_future(all_of(cluster, long(1), long(2)))
        await until(lambda: cluster.decode.counters["sequences_spilled"])
        status = await cluster.decode.status()
        (tier,) = status.kept
        (spill,) = cluster.decode._spilled.spills
        assert (tier.tier, tier.room_bytes) == ("host", ROOMY.host_bytes)
        assert tier.bytes == spill.bytes >= spill.tokens * TOKEN_BYTES
        assert tier.blocks == len(cluster.decode_mesh.host)
        assert (status.running, status.waiting) == (1, 1)
        await running


@SEEDS
async def test_random_room_and_random_flips_cost_no_token(seed: int) -> None:
    rng = random.Random(seed)
    async with scarce(
        TierRoom(rng.choice((200, 500, 2000)) * TOKEN_BYTES, always=True),
        decode=limits(2, 64, 4),
        names=NAMES,
        seed=seed,
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
        assert flipped > 0 and counters["spills_missed"] > 0
        assert counters["spills_restored"] > 0
        await check_empty(cluster)
