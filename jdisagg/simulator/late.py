"""Pages asked for after the prefill: how servers hand over that prefill first and look for room on the decode side then (DistServe).

Around the ports of any workers, to compare the live order with. Here a reservation is a promise; when the prompt has been computed, and
its KV lies with the prefill worker, pages are reserved and the pull begins. A full decode side then shows as a longer gap after the
first token, not as a later first token; the prefill side holds back when too much of its KV waits (worker/prefill_worker.py).

Knows calls, not pages. Invariant: of what a promise became, a cancel finds all.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from jdisagg.dispatch.ports import (
    DecodePort,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    PrefillPort,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    WorkerStatus,
    close_stream,
)
from jdisagg.errors import HandoffError


class Computed:
    """Which hand-offs' prompts have been computed."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}

    def event(self, handoff_id: int) -> asyncio.Event:
        return self._events.setdefault(handoff_id, asyncio.Event())

    def forget(self, handoff_id: int) -> None:
        self._events.pop(handoff_id, None)


class LatePrefill:
    """Tells when a prompt has been computed. Of one that never will be the router hears, and names another source or gives up."""

    def __init__(self, inner: PrefillPort, computed: Computed) -> None:
        self._inner = inner
        self._computed = computed

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        reply = await self._inner.prefill(call)
        self._computed.event(call.handoff_id).set()
        return reply

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self._inner.cancel_prefill(handoff_id)

    async def status(self) -> WorkerStatus:
        return await self._inner.status()


class LateDecode:
    """Promises at once; reserves when the prompt has been computed. `computes` says of a worker whether it computes prompts: the KV of one
    that hands a running sequence on is there already."""

    def __init__(
        self, inner: DecodePort, computed: Computed, worker: str, new_id: Callable[[], int], computes: Callable[[str], bool]
    ) -> None:
        self._inner = inner
        self._computed = computed
        self._worker = worker
        self._new_id = new_id
        self._computes = computes
        self._promised: dict[int, ReserveCall] = {}
        self._sources: dict[int, HandoffSource | None] = {}  # of those that generate and have no pages yet
        self._reserved: dict[int, int] = {}

    async def reserve(self, call: ReserveCall) -> Reservation:
        key = self._new_id()
        self._promised[key] = call
        return Reservation(key, self._worker, 0, call.deadline_seconds)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        key = call.reservation_id
        asked = self._promised.pop(key, None)
        if asked is None:
            raise self._not_held(key)
        self._sources[key] = call.source
        try:
            await self._prompt_computed(key)
            reservation = await self._inner.reserve(asked)
        finally:
            source = self._sources.pop(key)
        self._reserved[key] = reservation.reservation_id
        spans = self._inner.generate(replace(call, reservation_id=reservation.reservation_id, source=source))
        try:
            async for span in spans:
                yield span
        finally:
            await close_stream(spans)

    async def _prompt_computed(self, key: int) -> None:
        """By the source of the moment: another may take over meanwhile."""
        while (source := self._sources[key]) is not None and self._computes(source.worker):
            await self._computed.event(source.handoff_id).wait()
            self._computed.forget(source.handoff_id)
            if self._sources[key] is source:
                return

    async def resume_source(self, call: ResumeCall) -> int | None:
        key = call.reservation_id
        if key in self._reserved:
            return await self._inner.resume_source(replace(call, reservation_id=self._reserved[key]))
        old = self._sources.get(key)
        if old is None:
            raise self._not_held(key)
        self._sources[key] = call.source
        self._computed.event(old.handoff_id).set()  # who waits for it looks again
        return 0  # nothing has been pulled yet

    def _not_held(self, key: int) -> HandoffError:
        return HandoffError(f"worker {self._worker!r}: promise {key} is not held any more; ask for another")

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        self._promised.pop(reservation_id, None)
        real = self._reserved.get(reservation_id)
        if real is not None:
            await self._inner.cancel(real, child)
            if child is None:
                del self._reserved[reservation_id]

    async def status(self) -> WorkerStatus:
        return await self._inner.status()
