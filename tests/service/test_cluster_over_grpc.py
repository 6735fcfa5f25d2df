"""The toy cluster in real time with gRPC between path and workers and between the workers: the
oracle's tokens, and nothing left over."""

import asyncio

import pytest

from jdisagg.errors import JdisaggError
from tests.fakes.cluster import Collected, toy_request
from tests.service.doors import eventually
from tests.service.served_cluster import quiet, served


async def test_every_request_gets_the_oracles_tokens_and_nothing_is_left() -> None:
    async with served() as cluster:
        router = cluster.router()
        requests = [
            toy_request(
                number, prompt_tokens=3 + number, n=1 + number % 3, max_tokens=4 + number % 9
            )
            for number in range(16)
        ]
        requests += [
            toy_request(50 + number, temperature=1.0, seed=number, logprobs=2)
            for number in range(4)
        ]
        for request, collected in zip(
            requests, await asyncio.gather(*map(router.collect, requests)), strict=True
        ):
            cluster.cluster.check(request, collected)
            assert collected.timings is not None and collected.timings.kv_bytes_moved > 0
        await quiet(cluster)
        await router.close()


async def test_one_router_dies_and_the_others_streams_go_on() -> None:
    async with served() as cluster:
        dying, living = cluster.router(), cluster.router()
        request = toy_request(1, max_tokens=60)
        answer = asyncio.ensure_future(living.collect(request))
        lost = [
            asyncio.ensure_future(dying.collect(toy_request(10 + number, max_tokens=110)))
            for number in range(2)
        ]
        await eventually(lambda: len(cluster.cluster.decode._state.groups) == 3)
        await dying.close()
        for task in lost:
            with pytest.raises(JdisaggError):
                await asyncio.wait_for(task, 20)
        cluster.cluster.check(request, await answer)
        await quiet(cluster)
        await living.close()


async def test_a_suspended_request_goes_on_over_the_wire() -> None:
    """These workers have no cache: its pages are free, and it is computed anew."""
    async with served() as cluster:
        router, request = cluster.router(), toy_request(1, 20, max_tokens=100)
        collected, rests = Collected(), 0
        async for event in router.path.stream(request):
            collected.add(event)
            if len(collected.tokens[0]) >= 5 and not rests:
                rests += 1
                await router.path.suspend("", request.request_id)
                await quiet(cluster)
                router.path.resume("", request.request_id)
        cluster.cluster.check(request, collected)
        assert router.path.counters["requests_resumed"] == 1
        await quiet(cluster)
        await router.close()
