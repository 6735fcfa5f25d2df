"""Prompts that come at once and begin alike, over fake meshes that check what lies in every page
they read: what they have in common is computed once, and whatever becomes of the one that computes
it, the streams of the others are those of the oracle."""

import asyncio
import random
from dataclasses import replace

import msgspec
import pytest

from jdisagg.assembly import LocalAffinity
from jdisagg.config import Mode
from jdisagg.errors import JdisaggError
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.request import Request
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, Collected, Fleet, until
from tests.fakes.fake_executor import Costs, Faults
from tests.worker.calls import prefill_call
from tests.worker.conversations import NAMES, SEEDS, Talk, asked, limits, prompt, storm
from tests.worker.tiers import BLOCK_BYTES, FAST


def computed(cluster: Cluster) -> int:
    """Tokens of the rows of all chunks."""
    chunks = cluster.prefill_mesh.ran(PrefillChunk)
    return sum(len(row.tokens) for one in chunks for row in one.rows)


def one_rank(**more: object) -> Cluster:
    options: dict[str, object] = {"decode": limits(), "prefill": limits(), "names": NAMES}
    return Cluster(**(options | more))  # type: ignore[arg-type]


async def all_of(cluster: Cluster, requests: list[Request]) -> list[int]:
    """Streams all at once; returns of how many tokens each was spared the computing."""
    done = await cluster.collect_all(requests)
    return [one.cached_tokens for one in done if one.usage is not None]


async def test_what_prompts_that_come_at_once_have_in_common_is_computed_once() -> None:
    async with one_rank(wire=True) as cluster:
        same = [asked(number, prompt(100)) for number in range(3)]
        longer = [asked(number, prompt(100, tail=10 * number)) for number in (3, 4)]
        # the last has more in common with the one before it than with the first
        assert await all_of(cluster, [*same, *longer]) == [0, 96, 96, 96, 128]
        assert computed(cluster) == 100 + 4 + 4 + 34 + 12
        assert cluster.prefill.counters["prefix_waits"] == 4
        assert cluster.prefill.counters["prefix_waits_taken_over"] == 0


async def test_a_prompt_shares_a_chunk_with_the_rest_of_the_one_that_it_waited_for() -> None:
    """It goes on when what is common is issued, not when the other is computed."""
    async with one_rank(prefill=limits(rows=2)) as cluster:
        rng = random.Random(1)
        rest = tuple(rng.randrange(89) for _ in range(150))
        requests = [asked(1, prompt(50) + rest), asked(2, prompt(50))]
        assert await all_of(cluster, requests) == [0, 48]
        chunks = cluster.prefill_mesh.ran(PrefillChunk)
        assert {row.sequence for row in chunks[-1].rows} == {1, 2}


@pytest.mark.parametrize("after_chunks", [0, 1, 2])
async def test_where_the_first_is_cancelled_the_next_takes_over_from_where_it_was(
    after_chunks: int,
) -> None:
    async with one_rank() as cluster:
        requests = [asked(number, prompt(100)) for number in range(3)]
        calls = [
            asyncio.ensure_future(
                cluster.prefill.prefill(
                    msgspec.structs.replace(
                        prefill_call(number, 10 + number), request=requests[number]
                    )
                )
            )
            for number in range(3)
        ]
        await asyncio.sleep(0)
        while len(cluster.prefill_mesh.ran(PrefillChunk)) < (after_chunks):
            await asyncio.sleep(1e-4)
        await cluster.prefill.abort(10, "the client has gone")
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(replies[0], JdisaggError)
        issued = computed(cluster)
        # two chunks may be in flight, and nothing of them is lost
        assert issued == 100 + 4
        counters = cluster.prefill.counters
        assert counters["prefix_waits_taken_over"] == 1
        assert counters["prefix_waits"] == 2 + 1, "the third waits for the second then"
        for number in (1, 2):
            await cluster.prefill.abort(10 + number, "enough")


async def test_a_first_whose_destination_does_not_fetch_is_not_waited_for() -> None:
    async with one_rank(prefill=limits(pages=400)) as cluster:
        # fills what may be offered to a destination
        calls = [
            msgspec.structs.replace(
                prefill_call(number, 10 + number),
                request=asked(number, tuple([number] * 3) + prompt(200)),
                destination="silent",
            )
            for number in range(4)
        ]
        silent = [asyncio.ensure_future(cluster.prefill.prefill(call)) for call in calls]
        await asyncio.sleep(0.1)
        assert not all(one.done() for one in silent), "it is stalled"
        held = next(number for number, one in enumerate(silent) if not one.done())
        request = asked(50, calls[held].request.prompt_token_ids + (1, 2))
        await cluster.ask(request)
        assert not silent[held].done()
        for number in range(4):
            await cluster.prefill.abort(10 + number, "enough")
        await asyncio.gather(*silent, return_exceptions=True)


async def test_prompts_behind_one_that_is_restored_wait_for_its_restore() -> None:
    tiers = TierRoom(64 * BLOCK_BYTES, always=True)
    async with one_rank(prefill=limits(pages=48), tiers=tiers, costs=FAST) as cluster:
        await all_of(cluster, [asked(1, prompt(100))])
        await all_of(cluster, [asked(2, (7,) * 180)])  # in the pages of the first
        cluster.decode._state.residency.clear()
        before = cluster.prefill.counters["host_tokens_restored"]
        again = [asked(number, prompt(100)) for number in (3, 4, 5)]
        assert await all_of(cluster, again) == [96, 96, 96]
        assert cluster.prefill.counters["host_tokens_restored"] - before <= 96


@SEEDS
@pytest.mark.parametrize(("ranks", "pages"), [(1, 160), (2, 80)])
async def test_whoever_is_cancelled_streams_are_the_oracles(
    seed: int, ranks: int, pages: int
) -> None:
    async with Cluster(
        decode=limits(2, 160),
        prefill=limits(ranks, pages, rows=2),
        names=NAMES,
        costs=Costs(prefill_token=5e-3),
        wire=True,
        seed=seed,
    ) as cluster:
        await storm(cluster, Talk(seed), requests=60, at_once=8, cancels=0.3)
        counters = cluster.prefill.counters
        assert counters["prefix_waits"] > counters["prefix_waits_taken_over"]
        assert not len(cluster.prefill._prompts) and not len(cluster.prefill._prompts._shared)


async def test_where_the_mesh_fails_all_that_wait_fail() -> None:
    broken = Faults(breaks_at=lambda one: isinstance(one, PrefillChunk))
    async with one_rank(prefill_faults=broken, ends_quiet=False) as cluster:
        requests = [
            replace(asked(number, prompt(100)), deadline_seconds=5.0) for number in range(3)
        ]
        ended = await asyncio.gather(
            *(cluster.collect(request, into=Collected()) for request in requests),
            return_exceptions=True,
        )
        assert all(isinstance(one, JdisaggError) for one in ended)
        assert not len(cluster.prefill._prompts) and not len(cluster.prefill._prompts._shared)


MIXED = [Mode.CHUNKED, Mode.UNIFIED]


@pytest.mark.parametrize("mode", MIXED)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_on_one_mesh_what_is_common_is_computed_once_and_taken_over_too(
    mode: Mode, cancelled: bool
) -> None:
    async with Cluster(
        mode, decode=limits(pages=400), names=NAMES, wire=True, costs=Costs(prefill_token=1e-3)
    ) as cluster:
        requests = [asked(number, prompt(100, tail=number)) for number in range(4)]
        running = [asyncio.ensure_future(cluster.collect(one)) for one in requests]
        if cancelled:
            await until(lambda: cluster.decode_mesh.ran(PrefillChunk), 1e-4)
            running[0].cancel()
        done = await asyncio.gather(*running, return_exceptions=True)
        for request, one in zip(requests[cancelled:], done[cancelled:], strict=True):
            assert isinstance(one, Collected)
            cluster.check(request, one)
        chunks = cluster.decode_mesh.ran(PrefillChunk)
        computed = sum(len(row.tokens) for one in chunks for row in one.rows)
        # the first, and of each other one what is behind six blocks
        assert computed <= 100 + (5 + 6 + 7)
        counters = cluster.decode.counters
        assert counters["prefix_waits"] >= 3
        assert (counters["prefix_waits_taken_over"] == 1) == cancelled
        assert not len(cluster.decode._prompts) and not len(cluster.decode._prompts._shared)


@pytest.mark.parametrize("mode", MIXED)
@SEEDS
async def test_on_one_mesh_whoever_is_cancelled_streams_are_the_oracles(
    mode: Mode, seed: int
) -> None:
    async with Cluster(
        mode,
        decode=limits(2, 100, rows=2),
        names=NAMES,
        costs=Costs(prefill_token=5e-3),
        growth_tokens=4,
        seed=seed,
    ) as cluster:
        await storm(cluster, Talk(seed), requests=60, at_once=8, cancels=0.3)
        counters = cluster.decode.counters
        assert counters["prefix_waits"] > counters["prefix_waits_taken_over"]
        assert not len(cluster.decode._prompts) and not len(cluster.decode._prompts._shared)


async def test_a_decode_worker_offers_what_it_received_before_the_sequence_ends() -> None:
    async with one_rank(decode=limits(pages=400)) as cluster:
        long = asked(1, prompt(100), 100)
        running = asyncio.ensure_future(cluster.collect(long))
        await until(lambda: any(cluster.decode._state.running))
        received = cluster.decode.counters["kv_bytes_received"]
        again = asked(2, prompt(96))
        await cluster.ask(again)
        assert not running.done()
        assert cluster.decode.counters["prefix_hit_tokens"] == 96
        assert cluster.decode.counters["kv_bytes_received"] == received
        cluster.check(long, await running)


@pytest.mark.parametrize("indexed", [True, False])
async def test_the_router_sends_prompts_that_come_at_once_to_one_worker(indexed: bool) -> None:
    """No worker has reported anything when the second is placed."""
    async with Fleet(
        2, 1, decode=limits(), prefill=limits(), names=NAMES, wire=True, mortal=False
    ) as fleet:
        workers = [process.worker for process in fleet.processes.values()]
        affinity = LocalAffinity(workers, NAMES.secret) if indexed else None
        fleet._settings = replace(fleet._settings, affinity=affinity)
        path = fleet.new_path()
        requests = [asked(number, prompt(100)) for number in range(2)]
        done = await asyncio.gather(*(fleet.collect(one, path) for one in requests))
        for request, one in zip(requests, done, strict=True):
            fleet.check(request, one)
        tokens = {
            name: sum(
                len(row.tokens)
                for one in fleet.processes[name].mesh.ran(PrefillChunk)
                for row in one.rows
            )
            for name in ("prefill0", "prefill1")
        }
        assert sorted(tokens.values()) == ([0, 104] if indexed else [100, 100])
        assert not len(path.placer.coming) or indexed
