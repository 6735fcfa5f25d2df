"""The request path as its clients see it, measured: TTFT, gaps between tokens, and each finished request's `Timings`."""

import asyncio
from collections.abc import AsyncGenerator

from jdisagg.dispatch.outcomes import Path
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.observe.observer import Observer
from jdisagg.observe.timeline import request_ref
from jdisagg.request import Request, StreamEvent


class ObservedPath:
    """Stands where a `RequestPath` stands. Closing an iterator of `stream` closes the path's."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._path = path
        self._observer = observer

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        observer, metrics, started = self._observer, self._observer.metrics, self._observer.now()
        ref, latest, result = request_ref(request.request_id), dict[int, float](), "cancelled"
        events = self._path.stream(request)
        try:
            async for event in events:
                if event.token_ids:
                    now = observer.now()
                    if not latest and request.resumption is None:
                        metrics.ttft.observe(now - started)
                        observer.timeline.instant("first token", now, ref)
                    elif event.child in latest:
                        metrics.tbt.observe(now - latest[event.child])
                    latest[event.child] = now
                    metrics.generated_tokens.inc(len(event.token_ids))
                if event.timings is not None and event.finish_reason is not None:
                    result = event.finish_reason.value
                    self._finished(request, event)
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            result = type(error).__name__
            raise
        finally:
            await events.aclose()
            now = observer.now()
            metrics.requests.labels(result).inc()
            metrics.request.labels(result).observe(now - started)
            prompt_tokens = len(request.prompt_token_ids)
            observer.timeline.span("request", started, now, ref, result=result, prompt_tokens=prompt_tokens, tenant=request.tenant)

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self._path.status()

    async def drain(self) -> None:
        await self._path.drain()

    def _finished(self, request: Request, event: StreamEvent) -> None:
        metrics, timings, usage = self._observer.metrics, event.timings, event.usage
        assert timings is not None
        metrics.queue.observe(timings.queue_seconds)
        if usage is not None:
            metrics.prompt_tokens.inc(usage.prompt_tokens)
            # Of a stream that was resumed the beginning was not seen here.
            if usage.completion_tokens > request.sampling.n and request.resumption is None:
                metrics.tpot.observe(timings.tpot_seconds)
                metrics.handoff_gap.observe(timings.handoff_gap_seconds)
