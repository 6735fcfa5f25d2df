"""Measures requests at the beginning of the request path, where clients' requests enter it: TTFT,
times between tokens, and the `Timings` of each finished request. Also starts the root span of each
request's trace."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from opentelemetry.trace import SpanKind

from jdisagg.observe.observer import RESUMED, Observer
from jdisagg.observe.tracing import request_key
from jdisagg.request import Request, StreamEvent


class ObservedPath:
    """Middleware of a `ServingPath` that measures its streams (see
    `messages.ports_middleware.through`)."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def stream(
        self, proceed: Callable[[Request], AsyncGenerator[StreamEvent, None]], request: Request
    ) -> AsyncGenerator[StreamEvent, None]:
        observer, metrics, started = (
            self._observer,
            self._observer.metrics.requests,
            self._observer.now(),
        )
        tracing, latest, result = observer.tracing, dict[int, float](), "cancelled"
        cached: dict[str, int] = {}
        key = request_key(request.tenant, request.request_id)
        span, context = tracing.start(
            "request", started, None, request.request_id, SpanKind.SERVER, tenant=request.tenant
        )
        tracing.own(key, context)
        if request.resumption is not None:
            metrics.resumptions.inc()
            observer.causes.put(request.tenant, request.request_id, RESUMED)
        events = proceed(request)
        try:
            async for event in events:
                if event.token_ids:
                    now = observer.now()
                    if not latest and request.resumption is None:
                        metrics.ttft.observe(now - started)
                        tracing.instant("first token", now, context)
                    elif event.child in latest:
                        metrics.tbt.observe(now - latest[event.child])
                    latest[event.child] = now
                    metrics.generated_tokens.inc(len(event.token_ids))
                if event.timings is not None and event.finish_reason is not None:
                    result = event.finish_reason.value
                    cached = _cached_of(event)
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
            metrics.finished.labels(result).inc()
            metrics.seconds.labels(result).observe(now - started)
            prompt_tokens = len(request.prompt_token_ids)
            tracing.end(span, now, result=result, prompt_tokens=prompt_tokens, **cached)

    def _finished(self, request: Request, event: StreamEvent) -> None:
        metrics, timings, usage = self._observer.metrics.requests, event.timings, event.usage
        assert timings is not None
        metrics.queue.observe(timings.queue_seconds)
        if usage is None:
            return
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        for tier, tokens in usage.cached_by_tier.by_tier().items() if usage.cached_by_tier else ():
            if tokens:
                metrics.cached_tokens.labels(tier).inc(tokens)
        metrics.prompt_sizes.observe(usage.prompt_tokens)
        metrics.generated_sizes.observe(usage.completion_tokens)
        # Excludes resumed streams, because another call measured their beginning.
        if usage.completion_tokens > request.sampling.n and request.resumption is None:
            metrics.tpot.observe(timings.tpot_seconds)
            metrics.handoff_gap.observe(timings.handoff_gap_seconds)


def _cached_of(event: StreamEvent) -> dict[str, int]:
    usage = event.usage
    if usage is None or not usage.cached_tokens:
        return {}
    tiers = usage.cached_by_tier.by_tier() if usage.cached_by_tier else {}
    by_tier = {f"cached_{tier}": tokens for tier, tokens in tiers.items() if tokens}
    return {"cached_tokens": usage.cached_tokens, **by_tier}
