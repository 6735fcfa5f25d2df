"""Pages asked for after the prefill: how servers hand over that prefill first and look for room on
the decode side then (DistServe).

Middleware of the ports of any workers, to compare the live order with. Here a reservation is a
promise; when the prompt has been computed, and its KV lies with the prefill worker, pages are
reserved and the pull begins. Who waits for pages sends the heartbeats of a receiver meanwhile: its
KV waits as long as it must. A full decode side then shows as a longer gap after the first token,
not as a later first token; the prefill side holds back when too much of its KV waits
(worker/prefill_worker.py).

Knows calls, not pages. Invariant: of what a promise became, a cancel finds all."""

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
    """Which hand-offs' prompts have been computed. Middleware of prefill ports: of a prompt that
    never will be the router learns, and names another source or gives up.

    Args:
      computes: Whether a worker computes prompts; the KV of one that hands a running sequence on
        is there already.
      peer: The port of a source.
      heartbeat_seconds: Between heartbeats to a source whose KV waits.
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
        """Until cancelled: the source's KV stays. One that is gone is noticed when it is pulled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            source = source_now()
            if source is not None and self.computes(source.worker):
                with contextlib.suppress(JdisaggError):
                    await self._peer(source).acknowledge(source.handoff_id, ())


class DeferredReservation:
    """Middleware of one decode port: promises at once, reserves when the prompt has been computed.

    Args:
      computed: The prompts of the whole cluster.
      worker: The decode worker's name.
      new_id: Draws ids of promises.
    """

    def __init__(self, computed: ComputedPrompts, worker: str, new_id: Callable[[], int]) -> None:
        self._computed = computed
        self._worker = worker
        self._new_id = new_id
        self._promised: dict[int, Callable[[], Awaitable[Reservation]]] = {}
        # of those that generate and have no pages yet
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
        """By the source of the moment: another may take over meanwhile."""
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
        self._computed.event(old.handoff_id).set()  # who waits for it looks again
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
