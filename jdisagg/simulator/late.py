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


class Computed:
    """Which hand-offs' prompts have been computed."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}

    def event(self, handoff_id: int) -> asyncio.Event:
        return self._events.setdefault(handoff_id, asyncio.Event())

    def forget(self, handoff_id: int) -> None:
        self._events.pop(handoff_id, None)


class LatePrefill:
    """Tells when a prompt has been computed, or never will be."""

    def __init__(self, inner: PrefillPort, computed: Computed) -> None:
        self._inner = inner
        self._computed = computed

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        try:
            return await self._inner.prefill(call)
        finally:
            self._computed.event(call.handoff_id).set()

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self._inner.cancel_prefill(handoff_id)

    async def status(self) -> WorkerStatus:
        return await self._inner.status()


class LateDecode:
    """Promises at once; reserves when the prompt has been computed."""

    def __init__(self, inner: DecodePort, computed: Computed, worker: str, new_id: Callable[[], int]) -> None:
        self._inner = inner
        self._computed = computed
        self._worker = worker
        self._new_id = new_id
        self._promised: dict[int, ReserveCall] = {}
        self._reserved: dict[int, int] = {}

    async def reserve(self, call: ReserveCall) -> Reservation:
        key = self._new_id()
        self._promised[key] = call
        return Reservation(key, self._worker, 0, call.deadline_seconds)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        asked = self._promised.pop(call.reservation_id)
        if call.source is not None:
            handoff_id = call.source.handoff_id
            await self._computed.event(handoff_id).wait()
            self._computed.forget(handoff_id)
        reservation = await self._inner.reserve(asked)
        self._reserved[call.reservation_id] = reservation.reservation_id
        spans = self._inner.generate(replace(call, reservation_id=reservation.reservation_id))
        try:
            async for span in spans:
                yield span
        finally:
            await close_stream(spans)

    async def resume_source(self, call: ResumeCall) -> int | None:
        return await self._inner.resume_source(replace(call, reservation_id=self._reserved[call.reservation_id]))

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        self._promised.pop(reservation_id, None)
        real = self._reserved.get(reservation_id)
        if real is not None:
            await self._inner.cancel(real, child)
            if child is None:
                del self._reserved[reservation_id]

    async def status(self) -> WorkerStatus:
        return await self._inner.status()
