"""Middleware that measures calls of ports, which are the interfaces of workers.

The classes `Observed*` wrap a port in the calling process: ports of remote workers in a router,
peers in a decode worker, and the workers themselves if all are in one process. `Served` wraps the
ports of a worker in the worker's own process. It registers the request to which each reservation id
and hand-off id belongs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import context as otel

from jdisagg.messages.ports import (
    GenerateCall,
    HandoffEnd,
    Offer,
    PeerMessage,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    SpanEnd,
    close_stream,
)
from jdisagg.messages.trace_context import within
from jdisagg.observe.observer import RESUMED, Observer
from jdisagg.observe.tracing import (
    Key,
    handoff_key,
    of_request,
    offer_key,
    request_key,
    reservation_key,
)
from jdisagg.request import Request

_HANDOFFS_KEPT = 1024
_RESERVATIONS_KEPT = 1 << 16


class ObservedPrefill:
    """Middleware that measures calls of the `PrefillPort` of one worker."""

    def __init__(self, worker: str, observer: Observer) -> None:
        self._worker = worker
        self._observer = observer

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        observer, tracing, started = self._observer, self._observer.tracing, self._observer.now()
        if not tracing.on:
            with _failures(observer, self._worker, "prefill", call.request, call.attempt):
                return await proceed(call)
        span, context = tracing.start(
            "prefill", started, _owner(call.request), worker=self._worker, attempt=call.attempt
        )
        tracing.own(handoff_key(call.handoff_id), context)
        try:
            with (
                within(context),
                _failures(observer, self._worker, "prefill", call.request, call.attempt),
            ):
                reply = await proceed(call)
            ended = observer.now()
            computing = max(started, ended - reply.prefill_seconds)
            waiting = max(started, computing - reply.queue_seconds)
            tracing.span("prefill wait", waiting, computing, context, attempt=call.attempt)
            tracing.span("prefill compute", computing, ended, context, attempt=call.attempt)
            return reply
        finally:
            tracing.end(span, observer.now())


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    attempt: int


class ObservedDecode:
    """Middleware that measures calls of the `DecodePort` of one worker."""

    def __init__(self, worker: str, observer: Observer) -> None:
        self._worker = worker
        self._observer = observer
        self._held: dict[int, _Held] = {}

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        observer, request, started = self._observer, call.request, self._observer.now()
        tracing, owner = observer.tracing, _owner(request)
        cause = observer.causes.latest(request.tenant, request.request_id) or "unknown"
        # The first attempt of a resumed stream has a number above 1, but is not a retry.
        if call.attempt > 1 and cause != RESUMED:
            observer.metrics.requests.retries.labels(cause).inc()
            tracing.instant("retry", started, owner, attempt=call.attempt, cause=cause)
        with (
            within(tracing.owner(owner)),
            _failures(observer, self._worker, "reserve", request, call.attempt),
        ):
            reservation = await proceed(call)
        tracing.own(reservation_key(self._worker, reservation.reservation_id), owner)
        tracing.span(
            "reserve",
            started,
            observer.now(),
            owner,
            worker=self._worker,
            attempt=call.attempt,
            rank=reservation.rank,
        )
        while len(self._held) >= _RESERVATIONS_KEPT:
            self._held.pop(next(iter(self._held)))
        self._held[reservation.reservation_id] = _Held(request, call.attempt)
        return reservation

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        observer, held = self._observer, self._held.get(call.reservation_id)
        spans = proceed(call)
        if held is None:
            async for span in spans:
                yield span
            return
        request, tracing = held.request, observer.tracing
        if call.source is not None:
            tracing.own(handoff_key(call.source.handoff_id), _owner(request))
        started = observer.now()
        latest: dict[int, float] = {}
        try:
            with _failures(observer, self._worker, "generate", request, held.attempt):
                async for span in spans:
                    if tracing.on and (span.token_ids or span.end or span.lost or span.moving):
                        now, before = observer.now(), latest.get(span.child)
                        first = "first span" if call.source is None else "hand-off to first span"
                        self._trace(
                            first if before is None else "decode",
                            started if before is None else before,
                            now,
                            held,
                            span,
                        )
                        if span.token_ids:
                            latest[span.child] = now
                    cause = _cause_in(span)
                    if cause:
                        observer.causes.put(request.tenant, request.request_id, cause)
                    yield span
        finally:
            self._held.pop(call.reservation_id, None)
            await close_stream(spans)

    async def resume_source(
        self, proceed: Callable[[ResumeCall], Awaitable[int | None]], call: ResumeCall
    ) -> int | None:
        observer, held = self._observer, self._held.get(call.reservation_id)
        if held is None:
            return await proceed(call)
        request, owner = held.request, _owner(held.request)
        observer.tracing.own(handoff_key(call.source.handoff_id), owner)
        with (
            within(observer.tracing.owner(owner)),
            _failures(observer, self._worker, "resume_source", request, call.attempt),
        ):
            from_token = await proceed(call)
        cause = observer.causes.latest(request.tenant, request.request_id) or "unknown"
        observer.metrics.requests.retries.labels(cause).inc()
        observer.tracing.instant(
            "retry",
            observer.now(),
            owner,
            attempt=call.attempt,
            cause=cause,
            source=call.source.worker,
            kept_tokens="all" if from_token is None else str(from_token),
        )
        return from_token

    async def cancel(
        self,
        proceed: Callable[[int, int | None, bool], Awaitable[None]],
        reservation_id: int,
        child: int | None = None,
        awaited: bool = False,
    ) -> None:
        if child is None:
            self._held.pop(reservation_id, None)
        await proceed(reservation_id, child, awaited)

    def _trace(self, name: str, started: float, now: float, held: _Held, span: Span) -> None:
        tracing, owner, attempt = self._observer.tracing, _owner(held.request), held.attempt
        worker, child, lost = self._worker, span.child, span.lost
        if span.token_ids:
            tokens = len(span.token_ids)
            tracing.span(
                name,
                started,
                now,
                owner,
                worker=worker,
                child=child,
                attempt=attempt,
                tokens=tokens,
            )
        if span.end is SpanEnd.PREEMPTED:
            tracing.instant("preempted", now, owner, worker=worker, child=child, attempt=attempt)
        if lost is not None:
            tracing.instant(
                "source lost",
                now,
                owner,
                worker=worker,
                attempt=attempt,
                kept_tokens=lost.kept_tokens,
                reason=lost.reason,
            )
        if span.moving is not None:
            tracing.own(handoff_key(span.moving.handoff_id), owner)
            tracing.instant("migration", now, owner, worker=worker, attempt=attempt)


@dataclass(slots=True)
class _Receiving:
    acknowledged: set[int] = field(default_factory=set)
    offers: int | None = None
    ended_at: float = 0.0
    moved: bool = False


class ObservedPeer:
    """Middleware that measures calls of a `PeerPort`, through which one worker pulls KV from
    another. `receiver` is the name of the worker that pulls."""

    def __init__(self, receiver: str, observer: Observer) -> None:
        self._receiver = receiver
        self._observer = observer
        self._receiving: dict[int, _Receiving] = {}

    async def offers(
        self,
        proceed: Callable[[int, int], AsyncIterator[PeerMessage]],
        handoff_id: int,
        attempt: int,
    ) -> AsyncIterator[PeerMessage]:
        tracing, now, owner = self._observer.tracing, self._observer.now, handoff_key(handoff_id)
        while len(self._receiving) >= _HANDOFFS_KEPT:
            self._receiving.pop(next(iter(self._receiving)))
        receiving = self._receiving[handoff_id] = _Receiving()
        messages = proceed(handoff_id, attempt)
        try:
            async for message in messages:
                if isinstance(message, Offer):
                    tracing.own(offer_key(message.offer_id), owner)
                    tracing.instant(
                        "offer",
                        now(),
                        owner,
                        group=message.group,
                        start=message.start,
                        attempt=attempt,
                    )
                elif isinstance(message, HandoffEnd):
                    receiving.offers, receiving.ended_at = message.offers, now()
                    # True for the migration of a running sequence, for which there is no prefill.
                    receiving.moved = bool(message.moved)
                    tracing.instant(
                        "all offered",
                        receiving.ended_at,
                        owner,
                        offers=message.offers,
                        attempt=attempt,
                    )
                    self._settle(handoff_id, receiving)
                yield message
        finally:
            await close_stream(messages)

    async def acknowledge(
        self,
        proceed: Callable[[int, tuple[int, ...]], Awaitable[None]],
        handoff_id: int,
        offer_ids: tuple[int, ...],
    ) -> None:
        receiving = self._receiving.get(handoff_id)
        if receiving is not None:
            receiving.acknowledged.update(offer_ids)
            for offer_id in offer_ids:
                self._observer.tracing.instant(
                    "verified", self._observer.now(), offer_key(offer_id)
                )
            self._settle(handoff_id, receiving)
        await proceed(handoff_id, offer_ids)

    async def abort(
        self, proceed: Callable[[int, str], Awaitable[None]], handoff_id: int, reason: str
    ) -> None:
        self._receiving.pop(handoff_id, None)
        self._observer.tracing.instant(
            "hand-off aborted", self._observer.now(), handoff_key(handoff_id), reason=reason
        )
        await proceed(handoff_id, reason)

    def _settle(self, handoff_id: int, receiving: _Receiving) -> None:
        if receiving.offers is None or len(receiving.acknowledged) < receiving.offers:
            return
        now, owner, ended_at = self._observer.now(), handoff_key(handoff_id), receiving.ended_at
        tracing, receiver = self._observer.tracing, self._receiver
        self._receiving.pop(handoff_id, None)
        if receiving.moved:
            tracing.instant("moved", now, owner, worker=receiver)
        else:
            self._observer.metrics.transfers.exposed.labels(receiver).observe(now - ended_at)
            tracing.span("exposed transfer", ended_at, now, owner, worker=receiver)


class Served:
    """Middleware for all ports of a worker, in the worker's own process. It connects spans of the
    worker with the caller's trace.

    Calls of `prefill` and `reserve` contain the caller's trace context."""

    def __init__(self, worker: str, observer: Observer) -> None:
        self._worker = worker
        self._tracing = observer.tracing

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        context = of_request(otel.get_current(), call.request.request_id)
        self._tracing.own(handoff_key(call.handoff_id), context)
        return await proceed(call)

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        context = of_request(otel.get_current(), call.request.request_id)
        reservation = await proceed(call)
        self._tracing.own(reservation_key(self._worker, reservation.reservation_id), context)
        return reservation

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        owner = reservation_key(self._worker, call.reservation_id)
        if call.source is not None:
            self._tracing.own(handoff_key(call.source.handoff_id), owner)
        spans = proceed(call)
        try:
            async for span in spans:
                if span.moving is not None:
                    self._tracing.own(handoff_key(span.moving.handoff_id), owner)
                yield span
        finally:
            await close_stream(spans)

    async def resume_source(
        self, proceed: Callable[[ResumeCall], Awaitable[int | None]], call: ResumeCall
    ) -> int | None:
        owner = reservation_key(self._worker, call.reservation_id)
        self._tracing.own(handoff_key(call.source.handoff_id), owner)
        return await proceed(call)

    async def offers(
        self,
        proceed: Callable[[int, int], AsyncIterator[PeerMessage]],
        handoff_id: int,
        attempt: int,
    ) -> AsyncIterator[PeerMessage]:
        messages = proceed(handoff_id, attempt)
        try:
            async for message in messages:
                if isinstance(message, Offer):
                    self._tracing.own(offer_key(message.offer_id), handoff_key(handoff_id))
                yield message
        finally:
            await close_stream(messages)


def _owner(request: Request) -> Key:
    return request_key(request.tenant, request.request_id)


def _cause_in(span: Span) -> str:
    if span.end is SpanEnd.PREEMPTED:
        return "preempted"
    if span.lost is not None:
        return "source_lost"
    return "moving" if span.moving is not None else ""


@contextmanager
def _failures(
    observer: Observer, worker: str, call: str, request: Request, attempt: int
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        observer.metrics.requests.call_failures.labels(worker, call, name).inc()
        observer.causes.put(request.tenant, request.request_id, name)
        observer.tracing.instant(
            "failed",
            observer.now(),
            _owner(request),
            worker=worker,
            call=call,
            attempt=attempt,
            error=f"{name}: {error}",
        )
        raise
