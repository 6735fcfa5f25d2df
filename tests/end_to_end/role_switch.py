"""Workers of a running cluster change their roles under load: shared by tests and benchmarks.

Streams with known tokens run all the time, and each is compared with its expected tokens."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from benchmarks.soak.load import Kind, Stream
from jdisagg.client import AsyncClient
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchReport
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.role_services import cluster_roles


@dataclass
class Change:
    """One change of role. `asked_at`, `done_at` on the monotonic clock; `before`: the streams that
    were under way when it was asked for. `longest_pause`: the longest gap between two deliveries to
    any stream meanwhile."""

    report: SwitchReport
    asked_at: float
    done_at: float
    before: list[Stream]
    longest_pause: float = 0.0

    @property
    def streams_across(self) -> int:
        """How many of those went on; once all have ended."""
        return sum(1 for stream in self.before if stream.times[-1] > self.asked_at)


@dataclass
class Load:
    """`concurrent` streams at any time, until `stop`; all that ever ran are in `streams`."""

    client: AsyncClient
    kinds: Sequence[Kind]
    concurrent: int
    streams: list[Stream] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        order = itertools.cycle(self.kinds)

        async def one_after_the_other() -> None:
            while not self.stopping:
                stream = Stream(next(order))
                self.streams.append(stream)
                await stream.run(self.client)

        await asyncio.gather(*(one_after_the_other() for _ in range(self.concurrent)))

    @property
    def wrong(self) -> list[str]:
        return [stream.wrong for stream in self.streams if stream.wrong]

    def under_way(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.times and stream.ended_at is None]

    async def until_under_way(self, count: int, seconds: float = 90.0) -> None:
        async with asyncio.timeout(seconds):
            while len(self.under_way()) < count:
                await asyncio.sleep(0.01)

    async def until_a_new_one(self, seconds: float = 90.0) -> None:
        """Until a stream that is asked for from now on is under way."""
        known = len(self.streams)
        async with asyncio.timeout(seconds):
            while not any(stream.times for stream in self.streams[known:]):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def load(address: str, kinds: Sequence[Kind], concurrent: int) -> AsyncIterator[Load]:
    """On leaving all streams have ended."""
    async with AsyncClient(address, connect_seconds=30.0) as client:
        running = Load(client, kinds, concurrent)
        task = asyncio.create_task(running.run())
        try:
            yield running
        finally:
            running.stopping = True
            await task


async def change(
    address: str, running: Load, worker: str, role: WorkerRole, layout: Layout | None = None
) -> Change:
    """Asks the router for it while streams are under way, and looks at them afterwards."""
    await running.until_under_way(max(1, running.concurrent // 2))
    before = running.under_way()
    asked_at = time.monotonic()
    async with cluster_roles(address) as roles:
        report = await roles.switch(worker, role, layout)
    done = Change(report, asked_at, time.monotonic(), before)
    await asyncio.sleep(0.5)
    for stream in running.streams:
        meanwhile = [at for at in stream.times if at >= asked_at - 1.0]
        gaps = (later - earlier for earlier, later in itertools.pairwise(meanwhile))
        done.longest_pause = max(done.longest_pause, max(gaps, default=0.0))
    return done
