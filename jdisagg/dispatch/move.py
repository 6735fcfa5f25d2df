"""A running sequence on its way to another decode worker, as the path sees it.

The old worker's stream goes on meanwhile; the new one's waits here until the old one has said that the sequence moved, so that the order
of tokens is kept. When the move fails the old worker goes on, and nothing of this is seen.
"""

import asyncio
from collections.abc import AsyncIterator

from jdisagg.dispatch.ports import Child, GenerateCall, HandoffSource, Span, close_stream
from jdisagg.dispatch.trip import Hold, Retried, Trip, quietly
from jdisagg.errors import HandoffError


class Move:
    """Begins at once: `children` (one) go from worker `origin`, which offers them under `source`."""

    def __init__(self, trip: Trip, children: tuple[Child, ...], origin: str, source: HandoffSource) -> None:
        self._trip = trip
        self._children = children
        self._origin = origin
        self._source = source
        self._hold: Hold | None = None
        self._spans: asyncio.Queue[Span | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def arrived(self) -> tuple[Hold, AsyncIterator[Span]]:
        """The old worker has let go: where the sequence is now, and its stream. Raises when nobody has it."""
        if self._hold is None:
            raise HandoffError(f"a sequence left worker {self._origin!r} and arrived nowhere")
        self._trip.post(Retried("sequences_moved"))
        return self._hold, self._stream()

    async def close(self) -> None:
        """The move is not wanted (any more)."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._hold is not None:
            await quietly(self._hold.port.cancel(self._hold.key))

    async def _run(self) -> None:
        spans = None
        try:
            worker = await self._trip.choose_decode(frozenset({self._origin}))
            hold = await self._trip.reserve(worker, self._children, self._trip.next_attempt())
            self._hold = hold
            spans = hold.port.generate(GenerateCall(hold.key, hold.attempt, self._trip.remaining(), self._source))
            async for span in spans:
                if span.lost is not None:
                    raise HandoffError(f"a sequence could not move from {self._origin!r} to {worker!r}: {span.lost.reason}")
                self._spans.put_nowait(span)
            self._spans.put_nowait(None)
        except Exception as error:  # whatever it is, whoever waits for the stream must hear of it
            self._trip.post(Retried("moves_failed"))
            self._spans.put_nowait(error)
            if self._hold is not None:
                await quietly(self._hold.port.cancel(self._hold.key))
        finally:
            await close_stream(spans)

    async def _stream(self) -> AsyncIterator[Span]:
        try:
            while (item := await self._spans.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
