"""Requests that are suspended and go on, over fake meshes that check what lies in every page they
read: while one rests its slot and pages are others', and its stream is that of the oracle."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, SEEDS, Talk, limits
from tests.worker.spilling import LATER, Stream, check_empty, flip_all, long, resting, roomy


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_suspended_request_rests_without_pages_and_goes_on_from_host_memory(
    mode: Mode,
) -> None:
    async with roomy(mode=mode) as cluster:
        counters = cluster.decode.counters
        async with resting(cluster, long(1)):
            await asyncio.sleep(20.0)
            assert counters["sequences_spilled"] == 1 and counters["spills_restored"] == 0
            (spill,) = cluster.decode._spilled.spills
            assert spill.written and spill.tokens >= 40
        assert counters["spills_restored"] == 1 and counters["spills_missed"] == 0
        assert cluster.path.counters["preemptions"] == cluster.decode._state.preemptions == 0


async def test_each_child_of_a_suspended_request_goes_on() -> None:
    async with roomy() as cluster:
        request = long(1, n=3, temperature=0.9, seed=3, repetition_penalty=1.2)
        async with resting(cluster, request, tokens=20):
            assert cluster.decode.counters["sequences_spilled"] == 3
        assert cluster.decode.counters["spills_restored"] == 3


async def test_one_that_is_suspended_before_its_kv_has_come_goes_on_when_it_is_resumed() -> None:
    slow = Costs(prefill_token=1e-2, pull=1e-2, other=1e-5)
    for moment in (0.001, 0.1, 0.3, 0.4):
        async with roomy(costs=slow) as cluster:
            stream = Stream(cluster, long(1))
            await asyncio.sleep(moment)
            await stream.suspend(LATER)
            await asyncio.sleep(30.0)
            assert stream.tokens <= 1, "the prefill's first token at most"
            status = await cluster.decode.status()
            assert status.free_pages == status.total_pages
            await stream.suspend(None)
            await stream.end()
            await check_empty(cluster)


async def test_what_is_kept_for_too_long_is_computed_anew() -> None:
    async with roomy() as cluster:
        counters = cluster.decode.counters
        async with resting(cluster, long(1), keep_seconds=5.0):
            assert len(cluster.decode_mesh.host) > 0
            await asyncio.sleep(10.0)
            assert not cluster.decode_mesh.host and len(cluster.decode._spilled) == 0
            assert counters.labelled()["spills_missed", (("cause", "expired"),)] == 1
        assert counters["spills_restored"] == 0
        assert cluster.path.counters["preemptions"] == 1


@pytest.mark.parametrize("room_tokens", [0, 30])
async def test_without_room_in_host_memory_pages_are_free_all_the_same(room_tokens: int) -> None:
    async with roomy(TierRoom(room_tokens * 16, always=True)) as cluster:
        async with resting(cluster, long(1)):
            assert not cluster.decode_mesh.host
        assert cluster.path.counters["preemptions"] == 1


async def test_a_byte_that_flips_while_it_rests_costs_no_token() -> None:
    async with roomy() as cluster:
        async with resting(cluster, long(1)):
            assert flip_all(cluster.decode_mesh) > 0
        assert cluster.decode.counters["spills_missed"] == 1


async def test_its_deadline_is_not_moved_and_a_client_that_leaves_leaves_nothing() -> None:
    async with roomy() as cluster:
        late = Stream(cluster, replace(long(1), deadline_seconds=5.0))
        gone = Stream(cluster, long(2))
        for stream in (late, gone):
            await stream.until(5)
            await stream.suspend(LATER)
        await asyncio.sleep(1.0)
        assert len(cluster.decode._spilled) == 2
        gone.task.cancel()
        with pytest.raises(DeadlineExceededError):
            await late.task
        await check_empty(cluster)


async def test_a_drain_does_not_wait_for_who_rests() -> None:
    async with roomy() as cluster:
        stream = Stream(cluster, long(1))
        await stream.until(10)
        await stream.suspend(LATER)
        await asyncio.sleep(0.2)
        async with asyncio.timeout(1.0):
            await cluster.decode.drain(deadline_seconds=60.0)
        assert not cluster.decode_mesh.host
        await stream.suspend(None)  # a worker that drains takes who has accepted tokens
        await stream.end()
        await check_empty(cluster)


async def test_who_is_not_running_cannot_be_suspended() -> None:
    async with roomy() as cluster:
        request = replace(long(1), tenant="a")
        stream = Stream(cluster, request)
        await stream.until(1)
        with pytest.raises(InvalidRequestError, match="no request with request_id .* is running"):
            await cluster.path.suspend("b", "r1", LATER)
        await stream.end()
        with pytest.raises(InvalidRequestError, match="no request with request_id .* is running"):
            await stream.suspend(LATER)


@SEEDS
@pytest.mark.parametrize(("mode", "reuse"), [(Mode.DISAGGREGATED, True), (Mode.CHUNKED, False)])
async def test_random_rests_under_memory_pressure_cost_no_token(
    seed: int, mode: Mode, reuse: bool
) -> None:
    """Among requests that preempt each other; some are kept for less long than they rest."""
    async with roomy(
        TierRoom(1200 * 16, always=True),
        mode=mode,
        decode=limits(2, 64, 4),
        names=NAMES if reuse else None,
        growth_tokens=4,
        seed=seed,
    ) as cluster:
        talk, rng = Talk(seed), random.Random(seed)

        async def user() -> None:
            for _ in range(10):
                stream = Stream(cluster, talk.next())
                while not stream.task.done() and rng.random() < 0.8:
                    await asyncio.sleep(rng.random() * 0.3)
                    for keep_seconds in (rng.choice((0.2, LATER)), None):
                        if not stream.task.done():
                            await stream.suspend(keep_seconds)
                        await asyncio.sleep(rng.random() * rng.choice((0.01, 2.0)))
                await stream.end()
                talk.heard(stream.request, stream.collected)

        await asyncio.gather(*(user() for _ in range(6)))
        counters = cluster.decode.counters
        assert counters["spills_restored"] > 0 and counters["spills_missed"] > 0
        assert cluster.path.counters["requests_suspended"] > 10
        await check_empty(cluster)
