"""Reports the outcome of each request to the elastic controller.

A refused request, and a request whose deadline passed before its first token, are reported with an
infinite TTFT. Some requests are not reported, because their outcome does not depend on the size of
the pools: requests that the client cancelled or resumed, that had invalid fields, or that exceeded
a tenant's quota."""

import math
from collections.abc import AsyncGenerator, Callable

from jdisagg.clock import Clock
from jdisagg.errors import (
    DeadlineExceededError,
    OverloadedError,
    QuotaExceededError,
    UnavailableError,
)
from jdisagg.request import Request, StreamEvent
from jdisagg.router.elastic_signals import EndedRequest


class OutcomeTap:
    """Middleware of a `ServingPath` that reports the outcome of each request (see
    `messages.ports_middleware.through`)."""

    def __init__(self, clock: Clock, tell: Callable[[EndedRequest], None]) -> None:
        self._clock = clock
        self._tell = tell

    async def stream(
        self, proceed: Callable[[Request], AsyncGenerator[StreamEvent, None]], request: Request
    ) -> AsyncGenerator[StreamEvent, None]:
        began, first = self._clock.now(), math.inf
        events = proceed(request)
        try:
            async for event in events:
                if event.token_ids and first == math.inf:
                    first = self._clock.now() - began
                if event.timings is not None and event.usage is not None and not request.resumption:
                    timings = event.timings
                    pace = (
                        timings.tpot_seconds
                        if event.usage.completion_tokens > request.sampling.n
                        else None
                    )
                    self._tell(
                        EndedRequest(
                            self._clock.now(), timings.ttft_seconds, pace, timings.queue_seconds
                        )
                    )
                yield event
        except (OverloadedError, DeadlineExceededError, UnavailableError) as error:
            if not request.resumption and not isinstance(error, QuotaExceededError):
                self._tell(EndedRequest(self._clock.now(), first))
            raise
        finally:
            await events.aclose()
