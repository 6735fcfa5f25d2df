"""Decode workers whose sequences are set aside into host memory."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from jdisagg.request import Request
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, Collected, toy_request
from tests.fakes.fake_executor import FakeExecutor
from tests.worker.conversations import limits
from tests.worker.tiers import FAST

TOKEN_BYTES = 16
ROOMY = TierRoom(4000 * TOKEN_BYTES, always=True)


def scarce(room: TierRoom = ROOMY, pages: int = 24, **more: object) -> Cluster:
    """A decode worker whose pages run out when two sequences of `long` grow."""
    options: dict[str, object] = {
        "decode": limits(pages=pages),
        "prefill": limits(pages=400),
        "growth_tokens": 4,
        "costs": FAST,
        "spills": room,
        "wire": True,
    }
    return Cluster(**(options | more))  # type: ignore[arg-type]


def long(number: int, **sampling: object) -> Request:
    """40 tokens of prompt and 40 of answer, of which a rank of 24 pages holds one and a bit."""
    options: dict[str, object] = {"max_tokens": 40}
    return toy_request(number, 40, **(options | sampling))  # type: ignore[arg-type]


async def all_of(cluster: Cluster, *requests: Request) -> list[Collected]:
    """Their streams, which are the oracle's."""
    streams = await cluster.collect_all(requests)
    return streams


async def check_empty(cluster: Cluster) -> None:
    """No sequence is left in host memory, nor anywhere else; cached blocks alone may be."""
    await cluster.check_quiet()
    spilled, mesh = cluster.decode._spilled, cluster.decode_mesh
    assert len(spilled) == spilled.spills.bytes == 0 and spilled.quiet
    cached = [one.offer_ids for one in cluster.decode._host.blocks._blocks.values()]
    assert set(mesh.host) == {offer_id for ids in cached for offer_id in ids}
    assert not spilled._moving and not mesh.pulled


def flip_all(mesh: FakeExecutor) -> int:
    """One bit of each piece that lies in host memory; how many that were."""
    for _, entries in mesh.host.values():
        position, token, chain = entries[-1]
        entries[-1] = (position, token, chain ^ 1)
    return len(mesh.host)


LATER = 1000.0


def roomy(room: TierRoom = ROOMY, **more: object) -> Cluster:
    options: dict[str, object] = {
        "decode": limits(pages=400),
        "prefill": limits(pages=400),
        "costs": FAST,
        "spills": room,
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

    async def suspend(self, keep_seconds: float | None) -> None:
        path, request = self.cluster.path, self.request
        await path.suspend(request.tenant, request.request_id, keep_seconds)

    async def end(self) -> None:
        await self.task
        self.cluster.check(self.request, self.collected)


@asynccontextmanager
async def resting(
    cluster: Cluster, request: Request, keep_seconds: float = LATER, tokens: int = 10
) -> AsyncGenerator[Stream, None]:
    """Suspended after so many tokens, until the end of the block; nothing is left in its pages."""
    stream = Stream(cluster, request)
    await stream.until(tokens)
    await stream.suspend(keep_seconds)
    await asyncio.sleep(0.2)
    before = stream.tokens
    status = await cluster.decode.status()
    assert status.free_pages == status.total_pages
    assert (status.running, status.waiting) == (0, 0)
    yield stream
    assert stream.tokens == before < request.sampling.max_tokens * request.sampling.n
    await stream.suspend(None)
    await stream.end()
    await check_empty(cluster)
