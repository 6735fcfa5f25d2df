"""The worker's side of the span streams: for each calling process one stream that carries the spans
of all it started.

A session lives as long as its stream. When the stream ends, however, all that it reserved and
started is cancelled: the process is gone or will never hear of it, and a router re-enters its path.
What a slow reader has not taken waits here, never more than the tokens that its reservations asked
for (worker/span_stream.py): it holds up neither the worker's loop nor other sessions. Spans that
wait when a message is made go out together, so that the tokens of one step cost one message.

Implements `SpanSessionPort` over a `DecodePort`; knows no gRPC."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator

from jdisagg.errors import HandoffError, InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.messages.ports import (
    DecodePort,
    GenerateCall,
    Reservation,
    ReserveCall,
    Span,
    close_stream,
)
from jdisagg.messages.spans import ReservationSpans, SpanBatch
from jdisagg.service.grpc import wire

log = logging.getLogger(__name__)

# Of one message: with the most logprobs that may be asked for, well below a message's limit.
MAX_BATCH_TOKENS = 1024


class _Session:
    """What one stream still has to say, and the tasks that follow its reservations."""

    def __init__(self) -> None:
        self.news: deque[ReservationSpans] = deque()
        self.stirred = asyncio.Event()
        self.running: dict[int, asyncio.Task[ReservationSpans]] = {}
        self.reserved: dict[int, float] = {}
        self.ended = False

    def hold(self, reservation: Reservation, now: float) -> None:
        """Until it is started or cancelled, or its lease has passed: the worker then forgets it,
        too."""
        self.reserved = {key: until for key, until in self.reserved.items() if until >= now}
        self.reserved[reservation.reservation_id] = now + reservation.lease_seconds

    def over(self, reservation_id: int, following: "asyncio.Task[ReservationSpans]") -> None:
        """Nothing more comes of it; also where the task was cancelled before it began."""
        del self.running[reservation_id]
        self.put(
            ReservationSpans(reservation_id=reservation_id, ended=True)
            if following.cancelled()
            else following.result()
        )

    def put(self, news: ReservationSpans) -> None:
        self.news.append(news)
        self.stirred.set()

    def take(self) -> SpanBatch:
        """What waits, in order; entries of one reservation are put together."""
        room = MAX_BATCH_TOKENS
        spans: dict[int, list[Span]] = {}
        ends: dict[int, ReservationSpans] = {}
        while self.news and room > 0:
            news = self.news.popleft()
            room -= max(1, sum([_weight(span) for span in news.spans]))
            spans.setdefault(news.reservation_id, []).extend(news.spans)
            if news.ended or news.error is not None:
                ends[news.reservation_id] = news
        if not self.news:
            self.stirred.clear()
        return SpanBatch(tuple([_entry(key, spans[key], ends.get(key)) for key in spans]))


class SpanSessions:
    """The sessions of one decode worker."""

    def __init__(self, port: DecodePort) -> None:
        self._port = port
        self._sessions: dict[int, _Session] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def spans(self, session_id: int) -> AsyncGenerator[SpanBatch, None]:
        """Opens the session; its batches, the first of them empty. When this is closed, all of the
        session is cancelled."""
        if session_id in self._sessions:
            raise InvalidRequestError(
                f"span session {session_id:x} is open already; draw another id"
            )
        session = self._sessions[session_id] = _Session()
        try:
            yield SpanBatch()
            while True:
                await session.stirred.wait()
                yield session.take()
        finally:
            del self._sessions[session_id]
            self._end(session)

    async def reserve_in(self, session_id: int, call: ReserveCall) -> Reservation:
        """Reserves for a session, which may end meanwhile."""
        session = self._session(session_id)
        reservation = await self._port.reserve(call)
        session.hold(reservation, asyncio.get_running_loop().time())
        if session.ended:
            self._end(session)
        return reservation

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """Follows a reservation; what comes of it, an error too, goes to the session's stream."""
        session = self._session(session_id)
        if call.reservation_id in session.running:
            raise HandoffError(
                f"reservation {call.reservation_id} runs already in this session; start it once"
            )
        session.reserved.pop(call.reservation_id, None)
        following = session.running[call.reservation_id] = asyncio.create_task(
            self._follow(session, call)
        )
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
            raise UnavailableError(
                f"span session {session_id:x} is not open: its stream broke; open another and try"
                " again"
            )
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

    async def _follow(self, session: _Session, call: GenerateCall) -> ReservationSpans:
        """Returns the last that is to be said of the reservation."""
        reservation_id = call.reservation_id
        spans = self._port.generate(call)
        try:
            try:
                async for span in spans:
                    session.put(ReservationSpans(reservation_id, (span,)))
            finally:
                await close_stream(spans)
        except JdisaggError as error:
            return _error_end(reservation_id, error)
        except Exception as error:
            log.exception("the spans of reservation %d failed", reservation_id)
            return _error_end(
                reservation_id,
                JdisaggError(
                    f"internal error ({type(error).__name__}); the worker's log says more"
                ),
            )
        return ReservationSpans(reservation_id=reservation_id, ended=True)


def _entry(
    reservation_id: int, spans: list[Span], end: ReservationSpans | None
) -> ReservationSpans:
    """All that a batch says of one reservation."""
    if end is None:
        return ReservationSpans(reservation_id, tuple(spans))
    return ReservationSpans(reservation_id, tuple(spans), end.ended, end.error)


def _error_end(reservation_id: int, error: JdisaggError) -> ReservationSpans:
    return ReservationSpans(reservation_id, error=wire.error_to_status(error))


def _weight(span: Span) -> int:
    """In tokens."""
    prompt = span.prompt_logprobs
    return len(span.token_ids) + (len(prompt) if prompt is not None else 0)
