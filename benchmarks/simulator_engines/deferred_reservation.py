"""Decode pages reserved after the prefill, as in servers that prefill first and then look for room
on the decode side (DistServe).

It is middleware of worker ports, to compare with the live order. A reservation is a promise. When
the prompt has been computed and its KV is on the prefill worker, pages are reserved and the pull
begins. While it waits for pages, it sends a receiver's heartbeats, so that the KV stays. A full
decode side then lengthens the gap after the first token, not the first token's delay. The prefill
worker stops admitting when too much of its KV waits (worker/prefill_worker.py).

Knows calls, not pages. Invariant: a cancel finds everything that a promise became."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.messages.ports import (
    GenerateCall,
    HandoffSource,
    PeerPort,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    close_stream,
)


class ComputedPrompts:
    """Tracks which hand-offs' prompts have been computed, as middleware of prefill ports. If a
    prompt fails, the router names another source or gives up.

    Args:
      computes: Returns whether a worker prefills. A worker that migrates a sequence already has its
        KV.
      peer: Returns the port of a source.
      heartbeat_seconds: Interval of heartbeats to a source whose KV waits.
    """

    def __init__(
        self,
        computes: Callable[[str], bool],
        peer: Callable[[HandoffSource], PeerPort],
        heartbeat_seconds: float,
    ) -> None:
        self.computes = computes
        self._peer = peer
        self._heartbeat_seconds = heartbeat_seconds
        self._events: dict[int, asyncio.Event] = {}

    def event(self, handoff_id: int) -> asyncio.Event:
        return self._events.setdefault(handoff_id, asyncio.Event())

    def forget(self, handoff_id: int) -> None:
        self._events.pop(handoff_id, None)

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        reply = await proceed(call)
        self.event(call.handoff_id).set()
        return reply

    async def keep(self, source_now: Callable[[], HandoffSource | None]) -> None:
        """Sends heartbeats to the source until cancelled. The pull detects a source that is
        gone."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            source = source_now()
            if source is not None and self.computes(source.worker):
                with contextlib.suppress(JdisaggError):
                    await self._peer(source).acknowledge(source.handoff_id, ())


class DeferredReservation:
    """Middleware of one decode port that promises at once and reserves after the prefill.

    Args:
      computed: Prompts of the whole cluster.
      worker: Name of the decode worker.
      new_id: Draws ids of promises.
    """

    def __init__(self, computed: ComputedPrompts, worker: str, new_id: Callable[[], int]) -> None:
        self._computed = computed
        self._worker = worker
        self._new_id = new_id
        self._promised: dict[int, Callable[[], Awaitable[Reservation]]] = {}
        # Sources of requests that wait for pages.
        self._sources: dict[int, HandoffSource | None] = {}
        self._reserved: dict[int, int] = {}

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        key = self._new_id()
        self._promised[key] = lambda: proceed(call)
        return Reservation(key, self._worker, 0, call.deadline_seconds)

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        key = call.reservation_id
        reserve = self._promised.pop(key, None)
        if reserve is None:
            raise self._not_held(key)
        self._sources[key] = call.source
        try:
            await self._prompt_computed(key)
            keeping = asyncio.create_task(self._computed.keep(lambda: self._sources[key]))
            try:
                reservation = await reserve()
            finally:
                keeping.cancel()
        finally:
            source = self._sources.pop(key)
        self._reserved[key] = reservation.reservation_id
        spans = proceed(
            msgspec.structs.replace(call, reservation_id=reservation.reservation_id, source=source)
        )
        try:
            async for span in spans:
                yield span
        finally:
            await close_stream(spans)

    async def _prompt_computed(self, key: int) -> None:
        """Waits for the current source, which may be replaced in the meantime."""
        while (source := self._sources[key]) is not None and self._computed.computes(source.worker):
            await self._computed.event(source.handoff_id).wait()
            self._computed.forget(source.handoff_id)
            if self._sources[key] is source:
                return

    async def resume_source(
        self, proceed: Callable[[ResumeCall], Awaitable[int | None]], call: ResumeCall
    ) -> int | None:
        key = call.reservation_id
        if key in self._reserved:
            return await proceed(msgspec.structs.replace(call, reservation_id=self._reserved[key]))
        old = self._sources.get(key)
        if old is None:
            raise self._not_held(key)
        self._sources[key] = call.source
        self._computed.event(old.handoff_id).set()  # wakes the waiter, which reads the new source
        return 0  # nothing has been pulled yet

    async def cancel(
        self,
        proceed: Callable[[int, int | None], Awaitable[None]],
        reservation_id: int,
        child: int | None = None,
    ) -> None:
        self._promised.pop(reservation_id, None)
        real = self._reserved.get(reservation_id)
        if real is not None:
            await proceed(real, child)
            if child is None:
                del self._reserved[reservation_id]

    def _not_held(self, key: int) -> HandoffError:
        return HandoffError(
            f"worker {self._worker!r}: promise {key} is not held any more; ask for another"
        )
