"""The elastic controller receives the outcome of each request that says something about the
pools."""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from jdisagg.dispatch.roles.outcomes import OutcomeTap
from jdisagg.errors import DeadlineExceededError, InvalidRequestError, JdisaggError, OverloadedError
from jdisagg.request import FinishReason, Request, SamplingParams, StreamEvent, Timings, Usage
from jdisagg.router.admission import Quotas
from jdisagg.router.elastic_signals import EndedRequest
from tests.fakes.virtual_time import VirtualClock, run_virtually

REQUEST = Request("r", (1, 2, 3), SamplingParams())
TIMINGS = Timings(0.5, 1.5, 0.05, 0.1, 3.0, 0, 0, 0.0)


class ToyPath:
    def __init__(
        self, events: list[StreamEvent], error: Exception | None = None, seconds: float = 1.0
    ) -> None:
        self.events, self.error, self.seconds = events, error, seconds
        self.closed = False

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        try:
            for event in self.events:
                await asyncio.sleep(self.seconds)
                yield event
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


TOKEN = StreamEvent(child=0, first_index=0, token_ids=(5,))
LAST = StreamEvent(
    child=0,
    first_index=1,
    token_ids=(6,),
    finish_reason=FinishReason.LENGTH,
    usage=Usage(3, 2),
    timings=TIMINGS,
)


def told_of(path: ToyPath, request: Request = REQUEST) -> list[EndedRequest]:
    async def main() -> list[EndedRequest]:
        told: list[EndedRequest] = []
        try:
            async for _ in OutcomeTap(VirtualClock(), told.append).stream(path.stream, request):
                pass
        except JdisaggError:
            pass
        assert path.closed
        return told

    return run_virtually(main)


def test_a_request_that_ends_well_tells_what_it_met() -> None:
    assert told_of(ToyPath([TOKEN, LAST])) == [EndedRequest(2.0, 1.5, 0.05, 0.5)]
    alone = replace(LAST, usage=Usage(3, 1))
    assert told_of(ToyPath([alone])) == [EndedRequest(1.0, 1.5, None, 0.5)]
    one_each = replace(REQUEST, sampling=SamplingParams(n=2, max_tokens=1))
    assert told_of(ToyPath([TOKEN, replace(LAST, child=1)]), one_each) == [
        EndedRequest(2.0, 1.5, None, 0.5)
    ]


def test_a_refused_request_is_one_whose_first_token_never_came() -> None:
    assert told_of(ToyPath([], OverloadedError("full"))) == [EndedRequest(0.0, math.inf)]
    assert told_of(ToyPath([TOKEN], DeadlineExceededError("late"))) == [EndedRequest(1.0, 1.0)]


def test_bad_and_resumed_requests_say_nothing_of_the_pools() -> None:
    assert told_of(ToyPath([], InvalidRequestError("n"))) == []
    assert told_of(ToyPath([TOKEN, LAST]), replace(REQUEST, resumption=1)) == []


def test_a_tenant_that_asks_beyond_its_quota_says_nothing_of_the_pools() -> None:
    quotas = Quotas({"free": 1.0}, burst_seconds=10.0)
    quotas.take("free", 10.0, now=0.0)
    with pytest.raises(OverloadedError) as refused:
        quotas.take("free", 1.0, now=0.0)
    assert told_of(ToyPath([], refused.value)) == []
