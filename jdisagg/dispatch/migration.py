"""The router's part in migrating a running sequence to another decode worker.

The router buffers the new worker's stream until the old worker reports that the migration is
complete, so that tokens stay in order. If the migration fails, the old worker continues and the
client's stream is not affected."""

import asyncio
from collections.abc import AsyncIterator

from jdisagg.dispatch.request_context import RequestContext, ReservationHandle, quietly, reserve
from jdisagg.dispatch.request_run import RequestRun
from jdisagg.errors import HandoffError
from jdisagg.messages.ports import Child, GenerateCall, HandoffSource, Span, close_stream
from jdisagg.router.accounts import Charges


class Migration:
    """One migration of a sequence. It starts when the object is created.

    Args:
        source: Hand-off through which the new worker pulls the child's KV from `origin`.
    """

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
        # Taken now: if the sequence is preempted before its migration reaches a worker, the attempt
        # that follows is the later one.
        self._attempt = run.next_attempt()
        self._placed: Charges | None = None
        self._held: ReservationHandle | None = None
        self._spans: asyncio.Queue[Span | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._take_over(children, source))

    def arrived(self) -> tuple[ReservationHandle, Charges, AsyncIterator[Span]]:
        """Returns the reservation at the new worker, its charges and its stream of tokens. Must be
        called after the old worker has released the sequence. Raises HandoffError if no worker
        received the sequence."""
        if self._held is None or self._placed is None:
            raise HandoffError(
                f"a sequence left worker {self._origin!r}, and no other worker received it"
            )
        return self._held, self._placed, self._stream()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._free()

    async def _take_over(self, children: tuple[Child, ...], source: HandoffSource) -> None:
        context, run, spans = self._context, self._run, None
        try:
            avoid = run.avoid(context.placer.life) | run.unfit | {self._origin}
            worker, self._placed = await context.placer.another_decode(
                avoid, self._origin, run.request, children
            )
            held = self._held = await reserve(
                context, run, worker, children, self._attempt, whole=True
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
        except Exception as error:  # raised where the stream is read
            run.as_planned = False
            context.counters.add("moves_failed")
            self._spans.put_nowait(error)
            await self._free()
        finally:
            await close_stream(spans)

    async def _free(self) -> None:
        if self._placed is not None:
            self._placed.end()
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
