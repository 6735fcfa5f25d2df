"""The worker's side of the span streams: for each calling process one stream that carries the spans of all it started.

A session lives as long as its stream. When the stream ends, however, all that it reserved and started is cancelled: the process is gone or
will never hear of it, and a router re-enters its path. What a slow reader has not taken waits here, never more than the tokens that its
reservations asked for (worker/span_stream.py): it holds up neither the worker's loop nor other sessions. Spans that wait when a message is
made go out together, so that the tokens of one step cost one message.

Knows a `DecodePort` and messages; knows no gRPC.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from jdisagg.dispatch.ports import DecodePort, GenerateCall, Reservation, ReserveCall, close_stream
from jdisagg.errors import HandoffError, InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.service import wire, wire_workers
from jdisagg.service import workers_pb2 as pb

log = logging.getLogger(__name__)

# Of one message: with the most logprobs that may be asked for, well below a message's limit.
MAX_BATCH_TOKENS = 1024


class _Session:
    """What one stream still has to say, and the tasks that follow its reservations."""

    def __init__(self) -> None:
        self.news: deque[pb.ReservationSpans] = deque()
        self.stirred = asyncio.Event()
        self.running: dict[int, asyncio.Task[pb.ReservationSpans]] = {}
        self.reserved: dict[int, float] = {}
        self.ended = False

    def hold(self, reservation: Reservation, now: float) -> None:
        """Until it is started or cancelled, or its lease has passed: the worker then forgets it, too."""
        self.reserved = {key: until for key, until in self.reserved.items() if until >= now}
        self.reserved[reservation.reservation_id] = now + reservation.lease_seconds

    def over(self, reservation_id: int, following: "asyncio.Task[pb.ReservationSpans]") -> None:
        """Nothing more comes of it; also where the task was cancelled before it began."""
        del self.running[reservation_id]
        self.put(pb.ReservationSpans(reservation_id=reservation_id, ended=True) if following.cancelled() else following.result())

    def put(self, news: pb.ReservationSpans) -> None:
        self.news.append(news)
        self.stirred.set()

    def take(self) -> pb.SpanBatch:
        """What waits, in order; entries of one reservation are put together."""
        batch, room = pb.SpanBatch(), MAX_BATCH_TOKENS
        entries: dict[int, pb.ReservationSpans] = {}
        while self.news and room > 0:
            news = self.news.popleft()
            room -= max(1, sum([len(span.token_ids) for span in news.spans]))
            entry = entries.get(news.reservation_id)
            if entry is None:
                entry = entries[news.reservation_id] = batch.reservations.add()
            entry.MergeFrom(news)
        if not self.news:
            self.stirred.clear()
        return batch


class SpanSessions:
    """The sessions of one decode worker."""

    def __init__(self, port: DecodePort) -> None:
        self._port = port
        self._sessions: dict[int, _Session] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def serve(self, session_id: int, write: Callable[[pb.SpanBatch], Awaitable[object]]) -> None:
        """Opens the session and writes its batches, the first of them empty, until cancelled; then all of it is cancelled."""
        if session_id in self._sessions:
            raise InvalidRequestError(f"span session {session_id:x} is open already; draw another id")
        session = self._sessions[session_id] = _Session()
        try:
            await write(pb.SpanBatch())
            while True:
                await session.stirred.wait()
                await write(session.take())
        finally:
            del self._sessions[session_id]
            self._end(session)

    async def reserve(self, session_id: int, call: ReserveCall) -> Reservation:
        """Reserves for a session (0: for none), which may end meanwhile."""
        session = self._session(session_id) if session_id else None
        reservation = await self._port.reserve(call)
        if session is not None:
            session.hold(reservation, asyncio.get_running_loop().time())
            if session.ended:
                self._end(session)
        return reservation

    def start(self, session_id: int, call: GenerateCall) -> None:
        """Follows a reservation; what comes of it, an error too, goes to the session's stream."""
        session = self._session(session_id)
        if call.reservation_id in session.running:
            raise HandoffError(f"reservation {call.reservation_id} runs already in this session; start it once")
        session.reserved.pop(call.reservation_id, None)
        following = session.running[call.reservation_id] = asyncio.create_task(self._follow(session, call))
        following.add_done_callback(lambda done: session.over(call.reservation_id, done))

    async def cancel(self, reservation_id: int, child: int | None) -> None:
        await self._port.cancel(reservation_id, child)
        if child is None:
            for session in self._sessions.values():
                session.reserved.pop(reservation_id, None)
                task = session.running.get(reservation_id)
                if task is not None:
                    task.cancel()

    def _session(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnavailableError(f"span session {session_id:x} is not open: its stream broke; open another and try again")
        return session

    def _end(self, session: _Session) -> None:
        session.ended = True
        for task in session.running.values():
            task.cancel()
        # Also of tasks that had not begun: cancelling those closes nothing.
        held, session.reserved = (*session.reserved, *session.running), {}
        for reservation_id in held:
            cancelling = asyncio.create_task(self._port.cancel(reservation_id))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)

    async def _follow(self, session: _Session, call: GenerateCall) -> pb.ReservationSpans:
        """Returns the last that is to be said of the reservation."""
        reservation_id = call.reservation_id
        spans = self._port.generate(call)
        try:
            try:
                async for span in spans:
                    session.put(pb.ReservationSpans(reservation_id=reservation_id, spans=(wire_workers.span_to_proto(span),)))
            finally:
                await close_stream(spans)
        except JdisaggError as error:
            return _error_end(reservation_id, error)
        except Exception as error:
            log.exception("the spans of reservation %d failed", reservation_id)
            return _error_end(reservation_id, JdisaggError(f"internal error ({type(error).__name__}); the worker's log says more"))
        return pb.ReservationSpans(reservation_id=reservation_id, ended=True)


def _error_end(reservation_id: int, error: JdisaggError) -> pb.ReservationSpans:
    return pb.ReservationSpans(reservation_id=reservation_id, error=wire.status_to_proto(wire.error_to_status(error)))
