"""Sends the generated tokens of a decode worker to each calling process over one stream.

A span is a batch of generated tokens of one sequence. Each calling process has one stream, called a
session, with the spans of all reservations that it started. When the stream ends, all reservations
and sequences of the session are cancelled, because the caller can no longer receive their tokens.
The buffer's size is bounded by the number of tokens of the session's reservations
(worker/tasks.py). A slow caller blocks neither the worker nor other sessions."""

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
from jdisagg.service.calls import internal_error
from jdisagg.service.grpc import wire

log = logging.getLogger(__name__)

# Largest number of tokens of a message. Even with the most log-probabilities per token, such a
# message is well below the size limit.
MAX_BATCH_TOKENS = 1024


class _Session:
    def __init__(self) -> None:
        self.news: deque[ReservationSpans] = deque()
        self.stirred = asyncio.Event()
        self.running: dict[int, asyncio.Task[ReservationSpans]] = {}
        self.reserved: dict[int, float] = {}
        self.ended = False

    def hold(self, reservation: Reservation, now: float) -> None:
        """Records a reservation whose decoding has not started, so that the end of the session
        cancels the reservation. Also removes records of reservations whose lease has ended."""
        self.reserved = {key: until for key, until in self.reserved.items() if until >= now}
        self.reserved[reservation.reservation_id] = now + reservation.lease_seconds

    def over(self, reservation_id: int, following: "asyncio.Task[ReservationSpans]") -> None:
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
    def __init__(self, port: DecodePort) -> None:
        self._port = port
        self._sessions: dict[int, _Session] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def spans(self, session_id: int) -> AsyncGenerator[SpanBatch, None]:
        """Opens a session and yields its batches of spans. The first batch is empty and only
        reports that the session is open. Closing the iterator cancels all reservations of the
        session."""
        if session_id in self._sessions:
            raise InvalidRequestError(
                f"span session {session_id:x} is already open; use another id"
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
        """Reserves pages for a session. If the session ends during the call, the reservation is
        cancelled. Raises UnavailableError if the session is not open."""
        session = self._session(session_id)
        reservation = await self._port.reserve(call)
        session.hold(reservation, asyncio.get_running_loop().time())
        if session.ended:
            self._end(session)
        return reservation

    async def start(self, session_id: int, call: GenerateCall) -> None:
        """The spans, and an error that ends them, are sent on the session's stream."""
        session = self._session(session_id)
        if call.reservation_id in session.running:
            raise HandoffError(
                f"reservation {call.reservation_id} already runs in this session; start it once"
            )
        session.reserved.pop(call.reservation_id, None)
        following = session.running[call.reservation_id] = asyncio.create_task(
            self._follow(session, call)
        )
        following.add_done_callback(lambda done: session.over(call.reservation_id, done))

    async def cancel(self, reservation_id: int, child: int | None, awaited: bool = False) -> None:
        await self._port.cancel(reservation_id, child, awaited)
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
                f"span session {session_id:x} is not open, because its stream broke; open another"
                " and try again"
            )
        return session

    def _end(self, session: _Session) -> None:
        session.ended = True
        for task in session.running.values():
            task.cancel()
        # This includes tasks that had not begun: cancelling such a task does not close its stream.
        held, session.reserved = (*session.reserved, *session.running), {}
        for reservation_id in held:
            cancelling = asyncio.create_task(self._port.cancel(reservation_id))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)

    async def _follow(self, session: _Session, call: GenerateCall) -> ReservationSpans:
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
            return _error_end(reservation_id, internal_error(error, "the worker's log"))
        return ReservationSpans(reservation_id=reservation_id, ended=True)


def _entry(
    reservation_id: int, spans: list[Span], end: ReservationSpans | None
) -> ReservationSpans:
    if end is None:
        return ReservationSpans(reservation_id, tuple(spans))
    return ReservationSpans(reservation_id, tuple(spans), end.ended, end.error)


def _error_end(reservation_id: int, error: JdisaggError) -> ReservationSpans:
    return ReservationSpans(reservation_id, error=wire.error_to_status(error))


def _weight(span: Span) -> int:
    prompt = span.prompt_logprobs
    return len(span.token_ids) + (len(prompt) if prompt is not None else 0)
