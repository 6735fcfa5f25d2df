"""Workers that may die: what calls to a process, and from one, do when it ends from one moment to the next, as after `kill -9`.

Around the ports of any worker. Calls under way fail, new ones too, and nothing that the dead one still says reaches anybody.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from jdisagg.dispatch.ports import (
    DecodePort,
    GenerateCall,
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
    WorkerStatus,
)
from jdisagg.errors import UnavailableError

T = TypeVar("T")


class Life:
    """Of one process: calls through `during` end when it does."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()

    def check(self) -> None:
        if self.dead.is_set():
            raise UnavailableError("connection refused")

    async def during(self, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        death = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or self.dead.is_set():
                raise UnavailableError("connection reset")
            return task.result()
        finally:
            for one in (task, death):
                one.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def each(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        self.check()
        try:
            while True:
                try:
                    yield await self.during(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(items, "aclose", None)
            if close is not None and not self.dead.is_set():
                await close()


@dataclass
class MortalPrefill:
    inner: PrefillPort
    life: Life

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        self.life.check()
        return await self.life.during(self.inner.prefill(call))

    async def cancel_prefill(self, handoff_id: int) -> None:
        self.life.check()
        await self.inner.cancel_prefill(handoff_id)

    async def status(self) -> WorkerStatus:
        self.life.check()
        return await self.inner.status()


@dataclass
class MortalDecode:
    inner: DecodePort
    life: Life

    async def reserve(self, call: ReserveCall) -> Reservation:
        self.life.check()
        return await self.life.during(self.inner.reserve(call))

    def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        return self.life.each(self.inner.generate(call))

    async def resume_source(self, call: ResumeCall) -> int | None:
        self.life.check()
        return await self.life.during(self.inner.resume_source(call))

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        self.life.check()
        await self.inner.cancel(reservation_id, child)

    async def status(self) -> WorkerStatus:
        self.life.check()
        return await self.inner.status()


@dataclass
class MortalPeer:
    """Between two processes: either may die."""

    inner: PeerPort
    life: Life
    ours: Life

    def _check(self) -> None:
        self.life.check()
        self.ours.check()

    async def hello(self, hello: PeerHello) -> PeerHello:
        self._check()
        return await self.inner.hello(hello)

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        return self.ours.each(self.life.each(self.inner.offers(handoff_id, attempt)))

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        self._check()
        await self.inner.acknowledge(handoff_id, offer_ids)

    async def abort(self, handoff_id: int, reason: str) -> None:
        self._check()
        await self.inner.abort(handoff_id, reason)
