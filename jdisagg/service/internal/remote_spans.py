"""Client that receives generated tokens from a decode worker over one shared gRPC stream.

A span is a batch of generated tokens of one sequence. One stream carries the spans of all sequences
that this process started on a worker. `generate` behaves like `DecodePort.generate`: it yields the
spans of one reservation, raises the error that ended the reservation, and cancels the reservation
if its iterator is closed early. The stream opens at the first call, and again after a failure. If
the stream fails, all iterators raise UnavailableError, and the worker cancels their reservations.
No call waits longer than its deadline."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from jdisagg.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.messages.ports import DecodePort, GenerateCall, Reservation, ReserveCall, Span
from jdisagg.messages.spans import SpanBatch, SpanSessionPort, WireStatus
from jdisagg.service.grpc import wire
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import Connection

# None marks the end of a reservation. A status is an error, which is converted to an exception
# where it is raised, so that two iterators never share a traceback.
Item = Span | WireStatus | None


class _Session:
    def __init__(self) -> None:
        self.session_id = secrets.randbits(64)
        self.opened = asyncio.Event()
        self.broken: WireStatus | None = None
        self._inboxes: dict[int, asyncio.Queue[Item]] = {}

    def expect(self, reservation_id: int) -> "asyncio.Queue[Item]":
        if reservation_id in self._inboxes:
            raise InvalidRequestError(
                f"reservation {reservation_id} already runs; generate it once"
            )
        inbox = self._inboxes[reservation_id] = asyncio.Queue()
        return inbox

    def forget(self, reservation_id: int) -> None:
        self._inboxes.pop(reservation_id, None)

    def take(self, batch: SpanBatch) -> None:
        for news in batch.reservations:
            inbox = self._inboxes.get(news.reservation_id)
            if inbox is None:
                continue
            for span in news.spans:
                inbox.put_nowait(span)
            if news.error is not None:
                inbox.put_nowait(news.error)
            elif news.ended:
                inbox.put_nowait(None)

    def break_off(self, status: WireStatus) -> None:
        self.broken = status
        self.opened.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(status)


class RemoteSpans:
    """Middleware for all `reserve` and `generate` calls of one connection. It sends them within the
    connection's session, that is the shared stream of spans."""

    def __init__(self, connection: Connection, port: DecodePort) -> None:
        self._connection = connection
        self._port = port
        self._sessions = rpc.client(
            SpanSessionPort,
            connection,
            seconds={"start": connection.timeouts.call_seconds, "spans": None},
            service=rpc.service_name(DecodePort),
        )
        self._session: _Session | None = None
        self._reading: set[asyncio.Task[None]] = set()

    async def reserve(self, _: object, call: ReserveCall) -> Reservation:
        """The worker frees the reservation when the session ends."""
        session = await self._open(call.deadline_seconds)
        return await self._sessions.reserve_in(session.session_id, call)

    async def generate(self, _: object, call: GenerateCall) -> AsyncGenerator[Span, None]:
        session = await self._open(call.deadline_seconds)
        reservation_id, over = call.reservation_id, False
        inbox = session.expect(reservation_id)
        late = wire.error_to_status(
            DeadlineExceededError(
                f"{self._connection.address}: no end of reservation {reservation_id} within"
                f" {call.deadline_seconds:g} s"
            )
        )
        timer = asyncio.get_running_loop().call_later(
            call.deadline_seconds + self._connection.timeouts.slack_seconds, inbox.put_nowait, late
        )
        try:
            await self._sessions.start(session.session_id, call)
            while (item := await inbox.get()) is not None:
                if isinstance(item, WireStatus):
                    over = item is not late
                    raise wire.error_from_status(item)
                yield item
            over = True
        finally:
            timer.cancel()
            session.forget(reservation_id)
            if not over:
                self._connection.fire(lambda: self._port.cancel(reservation_id))

    async def _open(self, seconds: float) -> _Session:
        session = self._session
        if session is None or session.broken is not None:
            session = self._session = _Session()
            reading = asyncio.create_task(self._read(session))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        if not session.opened.is_set():
            seconds = min(self._connection.timeouts.span_stream_seconds, seconds)
            try:
                await asyncio.wait_for(session.opened.wait(), seconds)
            except TimeoutError:
                raise UnavailableError(
                    f"{self._connection.address} opened no span stream within {seconds:g} s"
                ) from None
        if session.broken is not None:
            raise wire.error_from_status(session.broken)
        return session

    async def _read(self, session: _Session) -> None:
        """Needs no time limit, because pings detect an unreachable worker."""
        error: JdisaggError = UnavailableError(f"{self._connection.address} ended the span stream")
        try:
            async for batch in self._sessions.spans(session.session_id):
                session.opened.set()
                session.take(batch)
        except (UnavailableError, UnauthenticatedError) as broken:
            error = broken
        except JdisaggError as broken:
            error = UnavailableError(f"the span stream broke: {broken.message}")
        finally:
            session.break_off(wire.error_to_status(error))
