"""Decode workers whose sequences give way and find their blocks in the cache again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from jdisagg.request import Request
from jdisagg.scheduler.block_names import Tails
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker.worker import Worker
from tests.fakes.cluster import Cluster, Collected, toy_request
from tests.fakes.fake_executor import FakeExecutor
from tests.worker.conversations import NAMES, limits
from tests.worker.tiers import FAST

ROOMY = TierRoom(4000 * 16, always=True)


def scarce(room: TierRoom = ROOMY, pages: int = 24, **more: object) -> Cluster:
    """A decode worker whose pages run out when two sequences of `long` grow."""
    options: dict[str, object] = {
        "decode": limits(pages=pages),
        "prefill": limits(pages=400),
        "growth_tokens": 4,
        "costs": FAST,
        "names": NAMES,
        "decode_tiers": room,
        "wire": True,
    }
    return Cluster(**(options | more))  # type: ignore[arg-type]


def long(number: int, **sampling: object) -> Request:
    """40 tokens of prompt and 40 of answer, of which a rank of 24 pages holds one and a bit."""
    options: dict[str, object] = {"max_tokens": 40}
    return toy_request(number, 40, **(options | sampling))  # type: ignore[arg-type]


async def check_empty(cluster: Cluster) -> None:
    """No sequence is left, and host memory holds cached blocks alone."""
    await cluster.check_quiet()
    tier, mesh = cluster.decode._host, cluster.decode_mesh
    assert cluster.decode._sources.quiet and not cluster.decode._state.cut
    blocks = list(tier.blocks._blocks.values())
    assert all(block.written and not block.readers for block in blocks)
    assert set(mesh.host) == {offer_id for block in blocks for offer_id in block.offer_ids}
    assert not mesh.pulled


def hits(cluster: Cluster) -> dict[str, int]:
    """Tokens that the decode worker had cached for its reservations, by tier."""
    labelled = cluster.decode.counters.labelled()
    return {
        dict(labels)["tier"]: count
        for (name, labels), count in labelled.items()
        if name == "prefix_hit_tokens"
    }


def flip_all(mesh: FakeExecutor) -> int:
    """One bit of each piece that lies in host memory; how many that were."""
    for _, entries in mesh.host.values():
        position, token, chain = entries[-1]
        entries[-1] = (position, token, chain ^ 1)
    return len(mesh.host)


def forget_tails(worker: Worker) -> None:
    """Sequences that give way find their full blocks alone from now on."""
    worker._kept.tails = Tails(most=0)


def roomy(room: TierRoom = ROOMY, **more: object) -> Cluster:
    options: dict[str, object] = {
        "decode": limits(pages=400),
        "prefill": limits(pages=400),
        "costs": FAST,
        "names": NAMES,
        "decode_tiers": room,
        "wire": True,
    }
    return Cluster(**(options | more))  # type: ignore[arg-type]


class Stream:
    """A request that is being read."""

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self.cluster, self.request, self.collected = cluster, request, Collected()
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self.cluster.path.stream(self.request):
            self.collected.add(event)

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for tokens in self.collected.tokens.values())

    async def until(self, tokens: int) -> None:
        while self.tokens < tokens:
            await asyncio.sleep(0.001)

    async def suspend(self) -> None:
        await self.cluster.path.suspend(self.request.tenant, self.request.request_id)

    def resume(self) -> None:
        self.cluster.path.resume(self.request.tenant, self.request.request_id)

    async def end(self) -> None:
        await self.task
        self.cluster.check(self.request, self.collected)


@asynccontextmanager
async def resting(
    cluster: Cluster, request: Request, tokens: int = 10
) -> AsyncGenerator[Stream, None]:
    """Suspended after so many tokens, until the end of the block; nothing is left in its pages."""
    stream = Stream(cluster, request)
    await stream.until(tokens)
    await stream.suspend()
    await asyncio.sleep(0.2)
    before = stream.tokens
    status = await cluster.decode.status()
    assert status.free_pages == status.total_pages
    assert (status.running, status.waiting) == (0, 0)
    yield stream
    assert stream.tokens == before < request.sampling.max_tokens * request.sampling.n
    stream.resume()
    await stream.end()
    await check_empty(cluster)
