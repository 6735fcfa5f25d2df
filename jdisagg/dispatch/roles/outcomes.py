"""How requests fare, told to the elastic controller: a tap that stands where the request path
stands.

A request that was refused, or whose time was over before its first token, is one whose first token
never came. What the client itself ended, asked wrongly or resumed, or asked beyond its tenant's
quota, says nothing of the pools, and is not told."""

import math
from collections.abc import AsyncGenerator, Callable

from jdisagg.clock import Clock
from jdisagg.dispatch.frontend import ServingPath
from jdisagg.errors import (
    DeadlineExceededError,
    OverloadedError,
    QuotaExceededError,
    UnavailableError,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Request, StreamEvent
from jdisagg.router.elastic_signals import EndedRequest


class OutcomeTap:
    """`tell` gets each outcome as it is known. Closing an iterator of `stream` closes the
    path's."""

    def __init__(
        self, path: ServingPath, clock: Clock, tell: Callable[[EndedRequest], None]
    ) -> None:
        self._path = path
        self._clock = clock
        self._tell = tell

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        began, first = self._clock.now(), math.inf
        events = self._path.stream(request)
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

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self._path.status()

    async def suspend(self, tenant: str, request_id: str, keep_seconds: float | None) -> None:
        await self._path.suspend(tenant, request_id, keep_seconds)

    async def reset_cache(self) -> int:
        return await self._path.reset_cache()

    async def drain(self) -> None:
        await self._path.drain()
