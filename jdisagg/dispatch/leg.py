"""One pass of some children of a request through the cluster: place, reserve, prefill and hand off, decode.

A leg posts what it learns (`Tokens`, `Preempted`, `LegEnded`) and decides nothing: whether to go again is the path's. Cancelling
the leg's task closes everything it holds on both sides. First tokens go out straight from the prefill's reply, while the KV
is still moving; spans from the decode side wait until the reply is known, so that tokens are posted in order.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from jdisagg.dispatch.ports import (
    Child,
    DecodePort,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    PrefillPort,
    Reservation,
    ReserveCall,
    Span,
    SpanEnd,
)
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError
from jdisagg.request import Request, TokenLogprobs
from jdisagg.router.placement import Placement

CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    child: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    kv_bytes_moved: int = 0


@dataclass(frozen=True, slots=True)
class Waited:
    """Time spent in queues before any token."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Preempted:
    child: int


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The leg is over; `error` is None when every child came to its own end."""

    leg: "Leg"
    error: Exception | None


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's time is over; posted once, by the journey's own timer."""


Fact = Tokens | Waited | Preempted | LegEnded | DeadlinePassed


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ports of all workers, by name."""

    prefill: Mapping[str, PrefillPort]
    decode: Mapping[str, DecodePort]


class Leg:
    """`remaining` gives the seconds until the request's deadline, `age` those since it came."""

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        children: tuple[Child, ...],
        attempt: int,
        new_id: Callable[[], int],
        now: Callable[[], float],
        arrived_at: float,
        deadline: float,
        post: Callable[[Fact], None],
    ) -> None:
        self.children = children
        self.attempt = attempt
        self.open = {child.index for child in children}
        self.ended_by_worker: set[int] = set()
        self.placement: Placement | None = None
        self._cluster = cluster
        self._request = request
        self._new_id = new_id
        self._now = now
        self._arrived_at = arrived_at
        self._deadline = deadline
        self._post = post
        self._reservation: Reservation | None = None
        self._firsts_known = asyncio.Event()

    async def run(self, placement: Placement) -> None:
        """Returns when every child has come to an end here. Raises what the workers raise."""
        self.placement = placement
        decode = self._cluster.decode[placement.decode]
        asked_at = self._now()
        call = ReserveCall(self._request, self.attempt, self.children, self._remaining(), self._age())
        self._reservation = await decode.reserve(call)
        self._post(Waited(self._now() - asked_at))
        try:
            if placement.prefill is None:
                self._firsts_known.set()
                await self._decode(decode, None)
            else:
                await self._hand_off(decode, self._cluster.prefill[placement.prefill], placement)
        finally:
            await _quietly(decode.cancel(self._reservation.reservation_id))

    async def end_child(self, child: int) -> None:
        """The path needs no more of this child."""
        self.open.discard(child)
        if self.placement is not None and self._reservation is not None and child not in self.ended_by_worker:
            await _quietly(self._cluster.decode[self.placement.decode].cancel(self._reservation.reservation_id, child))

    async def _hand_off(self, decode: DecodePort, prefill: PrefillPort, placement: Placement) -> None:
        assert placement.prefill is not None
        source = HandoffSource(placement.prefill, self._new_id())
        computing = asyncio.create_task(self._prefill(prefill, source.handoff_id, placement.decode))
        decoding = asyncio.create_task(self._decode(decode, source))
        whole = False
        try:
            await asyncio.wait({computing, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and isinstance(computing.exception(), HandoffError):
                # The receiver may have given up because it preempted us: then it says so, and that is no failure.
                await asyncio.wait({decoding}, timeout=CLOSE_SECONDS)
            elif computing.done() and computing.exception() is None:
                await asyncio.wait({decoding})
            if decoding.done():
                decoding.result()
                whole = computing.done() and computing.exception() is None
            else:
                computing.result()
        finally:
            for task in (computing, decoding):
                task.cancel()
            await asyncio.gather(computing, decoding, return_exceptions=True)
            if not whole:
                await _quietly(prefill.cancel_prefill(source.handoff_id))

    async def _prefill(self, prefill: PrefillPort, handoff_id: int, destination: str) -> None:
        call = PrefillCall(
            request=self._request,
            attempt=self.attempt,
            children=self.children,
            handoff_id=handoff_id,
            destination=destination,
            from_token=0,
            deadline_seconds=self._remaining(),
            age_seconds=self._age(),
        )
        reply = await prefill.prefill(call)
        self._post(Waited(reply.queue_seconds))
        accepted = {child.index: len(child.accepted) for child in self.children}
        for first in reply.tokens:
            # A child that was preempted while this reply was on its way goes again, and gets its first token there.
            if first.child in self.open:
                self._post(Tokens(first.child, accepted[first.child], (first.token_id,), (first.logprobs,) if first.logprobs else ()))
        self._firsts_known.set()

    async def _decode(self, decode: DecodePort, source: HandoffSource | None) -> None:
        assert self._reservation is not None
        call = GenerateCall(self._reservation.reservation_id, self.attempt, self._remaining(), source)
        spans = decode.generate(call)
        try:
            async for span in spans:
                if span.end is not SpanEnd.PREEMPTED or span.token_ids:
                    await self._firsts_known.wait()
                if span.end is not None:
                    self.ended_by_worker.add(span.child)
                self._post_span(span)
        finally:
            await _close(spans)
        missing = self.open - self.ended_by_worker
        if missing:
            raise UnavailableError(f"the stream of children {sorted(missing)} stopped before its end")

    def _post_span(self, span: Span) -> None:
        if span.token_ids or span.kv_bytes_moved:
            self._post(Tokens(span.child, span.first_index, span.token_ids, span.logprobs, span.kv_bytes_moved))
        if span.end is SpanEnd.PREEMPTED:
            self.open.discard(span.child)
            self._post(Preempted(span.child))

    def _remaining(self) -> float:
        return max(1e-3, self._deadline - self._now())

    def _age(self) -> float:
        return self._now() - self._arrived_at


async def _close(spans: AsyncIterator[Span]) -> None:
    """Closing a port's iterator cancels; what is no generator has nothing to close."""
    close = getattr(spans, "aclose", None)
    if close is not None:
        await close()


async def _quietly(call: Awaitable[None]) -> None:
    """A clean-up call whose failure changes nothing: the worker's lease frees what it missed."""
    with contextlib.suppress(JdisaggError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await call
