"""KV that stays, as metrics and traces show it: against what clients were told, the workers' own
counters, and what lies in the fake meshes."""

import asyncio
from dataclasses import replace
from pathlib import Path

from jdisagg.request import CachedTokens
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from tests.fakes.fake_disk import FakeDisk
from tests.fakes.virtual_time import run_virtually
from tests.observe.kept import keeping
from tests.observe.observed import ObservedCluster
from tests.observe.samples import Samples, at, parse
from tests.observe.spans import trace_of
from tests.worker.tiers import BLOCK_BYTES, PIECES, other


async def served() -> tuple[Samples, list[CachedTokens], ObservedCluster, dict]:
    """Prompts 1 to 6 in pages for one of them, each twice in a row, then the first again; samples,
    what usage said, the cluster, and the root of the last one's trace."""
    async with keeping() as cluster:
        cluster.prefill_mesh.disk = FakeDisk()
        for source in cluster.prefill._sources:
            await source.start()
        told: list[CachedTokens] = []
        for place, number in enumerate([1, 1, 2, 3, 3, 2, 4, 5, 6, 1]):
            request = replace(other(number), request_id=f"r{place}")
            usage = (await cluster.collect(request)).usage
            assert usage is not None and usage.cached_by_tier is not None
            told.append(usage.cached_by_tier)
            while not cluster.prefill._sources.quiet:
                await asyncio.sleep(0.1)
        samples = parse(await cluster.observer.metrics.scrape())
        events = trace_of(cluster.observer, request.request_id)
        (root,) = [event["args"] for event in events if event["name"] == "request"]
        return samples, told, cluster, root


def test_tokens_by_tier_are_those_that_clients_were_told() -> None:
    samples, told, _, root = run_virtually(served)
    whole = sum(told, CachedTokens())
    assert whole.pages and whole.host and whole.disk and not whole.peer
    for tier, tokens in whole.by_tier().items():
        if tokens:
            assert at(samples, "cached_tokens_total", tier=tier) == tokens
            found = at(samples, "prefix_hit_tokens_total", owner="prefill0", tier=tier)
            assert found == tokens
    parts = {f"cached_{tier}": tokens for tier, tokens in told[-1].by_tier().items() if tokens}
    assert told[-1].disk and parts.items() <= root.items()
    assert root["cached_tokens"] == told[-1].total


def test_blocks_and_bytes_of_each_tier_are_those_that_lie_there() -> None:
    samples, _, cluster, _ = run_virtually(served)
    mesh = cluster.prefill_mesh
    sizes = {
        "pages": (cluster.prefill._kept.blocks, BLOCK_BYTES, 5),
        "host": (len(mesh.host) // PIECES, BLOCK_BYTES, 12),
        "disk": (len(mesh.disk.blocks), BLOCK_BYTES + FILE_EXTRA_BYTES, 50),
    }
    for name, (blocks, size, room) in sizes.items():
        labels = {"worker": "prefill0", "role": "prefill", "tier": name}
        assert blocks > 0
        assert at(samples, "kept_blocks", **labels) == blocks
        assert at(samples, "kept_bytes", **labels) == blocks * size
        assert at(samples, "kept_room_bytes", **labels) == room * size


def test_bytes_and_moves_of_each_tier_are_those_of_the_blocks_that_went_and_came(
    tmp_path: Path,
) -> None:
    samples, _, cluster, _ = run_virtually(served)
    counters = cluster.prefill.counters
    read = counters["disk_blocks_read"]  # into host memory, and from there into pages
    files, pieces = 1, BLOCK_BYTES  # the fake disk counts files as of one byte
    moves = {
        ("host", "written"): (counters["host_blocks_written"], pieces, PIECES),
        ("host", "restored"): (counters["host_blocks_restored"] + read, pieces, PIECES),
        ("disk", "written"): (counters["disk_blocks_written"], files, 1),
        ("disk", "restored"): (read, files, 1),
    }
    for (tier, way), (blocks, size, parts) in moves.items():
        labels = {"worker": "prefill0", "tier": tier, "way": way}
        assert blocks > 0, (tier, way)
        assert at(samples, "kept_bytes_moved_total", **labels) == blocks * size
        assert at(samples, "kept_move_seconds_count", **labels) == blocks * parts
    assert not any(
        ("source", "host memory") in labels for name, labels in samples if "kv_bytes" in name
    ), "links between workers are counted apart"
