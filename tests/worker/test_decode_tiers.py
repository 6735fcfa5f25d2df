"""Host memory, disk and other workers behind the pages of a worker that decodes, over fake meshes
that check what lies in every page they read: what its sequences left comes back for later prompts,
streams are those of the oracle, and what is spoiled on the way is a counted miss."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from jdisagg.config import Mode, RoutingConfig
from jdisagg.messages.ports import Child, ReserveCall
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.request import CachedTokens, Request
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, Fleet, until
from tests.fakes.fake_disk import FakeDisk
from tests.fakes.fake_executor import Costs, Faults
from tests.router.fleets import H100
from tests.worker.appends import SLOW, appending
from tests.worker.conversations import NAMES, SEEDS, Talk, asked, converse, limits, storm
from tests.worker.peering import EveryoneKnown, settled
from tests.worker.preempting import hits
from tests.worker.tiers import BLOCK_BYTES, FAST, other

PAGES = 24  # room for one prompt of `other`, its answer and a little
MODES = [Mode.CHUNKED, Mode.DISAGGREGATED]


def room(host_blocks: int = 64, disk_blocks: int = 0, always: bool = True) -> TierRoom:
    return TierRoom(
        host_blocks * BLOCK_BYTES, disk_blocks * (BLOCK_BYTES + FILE_EXTRA_BYTES), always
    )


def tiers(mode: Mode = Mode.CHUNKED, **more: object) -> Cluster:
    """Few pages at the worker that decodes; the prefill worker keeps nothing that counts."""
    options: dict[str, object] = {
        "decode": limits(pages=PAGES),
        "prefill": limits(pages=400),
        "names": NAMES,
        "costs": FAST,
        "decode_tiers": room(),
    }
    return Cluster(mode, **(options | more))  # type: ignore[arg-type]


async def turn(cluster: Cluster, number: int, name: str) -> CachedTokens:
    """Asks for a prompt under this name. Returns what was known of it at the decode worker, by
    origin."""
    request = replace(other(number), request_id=name)
    before = hits(cluster)
    await cluster.ask(request)
    return CachedTokens(
        **{tier: count - before.get(tier, 0) for tier, count in hits(cluster).items()}
    )


@pytest.mark.parametrize(("mode", "known"), [(Mode.CHUNKED, 64), (Mode.DISAGGREGATED, 80)])
async def test_what_pages_had_no_room_for_comes_back_and_is_neither_computed_nor_sent(
    mode: Mode, known: int
) -> None:
    async with tiers(mode, wire=True) as cluster:
        assert await turn(cluster, 1, "first") == CachedTokens()
        assert await turn(cluster, 2, "takes its pages") == CachedTokens()
        counters = cluster.decode.counters
        assert counters["host_blocks_written"] > 0
        sent = counters["kv_bytes_received"]
        # of the last block one token is computed here
        assert await turn(cluster, 1, "again") == CachedTokens(host=known)
        assert counters["host_tokens_restored"] == known
        assert counters["kv_bytes_received"] == sent
        assert counters["host_blocks_broken"] == 0
        await accounted(cluster)


async def accounted(cluster: Cluster) -> None:
    """All pages are free or kept, and host memory holds what the worker counts and nothing else."""
    await until(lambda: cluster.decode._sources.quiet, 0.1)
    await cluster.check_quiet()
    tier = cluster.decode._host
    kept = list(tier.blocks._blocks.values())
    assert all(block.written and not block.readers for block in kept)
    assert set(cluster.decode_mesh.host) == {one for block in kept for one in block.offer_ids}
    (host,) = [one for one in (await cluster.decode.status()).kept if one.tier == "host"]
    assert host.bytes == len(kept) * tier.blocks.block_bytes <= host.room_bytes
    assert not len(cluster.decode._sources._owned)


@pytest.mark.parametrize("mode", MODES)
async def test_a_byte_that_flips_in_host_memory_is_a_counted_miss(mode: Mode) -> None:
    async with tiers(mode) as cluster:
        await turn(cluster, 1, "first")
        await turn(cluster, 2, "takes its pages")
        for _, entries in cluster.decode_mesh.host.values():
            position, token, chain = entries[3]
            entries[3] = (position, token, chain ^ 1)
        assert await turn(cluster, 1, "again") == CachedTokens()
        counters = cluster.decode.counters
        assert counters["host_blocks_broken"] > 0 and counters["host_tokens_restored"] == 0
        await accounted(cluster)


@pytest.mark.parametrize("mode", MODES)
async def test_a_reset_empties_the_tiers_of_a_worker_that_decodes(mode: Mode) -> None:
    async with tiers(mode) as cluster:
        await turn(cluster, 1, "first")
        await turn(cluster, 2, "takes its pages")
        assert await cluster.path.reset_cache() > 0
        await asyncio.sleep(1.0)
        assert not cluster.decode_mesh.host
        assert await turn(cluster, 1, "again") == CachedTokens()


@asynccontextmanager
async def on_disk(disk: FakeDisk, mode: Mode) -> AsyncIterator[Cluster]:
    cluster = tiers(mode, decode_tiers=room(8, 200))
    cluster.decode_mesh.disk = disk
    async with cluster:
        yield cluster


@pytest.mark.parametrize(("mode", "known"), [(Mode.CHUNKED, 64), (Mode.DISAGGREGATED, 80)])
@pytest.mark.parametrize("spoiled", [False, True])
async def test_what_was_used_twice_comes_back_from_disk_in_the_next_life_too(
    mode: Mode, known: int, spoiled: bool
) -> None:
    disk = FakeDisk()
    async with on_disk(disk, mode) as cluster:
        for name in ("first", "second", "third"):
            await turn(cluster, 1, name)
        await until(lambda: cluster.decode._sources.quiet, 0.1)
        assert cluster.decode.counters["disk_blocks_written"] == known // 16
        assert await turn(cluster, 1, "in pages") == CachedTokens(pages=known)
    if spoiled:
        for key, (pieces, sums) in list(disk.blocks.items()):
            (band, ((position, token, chain), *entries)), *others = pieces
            flipped = (band, ((position, token, chain ^ 1), *entries))
            disk.blocks[key] = ((flipped, *others), sums)
    async with on_disk(disk, mode) as cluster:
        assert cluster.decode.counters["disk_blocks_found"] == known // 16
        found = await turn(cluster, 1, "again")
        assert found == (CachedTokens() if spoiled else CachedTokens(disk=known))
        assert (cluster.decode.counters["host_blocks_broken"] > 0) == spoiled


@SEEDS
@pytest.mark.parametrize(
    ("mode", "page_size", "ranks", "blocks"),
    [
        (Mode.DISAGGREGATED, 4, 1, 40),
        (Mode.DISAGGREGATED, 8, 2, 12),
        (Mode.CHUNKED, 4, 1, 24),
        (Mode.UNIFIED, 8, 2, 40),
    ],
)
async def test_streams_are_the_oracles_whatever_comes_back_and_all_is_accounted_for(
    seed: int, mode: Mode, page_size: int, ranks: int, blocks: int
) -> None:
    """Few pages, so that blocks are evicted and sequences preempted."""
    async with tiers(
        mode,
        decode=limits(ranks, 320 // page_size, page_size),
        prefill=limits(),
        decode_tiers=room(blocks),
        growth_tokens=4,
        wire=True,
        seed=seed,
    ) as cluster:
        await storm(cluster, Talk(seed, tenants=("", "a")), 60, at_once=6, cancels=0.1)
        counters = cluster.decode.counters
        assert counters["host_tokens_restored"] > 0
        assert counters["host_blocks_broken"] == 0
        await accounted(cluster)


async def test_what_is_dearer_to_restore_than_to_receive_is_received() -> None:
    """The price of receiving is the part that does not overlap with the prefill."""
    dear = Costs(pull=5.0, other=1e-5)
    async with tiers(Mode.DISAGGREGATED, decode_tiers=room(always=False), costs=FAST) as cluster:
        for name in "abc":
            await turn(cluster, 1, f"1 {name}")
            await turn(cluster, 2, f"2 {name}")
        counters = cluster.decode.counters
        assert counters["host_blocks_written"] > 0
        cluster.decode_mesh._costs = dear
        await turn(cluster, 1, "measures")
        restored = counters["host_tokens_restored"]
        await asyncio.sleep(60.0)
        for name in "defg":
            await turn(cluster, 1, f"1 {name}")
            await turn(cluster, 2, f"2 {name}")
        assert counters["host_tokens_restored"] == restored


async def test_a_prompt_is_appended_behind_what_came_back() -> None:
    """Without the tier the prefill worker would compute it, for its uncached rest is too long."""
    async with Cluster(
        appends=(SLOW, H100),
        decode=appending(pages=40),
        prefill=limits(pages=400),
        names=NAMES,
        costs=FAST,
        decode_tiers=room(),
    ) as cluster:
        first = other(1)
        history = first.prompt_token_ids + tuple((await cluster.collect(first)).tokens[0])
        cluster.prefill._kept.clear()
        filler = other(2, 147)
        await cluster.ask(filler)
        kept = cluster.decode._kept
        assert kept.match(0, kept.chain(first, history)) == 0, "nothing is left in pages"
        chunks = len([1 for one in cluster.prefill_mesh.ran(PrefillChunk)])
        following = asked(3, (*history, 1, 2, 3))
        collected = await cluster.ask(following)
        assert collected.cached_by_tier == CachedTokens(host=80)
        assert cluster.decode.counters["prompts_appended"] == 1
        now = len([1 for one in cluster.prefill_mesh.ran(PrefillChunk)])
        assert now == chunks


async def test_a_request_that_is_given_up_while_it_waits_for_a_restore_leaves_nothing() -> None:
    async with tiers(costs=Costs(pull=0.5, other=1e-5)) as cluster:
        await turn(cluster, 1, "first")
        await turn(cluster, 2, "takes its pages")
        waiting = asyncio.ensure_future(cluster.collect(replace(other(1), request_id="gone")))
        await until(lambda: len(cluster.decode._sources._owned))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(5.0)
        await accounted(cluster)
        assert await turn(cluster, 1, "again") == CachedTokens(host=64)


async def test_a_reservation_that_ends_during_its_restore_is_kept_no_longer_than_a_lease() -> None:
    async with tiers(costs=Costs(pull=0.5, other=1e-5)) as cluster:
        await turn(cluster, 1, "first")
        await turn(cluster, 2, "takes its pages")
        worker = cluster.decode
        gone = replace(other(1), request_id="gone")
        call = ReserveCall(gone, 1, (Child(0),), 1000.0, computes=True)
        reserving = asyncio.ensure_future(worker.reserve(call))
        await until(lambda: len(worker._sources._owned))
        (group,) = worker._state.groups.values()
        worker._end(group, preempted=True)
        reservation = await reserving
        assert reservation.reservation_id == group.key and reservation.lease_seconds < 10.0
        await asyncio.sleep(10.0)  # nobody takes it
        assert worker.at_rest()
        await accounted(cluster)


def mixed(**more: object) -> Fleet:
    """Workers that compute prompts and decode, of which each is told what the others keep."""
    options: dict[str, object] = {
        "prefills": 0,
        "decodes": 2,
        "mode": Mode.CHUNKED,
        "decode": limits(pages=100),
        "names": NAMES,
        "costs": FAST,
        "decode_tiers": TierRoom(always=True),
        "hints": True,
        "hinted": "d",
    }
    return Fleet(**(options | more))  # type: ignore[arg-type]


async def at(fleet: Fleet, name: str, request: Request) -> CachedTokens:
    """What was known of a prompt at this worker."""
    again = replace(request, request_id=str(fleet.new_id()))
    collected = await fleet.ask(again, fleet.new_path(decode=name))
    return collected.cached_by_tier


async def test_a_mixed_worker_fetches_what_another_keeps_in_pages_or_host_memory() -> None:
    async with mixed(wire=True, decode_tiers=room()) as both:
        assert await at(both, "decode0", other(1)) == CachedTokens()
        assert await at(both, "decode1", other(1)) == CachedTokens(peer=64)
        for number in range(2, 8):
            await at(both, "decode0", other(number))
        holder = both.decode_worker("decode0")
        chain = holder._kept.chain(other(2), other(2).prompt_token_ids)
        assert not holder._kept.match(0, chain), "it is in host memory alone"
        assert await at(both, "decode1", other(2)) == CachedTokens(peer=64)
        assert holder.counters["host_tokens_restored"] >= 64
        assert both.decode_worker("decode1").counters["peer_fetch_failed"] == 0


@SEEDS
async def test_streams_of_mixed_workers_are_the_oracles_whatever_becomes_of_a_fetch(
    seed: int,
) -> None:
    rng = random.Random(seed)
    faults = {
        f"decode{number}": Faults(
            pull_error=lambda _: rng.choice([""] * 37 + ["garble", "no route", "stall"])
        )
        for number in range(2)
    }
    async with mixed(
        decode=limits(2, 80, 8),
        decode_tiers=room(12),
        faults=faults.__getitem__,
        growth_tokens=4,
        wire=True,
        seed=seed,
    ) as both:
        talk = Talk(seed, tenants=("", "a"))
        await converse(both, talk, 40, cancels=0.1)
        assert both.counted("peer_tokens_restored") > 0
        assert both.counted("peer_fetch_failed") > 0
        await both.kill("decode0")
        await both.start("decode0")
        await converse(both, talk, 15, cancels=0.1)
        await settled(both)


@pytest.mark.parametrize("fetches", [True, False])
async def test_the_router_names_a_mixed_worker_that_keeps_more_than_the_one_it_chose(
    fetches: bool,
) -> None:
    index = EveryoneKnown()
    routing = RoutingConfig(peer_fetch=fetches, fetch_from_decode=True)
    async with mixed(hints=False, affinity=index, routing=routing, decodes=3) as fleet:
        index.fleet = fleet
        await converse(fleet, Talk(4), 40, cancels=0.1)
        assert (fleet.counted("peer_blocks_fetched") > 0) == fetches
        await settled(fleet)
