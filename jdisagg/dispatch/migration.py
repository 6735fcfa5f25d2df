"""A running sequence on its way to another decode worker, as an attempt sees it.

The old worker's stream goes on meanwhile; the new one's waits here until the old one has reported
that the sequence moved, so that the order of tokens is kept. When the migration fails the old
worker goes on, and the client sees nothing of it."""

import asyncio
from collections.abc import AsyncIterator

from jdisagg.dispatch.request_context import RequestContext, ReservationHandle, quietly, reserve
from jdisagg.dispatch.request_run import RequestRun
from jdisagg.errors import HandoffError
from jdisagg.messages.ports import Child, GenerateCall, HandoffSource, Span, close_stream


class Migration:
    """Begins at once: `children` (one) go from worker `origin`, which offers them under
    `source`."""

    def __init__(
        self,
        context: RequestContext,
        run: RequestRun,
        children: tuple[Child, ...],
        origin: str,
        source: HandoffSource,
    ) -> None:
        self._context = context
        self._run = run
        self._origin = origin
        self._held: ReservationHandle | None = None
        self._spans: asyncio.Queue[Span | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._take_over(children, source))

    def arrived(self) -> tuple[ReservationHandle, AsyncIterator[Span]]:
        """The old worker has let go: where the sequence is now, and its stream. Raises HandoffError
        when no worker has it."""
        if self._held is None:
            raise HandoffError(f"a sequence left worker {self._origin!r} and arrived nowhere")
        return self._held, self._stream()

    async def close(self) -> None:
        """The migration is not wanted (any more)."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._free()

    async def _take_over(self, children: tuple[Child, ...], source: HandoffSource) -> None:
        context, run, spans = self._context, self._run, None
        try:
            worker = await context.placer.another_decode(frozenset({self._origin}) | run.avoid)
            held = self._held = await reserve(
                context, run, worker, children, run.next_attempt(), whole=True
            )
            spans = held.port.generate(
                GenerateCall(held.key, held.attempt, run.remaining_seconds(), source)
            )
            async for span in spans:
                if span.lost is not None:
                    raise HandoffError(
                        f"a sequence could not move from {self._origin!r} to {worker!r}:"
                        f" {span.lost.reason}"
                    )
                self._spans.put_nowait(span)
            self._spans.put_nowait(None)
        except Exception as error:  # whatever it is, the reader of the stream must get it
            run.as_planned = False
            context.counters.add("moves_failed")
            self._spans.put_nowait(error)
            await self._free()
        finally:
            await close_stream(spans)

    async def _free(self) -> None:
        if self._held is not None:
            seconds = self._context.limits.timeouts.request.close_seconds
            await quietly(self._held.port.cancel(self._held.key), seconds)

    async def _stream(self) -> AsyncIterator[Span]:
        try:
            while (item := await self._spans.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
