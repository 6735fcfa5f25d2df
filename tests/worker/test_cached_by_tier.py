"""Usage and counters say from where each known token of a prompt came: pages, host memory, disk,
another worker; over fake meshes that check what lies in every page they read. What a prompt's
blocks were is known here from how they came to lie where they do. (`tests/fakes/cluster.py` checks
of all requests that the parts add up to `cached_tokens`.)"""

import asyncio
from dataclasses import replace

from jdisagg.messages.worker_status import KeptTier
from jdisagg.request import AcceptedChild, CachedTokens, Request, Resumption
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster
from tests.fakes.fake_disk import FakeDisk
from tests.worker.conversations import NAMES, asked, limits, prompt
from tests.worker.peering import PROMPT, fleet
from tests.worker.tiers import BLOCK_BYTES, again, host, known_on_disk, other, worker_on


async def cached(cluster: Cluster, request: Request, name: str) -> CachedTokens:
    """Of a request, which is asked under this name; the decode worker knows nothing of it."""
    cluster.decode._state.residency.clear()
    request = replace(request, request_id=name)
    collected = await cluster.ask(request)
    return collected.cached_by_tier


def hits(cluster: Cluster) -> dict[str, int]:
    """Tokens that the prefill worker found, by tier."""
    labelled = cluster.prefill.counters.labelled()
    return {
        dict(labels)["tier"]: count
        for (name, labels), count in labelled.items()
        if name == "prefix_hit_tokens"
    }


async def test_what_was_brought_back_from_host_memory_is_told_apart_from_what_pages_still_had():
    async with host() as cluster:
        assert await cached(cluster, other(1), "fresh") == CachedTokens()
        await cached(cluster, other(2), "takes the pages of the first")
        assert await cached(cluster, other(1), "back") == CachedTokens(host=64)
        # now it is in pages, whoever brought it there
        assert await cached(cluster, other(1), "there") == CachedTokens(pages=64)
        # a prompt of two blocks takes those of the first's end
        await cached(cluster, other(3, tokens=33), "takes two blocks")
        found = await cached(cluster, other(1), "in part")
        assert found.pages > 0 and found.host > 0 and found.total == 64
        assert hits(cluster) == {"pages": 64 + found.pages, "host": 64 + found.host}
        restored = cluster.prefill.counters["host_tokens_restored"]
        assert restored == 64 + found.host


async def test_what_was_read_from_disk_is_told_apart_from_host_memory() -> None:
    async with worker_on(FakeDisk()) as cluster:
        await known_on_disk(cluster)
        assert await cached(cluster, other(1), "read") == CachedTokens(disk=64)
        await again(cluster, 7)
        await again(cluster, 8)
        assert (await cached(cluster, other(1), "in host memory")).host == 64
        assert hits(cluster)["disk"] == cluster.prefill.counters["disk_tokens_restored"] == 64


async def test_what_another_worker_gave_is_a_peers_wherever_it_lay_there() -> None:
    room = TierRoom(64 * BLOCK_BYTES, always=True)
    async with fleet(prefill=limits(pages=20), tiers=room) as both:

        async def at(name: str, request: Request) -> CachedTokens | None:
            both.decode_worker("decode0")._state.residency.clear()
            request = replace(request, request_id=str(both.new_id()))
            collected = await both.ask(request, both.new_path(name))
            return collected.cached_by_tier

        assert await at("prefill0", PROMPT) == CachedTokens()
        assert await at("prefill1", PROMPT) == CachedTokens(peer=64)
        assert await at("prefill1", PROMPT) == CachedTokens(pages=64)
        await both.prefill_worker("prefill1").reset_cache()
        await asyncio.sleep(60)  # for a while it fetches nothing
        await at("prefill0", other(2))  # takes the holder's pages
        assert await at("prefill1", PROMPT) == CachedTokens(peer=64)


async def test_tokens_behind_the_prompt_do_not_count_as_the_prompts() -> None:
    """A stream that is taken up again after 20 tokens finds these, too, as it finds its prompt."""
    async with Cluster(decode=limits(), prefill=limits(), names=NAMES) as cluster:
        request = asked(1, prompt(40), 60)
        said = (await cluster.collect(request)).tokens[0][:20]
        # asked as a prompt: now the prefill worker knows 48 positions of it
        await cluster.collect(asked(2, (*prompt(40), *said)))
        had = Resumption(1, (AcceptedChild(tuple(said)),))
        events = [one async for one in cluster.path.stream(replace(request, resumption=had))]
        assert cluster.prefill.counters["prefix_hit_tokens"] == 32 + 48
        usage = events[-1].usage
        assert usage is not None and usage.cached_by_tier == CachedTokens(pages=40)


async def test_a_status_says_what_lies_in_each_tier() -> None:
    async with worker_on(FakeDisk(), host_blocks=12, disk_blocks=200) as cluster:
        await known_on_disk(cluster)
        worker = cluster.prefill
        pages, memory, disk = (await worker.status()).kept
        assert pages == KeptTier("pages", 5, 5 * BLOCK_BYTES, 5 * BLOCK_BYTES)
        assert memory.tier == "host" and memory.room_bytes == 12 * BLOCK_BYTES
        assert memory.blocks == 12 - worker._host.blocks.free
        assert memory.bytes == memory.blocks * BLOCK_BYTES
        size = BLOCK_BYTES + FILE_EXTRA_BYTES
        assert disk == KeptTier("disk", 4, 4 * size, 200 * size)
        assert [tier.tier for tier in (await cluster.decode.status()).kept] == ["pages"]
    async with Cluster() as nothing_stays:
        assert (await nothing_stays.prefill.status()).kept == ()
