"""The same streams when every port call travels as bytes."""

import asyncio

import pytest

from jdisagg.config import LimitsConfig, Mode
from jdisagg.errors import DeadlineExceededError, HandoffError, InvalidRequestError
from tests.dispatch.storms import mixed_requests, stream_all
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Faults, toy_limits


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_storm_over_the_wire_changes_no_token(mode: Mode) -> None:
    async with Cluster(
        mode, decode=toy_limits(pages_per_rank=14), growth_tokens=1, wire=True
    ) as cluster:
        assert await stream_all(cluster, mixed_requests(12)) > 0


async def test_cancels_and_errors_keep_their_meaning_over_the_wire() -> None:
    faults = Faults(pull_error=lambda _: "lost")
    async with Cluster(
        decode_faults=faults, limits=LimitsConfig(max_attempts=2), wire=True
    ) as cluster:
        with pytest.raises(HandoffError, match="lost"):
            await cluster.collect(toy_request(1))
        with pytest.raises(InvalidRequestError, match="128"):
            await cluster.collect(toy_request(1, prompt_tokens=128))
        await cluster.check_quiet()
    async with Cluster(wire=True) as cluster:
        with pytest.raises(DeadlineExceededError, match=r"after \d+ tokens"):
            await cluster.collect(toy_request(1, max_tokens=90, deadline_seconds=0.2))
        leaving = asyncio.create_task(cluster.collect(toy_request(2, max_tokens=90)))
        await asyncio.sleep(0.2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await cluster.check_quiet()
