"""Ports as they are across a bad network: replies come late, and a caller that goes away is not noticed on the other side.

Around any port. What the caller does explicitly (cancel calls) still arrives; what rides on task cancellation or on closing an
iterator is lost, so that tests see who frees.
"""

import asyncio
from collections.abc import AsyncIterator

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
)
from jdisagg.errors import JdisaggError


class LossyPrefill:
    """Replies come `delay_seconds` late; cancelling the call does not reach the worker."""

    def __init__(self, inner: PrefillPort, delay_seconds: float = 0.0) -> None:
        self._inner = inner
        self._delay_seconds = delay_seconds
        self._tasks: set[asyncio.Task[PrefillReply]] = set()
        self.calls: list[PrefillCall] = []

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        self.calls.append(call)
        task = asyncio.create_task(self._inner.prefill(call))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._tasks.add(task)
        reply = await asyncio.shield(task)
        await asyncio.sleep(self._delay_seconds)
        return reply

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self._inner.cancel_prefill(handoff_id)

    async def status(self) -> WorkerStatus:
        return await self._inner.status()


class LossyDecode:
    """Spans come `delay_seconds` late; closing the iterator does not reach the worker."""

    def __init__(self, inner: DecodePort, delay_seconds: float = 0.0) -> None:
        self._inner = inner
        self._delay_seconds = delay_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self.calls: list[tuple[float, ReserveCall]] = []

    async def reserve(self, call: ReserveCall) -> Reservation:
        self.calls.append((asyncio.get_running_loop().time(), call))
        return await self._inner.reserve(call)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        arrived: asyncio.Queue[Span | JdisaggError | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for span in self._inner.generate(call):
                    arrived.put_nowait(span)
                arrived.put_nowait(None)
            except JdisaggError as error:
                arrived.put_nowait(error)

        self._tasks.add(asyncio.create_task(pump()))
        while (item := await arrived.get()) is not None:
            await asyncio.sleep(self._delay_seconds)
            if isinstance(item, JdisaggError):
                raise item
            yield item

    async def resume_source(self, call: ResumeCall) -> int | None:
        return await self._inner.resume_source(call)

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        await self._inner.cancel(reservation_id, child)

    async def status(self) -> WorkerStatus:
        return await self._inner.status()
