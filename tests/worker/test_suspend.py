"""Requests that are suspended and go on, over fake meshes that check what lies in every page they
read: while one rests its slot and pages are others', and its stream is that of the oracle."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.messages.ports import Child, DecodePort, GenerateCall, ReserveCall, Span
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker.tasks import PromptTask
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, SEEDS, Talk, limits
from tests.worker.preempting import (
    Stream,
    check_empty,
    flip_all,
    hits,
    long,
    resting,
    roomy,
    scarce,
)


def chunks(cluster: Cluster) -> int:
    meshes = {id(mesh): mesh for mesh in (cluster.prefill_mesh, cluster.decode_mesh)}
    return sum(len(mesh.ran(PrefillChunk)) for mesh in meshes.values())


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_suspended_request_rests_without_pages_and_finds_its_blocks_again(
    mode: Mode,
) -> None:
    async with roomy(mode=mode) as cluster:
        async with resting(cluster, long(1)):
            await asyncio.sleep(20.0)
            assert not sum(hits(cluster).values())
        assert hits(cluster) == {"pages": 49}, "all of 50 tokens but the newest"
        assert cluster.path.counters["preemptions"] == cluster.decode._state.preemptions == 0


async def test_each_child_of_a_suspended_request_goes_on() -> None:
    async with roomy() as cluster:
        request = long(1, n=3, temperature=0.9, seed=3, repetition_penalty=1.2)
        async with resting(cluster, request, tokens=30):
            pass
        assert hits(cluster)["pages"] >= 3 * 32


async def test_one_that_is_suspended_before_its_kv_has_come_goes_on_when_it_is_resumed() -> None:
    slow = Costs(prefill_token=1e-2, pull=1e-2, other=1e-5)
    for moment in (0.0, 0.001, 0.1, 0.3, 0.4):
        async with roomy(costs=slow) as cluster:
            stream = Stream(cluster, long(1))
            await asyncio.sleep(moment)
            await stream.suspend()
            await stream.suspend()  # which changes nothing
            await asyncio.sleep(30.0)
            assert stream.tokens <= 1, "the prefill's first token at most"
            status = await cluster.decode.status()
            assert status.free_pages == status.total_pages
            stream.resume()
            await stream.end()
            await check_empty(cluster)


@pytest.mark.parametrize("prompt", [40, 5])
@pytest.mark.parametrize("mode", list(Mode))
async def test_an_answer_goes_on_without_computing_anything_again(mode: Mode, prompt: int) -> None:
    """Also where all its tokens are fewer than a block's."""
    async with roomy(mode=mode) as cluster:
        request = toy_request(1, prompt, max_tokens=30)
        async with resting(cluster, request, tokens=3) as stream:
            computed = chunks(cluster)
            known = prompt + stream.tokens
        assert chunks(cluster) == computed
        assert cluster.decode.counters["answers_continued"] == 1
        assert hits(cluster) == {"pages": known - 1}


class Late:
    """Tokens are on their way for a while."""

    def __init__(self, seconds: float = 0.01) -> None:
        self._seconds = seconds

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        async for span in proceed(call):
            await asyncio.sleep(self._seconds)
            yield span


async def test_an_answer_goes_on_from_fewer_tokens_than_its_worker_had_generated() -> None:
    """Its client has not received the newest ones."""
    ahead = 0
    for tokens in (2, 3, 8, 9, 10):
        async with roomy(wrap_decode=lambda port: through(DecodePort, port, Late())) as cluster:
            stream = Stream(cluster, long(1, max_tokens=20))
            await stream.until(tokens)
            (group,) = cluster.decode._state.groups.values()
            generated = len(group.children[0].generated)
            ahead += generated - stream.tokens
            await stream.suspend()
            whole = (40 + generated - 1) // 16 > (40 + stream.tokens - 1) // 16
            stream.resume()
            await stream.end()
            assert cluster.decode.counters["answers_continued"] == (0 if whole else 1)
            await check_empty(cluster)
    assert ahead >= 5


async def test_a_mesh_that_can_neither_compute_nor_go_on_leaves_the_newest_token() -> None:
    """Also where all tokens of the answer are in cached blocks, those of another one."""
    call = ReserveCall(toy_request(1, 40), 2, (Child(0, (1,) * 8),), 100.0, computes=True)
    task = PromptTask.of(call, 1, 0.0, 0.0, 16, computes=False, appends=False, continues=False)
    assert (task.prompt.tokens, task.prompt.most_known) == (48, 47)
    assert not (task.prompt.computes or task.prompt.continues)


@pytest.mark.parametrize("spoiled", [False, True])
async def test_a_tail_that_lost_its_pages_comes_back_from_host_memory(spoiled: bool) -> None:
    async with scarce(mode=Mode.CHUNKED) as cluster:
        async with resting(cluster, long(1), tokens=20) as stream:
            await cluster.ask(long(2))
            computed, known = chunks(cluster), 40 + stream.tokens
            if spoiled:
                assert flip_all(cluster.decode_mesh) > 0
        counters = cluster.decode.counters
        assert (chunks(cluster) > computed) is spoiled
        assert counters["answers_continued"] == (0 if spoiled else 1)
        assert spoiled or hits(cluster)["host"] > known % 16 - 1 > 0


async def test_a_tail_without_a_whole_block_before_it_comes_back_from_host_memory() -> None:
    async with scarce(mode=Mode.CHUNKED) as cluster:
        async with resting(cluster, toy_request(1, 5, max_tokens=30), tokens=3) as stream:
            for number in (2, 3):  # each takes all pages; the first passes over the tail
                await cluster.ask(toy_request(number, 60, max_tokens=36))
            computed, known = chunks(cluster), 5 + stream.tokens
            assert known < 16
        assert chunks(cluster) == computed
        assert cluster.decode.counters["answers_continued"] == 1
        assert hits(cluster)["host"] == known - 1


async def test_a_tail_in_host_memory_may_be_longer_than_what_its_client_received() -> None:
    ahead = continued = 0
    for tokens in (2, 3, 4, 5, 9, 10, 11):
        late = Late(0.02)
        async with scarce(
            mode=Mode.CHUNKED, wrap_decode=lambda port, late=late: through(DecodePort, port, late)
        ) as cluster:
            stream = Stream(cluster, long(1))
            await stream.until(tokens)
            (group,) = cluster.decode._state.groups.values()
            generated = len(group.children[0].generated)
            await stream.suspend()
            await asyncio.sleep(0.2)
            await cluster.ask(long(2))
            computed = chunks(cluster)
            whole = (40 + generated - 1) // 16 > (40 + stream.tokens - 1) // 16
            pages = -(-(40 + generated - 1) // 4) - -(-(40 + stream.tokens) // 4)
            stream.resume()
            await stream.end()
            assert cluster.decode.counters["host_blocks_broken"] == 0
            if not whole:
                assert chunks(cluster) == computed
                assert cluster.decode.counters["answers_continued"] == 1
                ahead, continued = max(ahead, pages), continued + 1
            await check_empty(cluster)
    assert ahead > 0, "some tails take more pages than what the client has"
    assert continued > 2


@pytest.mark.parametrize("spoiled", [False, True])
async def test_blocks_that_lost_their_pages_come_back_from_host_memory(spoiled: bool) -> None:
    async with scarce(mode=Mode.CHUNKED) as cluster:
        async with resting(cluster, long(1), tokens=20):
            await cluster.ask(long(2))
            counters = cluster.decode.counters
            assert counters["host_blocks_written"] > 0
            if spoiled:
                assert flip_all(cluster.decode_mesh) > 0
        assert (counters["host_tokens_restored"] == 0) is spoiled
        assert (counters["host_blocks_broken"] > 0) is spoiled


@pytest.mark.parametrize("without", [{"names": None}, {"decode_tiers": TierRoom()}])
async def test_what_is_no_longer_cached_is_computed_anew(without: dict[str, object]) -> None:
    async with scarce(**without) as cluster:
        async with resting(cluster, long(1)):
            await cluster.ask(long(2))
        assert not cluster.decode_mesh.host


async def test_its_deadline_is_not_moved_and_a_client_that_leaves_leaves_nothing() -> None:
    async with roomy() as cluster:
        late = Stream(cluster, replace(long(1), deadline_seconds=5.0))
        gone = Stream(cluster, long(2))
        for stream in (late, gone):
            await stream.until(5)
            await stream.suspend()
        await asyncio.sleep(1.0)
        gone.task.cancel()
        with pytest.raises(DeadlineExceededError):
            await late.task
        await check_empty(cluster)


async def test_a_drain_does_not_wait_for_who_rests() -> None:
    async with roomy() as cluster:
        stream = Stream(cluster, long(1))
        await stream.until(10)
        await stream.suspend()
        async with asyncio.timeout(1.0):
            await cluster.decode.drain(deadline_seconds=60.0)
        stream.resume()  # a worker that drains takes who has accepted tokens
        await stream.end()
        await check_empty(cluster)


async def test_who_is_not_running_cannot_be_suspended() -> None:
    async with roomy() as cluster:
        stream = Stream(cluster, replace(long(1), tenant="a"))
        await stream.until(1)
        with pytest.raises(InvalidRequestError, match="no request with request_id .* is running"):
            await cluster.path.suspend("b", "r1")
        await stream.end()
        with pytest.raises(InvalidRequestError, match="no request with request_id .* is running"):
            stream.resume()


@SEEDS
@pytest.mark.parametrize(
    ("mode", "reuse"), [(Mode.DISAGGREGATED, True), (Mode.CHUNKED, False), (Mode.CHUNKED, True)]
)
async def test_random_rests_under_memory_pressure_cost_no_token(
    seed: int, mode: Mode, reuse: bool
) -> None:
    """Among requests of several priorities that preempt each other."""
    async with roomy(
        TierRoom(1200 * 16, always=True),
        mode=mode,
        decode=limits(1, 64, 4),
        names=NAMES if reuse else None,
        growth_tokens=4,
        seed=seed,
    ) as cluster:
        talk, rng = Talk(seed), random.Random(seed)

        async def user() -> None:
            for _ in range(6):
                request = replace(talk.next(), priority=rng.choice((0, 0, 0, -1, 2)))
                stream = Stream(cluster, request)
                while not stream.task.done() and rng.random() < 0.8:
                    await asyncio.sleep(rng.random() * 0.3)
                    if not stream.task.done():
                        await stream.suspend()
                    await asyncio.sleep(rng.random() * rng.choice((0.01, 2.0)))
                    if not stream.task.done():
                        stream.resume()
                await stream.end()
                talk.heard(stream.request, stream.collected)

        await asyncio.gather(*(user() for _ in range(12)))
        assert (sum(hits(cluster).values()) > 0) is reuse
        assert cluster.path.counters["requests_suspended"] > 10
        assert cluster.path.counters["preemptions"] > 0
        await check_empty(cluster)


async def test_blocks_of_a_suspended_request_stay_longer_than_those_that_nobody_waits_for() -> None:
    """Its three blocks are the oldest of 29, and there is room for 25."""
    for suspends in (True, False):
        async with roomy(TierRoom(), decode=limits(pages=100)) as cluster:
            stream = Stream(cluster, long(1))
            await stream.until(10)
            if suspends:
                await stream.suspend()
            else:
                stream.task.cancel()
            await asyncio.sleep(0.2)
            for number in (2, 3, 4):
                await cluster.ask(long(number, max_tokens=100))
            chain = cluster.decode._kept.chain(long(1), long(1).prompt_token_ids)
            assert len(chain) == 2
            assert cluster.decode._kept.match(0, chain) == (2 if suspends else 0)
            if suspends:
                stream.resume()
                await stream.end()
