"""Requests of higher priority on full workers, over fake meshes that check what lies in every page
they read: others are preempted and come back, each stream is the oracle's, nothing is left."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.request import Request
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.sequences import PRIORITY_SECONDS
from tests.fakes.cluster import toy_request
from tests.fakes.fake_executor import Costs
from tests.fakes.fake_states import with_state
from tests.worker.conversations import NAMES, SEEDS, limits
from tests.worker.preempting import ROOMY, Stream, check_empty, scarce
from tests.worker.states import stateful


def low(number: int, **sampling: object) -> Request:
    options: dict[str, object] = {"max_tokens": 60}
    return replace(toy_request(number, 40, **(options | sampling)), priority=-1)  # type: ignore[arg-type]


def high(number: int, priority: int = 5, **sampling: object) -> Request:
    return replace(toy_request(1000 + number, 40, max_tokens=8, **sampling), priority=priority)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("room", [ROOMY, TierRoom()], ids=["host", "recomputed"])
async def test_low_streams_give_way_to_high_ones_and_lose_no_token(
    mode: Mode, room: TierRoom
) -> None:
    async with scarce(room, pages=60, mode=mode) as cluster:
        streams = [Stream(cluster, low(number)) for number in range(12)]
        await streams[0].until(5)
        began = cluster.clock.now()
        rival = Stream(cluster, high(0))
        await rival.until(1)
        waited = cluster.clock.now() - began
        await rival.end()
        assert cluster.decode.counters["sequences_yielded"] > 0
        for stream in streams:
            await stream.end()
        assert waited < 0.5 * (cluster.clock.now() - began)
        await check_empty(cluster)


@SEEDS
@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.CHUNKED])
async def test_storms_of_several_priorities_leave_every_stream_as_it_is(
    mode: Mode, seed: int
) -> None:
    draw = random.Random(seed)
    async with scarce(
        pages=90, mode=mode, decode=limits(2, 60, 4), names=NAMES, seed=seed
    ) as cluster:
        streams = []
        for number in range(60):
            options = {"n": draw.choice([1, 1, 2]), "temperature": draw.choice([0.0, 0.9])}
            one = low(number, seed=number, max_tokens=draw.randint(2, 60), **options)
            one = replace(one, priority=draw.choice([-3, 0, 0, 2, 7]))
            streams.append(Stream(cluster, one))
            await asyncio.sleep(draw.expovariate(100.0))
        for stream in streams:
            await stream.end()
        assert cluster.decode.counters["sequences_yielded"] > 0
        await check_empty(cluster)


async def test_sequences_of_hybrid_models_give_way_too() -> None:
    hybrid = with_state(limits(pages=60))
    async with scarce(decode=hybrid, prefill=stateful(1, 400)) as cluster:
        streams = [Stream(cluster, low(number)) for number in range(12)]
        await streams[0].until(5)
        await Stream(cluster, high(0)).end()
        assert cluster.decode.counters["sequences_yielded"] > 0
        for stream in streams:
            await stream.end()
        await check_empty(cluster)


async def test_nobody_gives_way_to_an_equal_priority() -> None:
    async with scarce(pages=60) as cluster:
        requests = [high(number, priority=3) for number in range(20)]
        await cluster.collect_all(requests)
        assert cluster.decode.counters["sequences_yielded"] == 0


async def test_a_queue_full_of_low_requests_refuses_no_high_one() -> None:
    async with scarce(pages=24, queue_limit=4) as cluster:
        streams = [Stream(cluster, low(number, max_tokens=30)) for number in range(5)]
        await streams[0].until(3)
        await Stream(cluster, high(1)).end()
        for stream in streams:
            await stream.end()
        await check_empty(cluster)


async def test_a_low_stream_does_not_give_way_for_ever() -> None:
    """The rank has room for one of them. Each high request would preempt the low stream."""
    slow = Costs(decode_step=0.1, pull=1e-5, other=1e-5)
    async with scarce(pages=24, costs=slow) as cluster:
        low_one = Stream(cluster, replace(low(1, max_tokens=50), priority=0))
        await low_one.until(3)
        highs = []
        for number in range(150):
            highs.append(Stream(cluster, high(number, priority=1)))
            await asyncio.sleep(0.4)
            if low_one.task.done():
                break
        assert PRIORITY_SECONDS < cluster.clock.now() < 2 * PRIORITY_SECONDS
        assert cluster.decode.counters["sequences_yielded"] > 0
        for stream in (low_one, *highs):
            await stream.end()
        await check_empty(cluster)
