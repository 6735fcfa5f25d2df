"""Workers with few pages, and host memory and disk behind them."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from jdisagg.request import Request
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_disk import FakeDisk
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, asked, limits

BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 16
PIECES = 2 * BLOCK_TOKENS // 4  # of a block: one a layer group and granule
FAST = Costs(pull=1e-5, other=1e-5)


def host(blocks: int = 64, always: bool = True, **more: object) -> Cluster:
    """Few pages at the prefill worker, and room for so many blocks in its host memory; many pages
    at the decode worker, which keeps nothing of use to it."""
    options: dict[str, object] = {
        "decode": limits(pages=400),
        "prefill": limits(pages=20),  # five blocks: one prompt of `other`
        "names": NAMES,
        "costs": FAST,
        "tiers": TierRoom(blocks * BLOCK_BYTES, always=always),
    }
    return Cluster(**(options | more))  # type: ignore[arg-type]


def other(number: int, tokens: int = 80) -> Request:
    """A prompt that shares nothing with others."""
    rng = random.Random(number)
    return asked(number, tuple(rng.randrange(89) for _ in range(tokens)))


async def computed(cluster: Cluster, request: Request) -> int:
    """How many tokens of the prompt the prefill worker computed."""
    cluster.decode._state.residency.clear()
    before = cluster.prefill.counters["prefix_hit_tokens"]
    await cluster.ask(request)
    known = cluster.prefill.counters["prefix_hit_tokens"] - before
    return len(request.prompt_token_ids) - known


def room(host_blocks: int, disk_blocks: int, size: int = 1, always: bool = True) -> TierRoom:
    """`size`: of a block, in those of 16 tokens."""
    return TierRoom(
        host_blocks * BLOCK_BYTES * size,
        disk_blocks * (BLOCK_BYTES * size + FILE_EXTRA_BYTES),
        always,
    )


@asynccontextmanager
async def worker_on(
    disk: FakeDisk | None, host_blocks: int = 12, disk_blocks: int = 200, **more: object
) -> AsyncIterator[Cluster]:
    """Host memory for two prompts."""
    cluster = host(**{"tiers": room(host_blocks, disk_blocks), **more})  # type: ignore[arg-type]
    cluster.prefill_mesh.disk = disk
    async with cluster:
        yield cluster


async def again(cluster: Cluster, number: int) -> int:
    """How many tokens of a prompt are computed that may have been asked before."""
    cluster.count = getattr(cluster, "count", 0) + 1  # type: ignore[attr-defined]
    request = replace(other(number), request_id=f"{number} again {cluster.count}")  # type: ignore[attr-defined]
    return await computed(cluster, request)


async def until_quiet(cluster: Cluster) -> None:
    await until(lambda: cluster.prefill._sources.quiet, 0.1)


async def known_on_disk(cluster: Cluster) -> None:
    """Prompt 1 lies on disk and nowhere else."""
    await again(cluster, 1)
    await again(cluster, 1)  # its second use
    await until_quiet(cluster)
    for number in range(2, 7):
        await again(cluster, number)
    await until_quiet(cluster)
    worker = cluster.prefill
    assert worker.counters["disk_blocks_written"] == 4
    chain = worker._kept.chain(other(1), other(1).prompt_token_ids)
    assert worker._kept.match(0, chain) == worker._host.blocks.match(chain, 0) == 0
