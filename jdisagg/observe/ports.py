"""Ports as seen by an observer: each call goes through unchanged, and is measured on the way.

Works on either side of the wire: around remote ports in a router, around peers in a decode worker, around workers themselves in one
process. Learns from the calls which request a reservation, a hand-off and an offer belong to, and links them for the timeline.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jdisagg.dispatch.ports import (
    DecodePort,
    GenerateCall,
    HandoffEnd,
    Offer,
    PeerHello,
    PeerMessage,
    PeerPort,
    PrefillCall,
    PrefillPort,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    SpanEnd,
    WorkerStatus,
    close_stream,
)
from jdisagg.observe.observer import Observer
from jdisagg.observe.timeline import Value, handoff_ref, offer_ref, request_ref, reservation_ref
from jdisagg.request import Request

_HANDOFFS_KEPT = 1024
_RESERVATIONS_KEPT = 1 << 16


class ObservedPrefillPort:
    """Implements `PrefillPort`."""

    def __init__(self, name: str, port: PrefillPort, observer: Observer) -> None:
        self._name = name
        self._port = port
        self._observer = observer

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        observer, started, ref = self._observer, self._observer.now(), request_ref(call.request.request_id)
        observer.timeline.link(handoff_ref(call.handoff_id), ref)
        with _failures(observer, self._name, "prefill", call.request, call.attempt):
            reply = await self._port.prefill(call)
        if observer.timeline.on:
            ended = observer.now()
            computing = max(started, ended - reply.prefill_seconds)
            waiting = max(started, computing - reply.queue_seconds)
            observer.timeline.span("prefill", started, ended, ref, worker=self._name, attempt=call.attempt)
            observer.timeline.span("prefill wait", waiting, computing, ref, attempt=call.attempt)
            observer.timeline.span("prefill compute", computing, ended, ref, attempt=call.attempt)
        return reply

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self._port.cancel_prefill(handoff_id)

    async def status(self) -> WorkerStatus:
        return await self._port.status()


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    attempt: int


class ObservedDecodePort:
    """Implements `DecodePort`."""

    def __init__(self, name: str, port: DecodePort, observer: Observer) -> None:
        self._name = name
        self._port = port
        self._observer = observer
        self._held: dict[int, _Held] = {}

    async def reserve(self, call: ReserveCall) -> Reservation:
        observer, request, started = self._observer, call.request, self._observer.now()
        ref = request_ref(request.request_id)
        if call.attempt > 1:
            cause = observer.causes.take(request.tenant, request.request_id)
            observer.metrics.retries.labels(cause).inc()
            observer.timeline.instant("retry", started, ref, attempt=call.attempt, cause=cause)
        with _failures(observer, self._name, "reserve", request, call.attempt):
            reservation = await self._port.reserve(call)
        observer.timeline.link(reservation_ref(self._name, reservation.reservation_id), ref)
        observer.timeline.span("reserve", started, observer.now(), ref, worker=self._name, attempt=call.attempt, rank=reservation.rank)
        while len(self._held) >= _RESERVATIONS_KEPT:
            self._held.pop(next(iter(self._held)))
        self._held[reservation.reservation_id] = _Held(request, call.attempt)
        return reservation

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        observer, held = self._observer, self._held.get(call.reservation_id)
        timeline = observer.timeline
        if held is None:
            async for span in self._port.generate(call):
                yield span
            return
        ref = request_ref(held.request.request_id)
        if call.source is not None:
            timeline.link(handoff_ref(call.source.handoff_id), ref)
        spans = self._port.generate(call)
        started = observer.now()
        latest: dict[int, float] = {}
        try:
            with _failures(observer, self._name, "generate", held.request, held.attempt):
                async for span in spans:
                    if timeline.on and (span.token_ids or span.end or span.lost or span.moving):
                        now, before = observer.now(), latest.get(span.child)
                        first = "first span" if call.source is None else "hand-off to first span"
                        self._record(first if before is None else "decode", started if before is None else before, now, held, span)
                        if span.token_ids:
                            latest[span.child] = now
                    cause = _cause_in(span)
                    if cause:
                        observer.causes.put(held.request.tenant, held.request.request_id, cause)
                    yield span
        finally:
            self._held.pop(call.reservation_id, None)
            await close_stream(spans)

    async def resume_source(self, call: ResumeCall) -> int | None:
        observer, held = self._observer, self._held.get(call.reservation_id)
        if held is None:
            return await self._port.resume_source(call)
        ref = request_ref(held.request.request_id)
        observer.timeline.link(handoff_ref(call.source.handoff_id), ref)
        with _failures(observer, self._name, "resume_source", held.request, call.attempt):
            from_token = await self._port.resume_source(call)
        kept, cause = "all" if from_token is None else str(from_token), observer.causes.take(held.request.tenant, held.request.request_id)
        observer.metrics.retries.labels(cause).inc()
        args: dict[str, Value] = {"attempt": call.attempt, "cause": cause, "source": call.source.worker, "kept_tokens": kept}
        observer.timeline.instant("retry", observer.now(), ref, "", **args)
        return from_token

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        if child is None:
            self._held.pop(reservation_id, None)
        await self._port.cancel(reservation_id, child)

    async def status(self) -> WorkerStatus:
        return await self._port.status()

    def _record(self, name: str, started: float, now: float, held: _Held, span: Span) -> None:
        timeline, ref, attempt = self._observer.timeline, request_ref(held.request.request_id), held.attempt
        if span.token_ids:
            tokens = len(span.token_ids)
            timeline.span(name, started, now, ref, worker=self._name, child=span.child, attempt=attempt, tokens=tokens)
        if span.end is SpanEnd.PREEMPTED:
            timeline.instant("preempted", now, ref, worker=self._name, child=span.child, attempt=attempt)
        if span.lost is not None:
            lost = span.lost
            timeline.instant("source lost", now, ref, worker=self._name, attempt=attempt, kept_tokens=lost.kept_tokens, reason=lost.reason)
        if span.moving is not None:
            timeline.link(handoff_ref(span.moving.handoff_id), ref)
            timeline.instant("migration", now, ref, worker=self._name, attempt=attempt)


@dataclass(slots=True)
class _Receiving:
    """A hand-off as the receiver learns of it."""

    acknowledged: set[int] = field(default_factory=set)
    offers: int | None = None
    ended_at: float = 0.0
    moved: bool = False


class ObservedPeerPort:
    """Implements `PeerPort`, on the receiver's side: `receiver` is the worker that pulls."""

    def __init__(self, receiver: str, port: PeerPort, observer: Observer) -> None:
        self._receiver = receiver
        self._port = port
        self._observer = observer
        self._receiving: dict[int, _Receiving] = {}

    async def hello(self, hello: PeerHello) -> PeerHello:
        return await self._port.hello(hello)

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        timeline, ref = self._observer.timeline, handoff_ref(handoff_id)
        while len(self._receiving) >= _HANDOFFS_KEPT:
            self._receiving.pop(next(iter(self._receiving)))
        receiving = self._receiving[handoff_id] = _Receiving()
        messages = self._port.offers(handoff_id, attempt)
        try:
            async for message in messages:
                if isinstance(message, Offer):
                    timeline.link(offer_ref(message.offer_id), ref)
                    timeline.instant("offer", self._observer.now(), ref, group=message.group, start=message.start, attempt=attempt)
                elif isinstance(message, HandoffEnd):
                    receiving.offers, receiving.ended_at = message.offers, self._observer.now()
                    receiving.moved = bool(message.moved)  # a running sequence: its sender computes nothing meanwhile
                    timeline.instant("all offered", receiving.ended_at, ref, offers=message.offers, attempt=attempt)
                    self._settle(handoff_id, receiving)
                yield message
        finally:
            await close_stream(messages)

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        receiving = self._receiving.get(handoff_id)
        if receiving is not None:
            receiving.acknowledged.update(offer_ids)
            for offer_id in offer_ids:
                self._observer.timeline.instant("verified", self._observer.now(), offer_ref(offer_id))
            self._settle(handoff_id, receiving)
        await self._port.acknowledge(handoff_id, offer_ids)

    async def abort(self, handoff_id: int, reason: str) -> None:
        self._receiving.pop(handoff_id, None)
        self._observer.timeline.instant("hand-off aborted", self._observer.now(), handoff_ref(handoff_id), reason=reason)
        await self._port.abort(handoff_id, reason)

    def _settle(self, handoff_id: int, receiving: _Receiving) -> None:
        """Whole when the end is known and all offers are acknowledged: what came after the end was exposed."""
        if receiving.offers is not None and len(receiving.acknowledged) >= receiving.offers:
            now = self._observer.now()
            self._receiving.pop(handoff_id, None)
            if receiving.moved:
                self._observer.timeline.instant("moved", now, handoff_ref(handoff_id), worker=self._receiver)
            else:
                self._observer.metrics.exposed.labels(self._receiver).observe(now - receiving.ended_at)
                self._observer.timeline.span("exposed transfer", receiving.ended_at, now, handoff_ref(handoff_id), worker=self._receiver)


def _cause_in(span: Span) -> str:
    """Why what follows this span is another attempt, if it is."""
    if span.end is SpanEnd.PREEMPTED:
        return "preempted"
    if span.lost is not None:
        return "source_lost"
    return "moving" if span.moving is not None else ""


@contextmanager
def _failures(observer: Observer, worker: str, call: str, request: Request, attempt: int) -> Iterator[None]:
    """Counts what a call raises, and keeps it as the cause of the attempt that may follow."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        observer.metrics.call_failures.labels(worker, call, name).inc()
        observer.causes.put(request.tenant, request.request_id, name)
        at, ref = observer.now(), request_ref(request.request_id)
        observer.timeline.instant("failed", at, ref, worker=worker, call=call, attempt=attempt, error=f"{name}: {error}")
        raise
