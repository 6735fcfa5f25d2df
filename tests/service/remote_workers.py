"""Workers behind real servers and ports to them, for the tests of remote ports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from jdisagg.config import ServiceConfig
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.ports import GenerateCall, HandoffSource, Span
from jdisagg.messages.spans import SpanBatch
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.span_sessions import SpanSessions
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import GrpcServer
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, CallTimeouts
from tests import time_scale
from tests.service.doors import eventually
from tests.service.port_worker import Worker


class Spanner(Worker):
    """A decode port under the test's hand: `says[reservation]` is what comes of it, an error ends
    it, None too."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[int, asyncio.Queue[Span | JdisaggError | None]] = {}
        self.dropped: list[int] = []

    def of(self, reservation_id: int) -> "asyncio.Queue[Span | JdisaggError | None]":
        return self.says.setdefault(reservation_id, asyncio.Queue())

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        try:
            while (item := await self.of(call.reservation_id).get()) is not None:
                if isinstance(item, JdisaggError):
                    raise item
                yield item
        finally:
            self.dropped.append(call.reservation_id)


@contextlib.asynccontextmanager
async def serving(
    worker: Worker, boot_id: int | None = None, port: int = 0, vocabulary: int = 1000
) -> AsyncIterator[tuple[str, GrpcServer]]:
    services = (
        prefill_service(worker, (), vocabulary),
        decode_service(worker, (), vocabulary),
        peer_service(worker),
    )
    server = GrpcServer(services, ServiceConfig(port=port, drain_seconds=0.0), boot_id)
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield address, server
    finally:
        await server.drain()


@contextlib.asynccontextmanager
async def connected(
    address: str,
    count: int = 1,
    boot_id: int | None = None,
    timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
) -> AsyncIterator[Sequence[RemoteWorker]]:
    remotes = [RemoteWorker(address, boot_id=boot_id, timeouts=timeouts) for _ in range(count)]
    try:
        yield remotes
    finally:
        for remote in remotes:
            await remote.aclose()


def call_of(reservation_id: int, deadline_seconds: float = 30.0) -> GenerateCall:
    return GenerateCall(
        reservation_id, 1, deadline_seconds, HandoffSource("prefill-0", 2**64 - 1, "127.0.0.1:1")
    )


async def collect(remote: RemoteWorker, reservation_id: int) -> list[Span]:
    return [span async for span in remote.decode.generate(call_of(reservation_id))]


async def until_usable(remote: RemoteWorker, seconds: float) -> None:
    """Raises TimeoutError when its worker does not answer for so long."""
    async with asyncio.timeout(time_scale.seconds(seconds)):
        while True:
            with contextlib.suppress(UnavailableError):
                await remote.decode.status()
                return
            await asyncio.sleep(0.05)


class OpenSession:
    """A session that is read as a stream's handler reads it; `batches` are what came. While `reads`
    is not set, the reader does not return from its batch number `stops_at`."""

    def __init__(self, sessions: SpanSessions, session_id: int, stops_at: int) -> None:
        self.batches: list[SpanBatch] = []
        self.reads = asyncio.Event()
        self._stops_at = stops_at
        self._reading = asyncio.ensure_future(self._read(sessions, session_id))

    def cancel(self) -> None:
        self._reading.cancel()

    async def end(self) -> None:
        self.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, sessions: SpanSessions, session_id: int) -> None:
        async with contextlib.aclosing(sessions.spans(session_id)) as batches:
            async for batch in batches:
                self.batches.append(batch)
                if len(self.batches) == self._stops_at:
                    await self.reads.wait()


@contextlib.asynccontextmanager
async def session(
    sessions: SpanSessions, session_id: int = 1, stops_at: int = 0
) -> AsyncIterator[OpenSession]:
    opened = OpenSession(sessions, session_id, stops_at)
    await eventually(lambda: opened.batches)
    try:
        yield opened
    finally:
        await opened.end()
