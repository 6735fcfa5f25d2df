"""Few pages, many requests: preemption, queues and back-pressure change no token and leak
nothing."""

import asyncio

import pytest
from hypothesis import strategies as st

from jdisagg.config import LimitsConfig, Mode
from jdisagg.messages.step_commands import InsertBlock, PrefillChunk, PullBlock
from tests.dispatch.storms import mixed_requests, stream_all
from tests.fakes.cluster import Cluster, Fleet, toy_request
from tests.fakes.fake_executor import Costs, Faults, toy_limits
from tests.fakes.fake_states import Keeps, kept_as_it_is, with_state
from tests.fakes.virtual_time import run_virtually
from tests.lanes import given_examples


@pytest.mark.parametrize("keeps", [kept_as_it_is, with_state], ids=["kv", "state"])
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", list(Mode))
async def test_preemption_loses_and_changes_no_token(
    mode: Mode, ranks: int, steps_per_dispatch: int, keeps: Keeps
) -> None:
    tight = keeps(toy_limits(ranks=ranks, pages_per_rank=14, slots_per_rank=4))
    async with Cluster(
        mode,
        decode=tight,
        prefill=keeps(toy_limits()),
        growth_tokens=1,
        steps_per_dispatch=steps_per_dispatch,
        wire=ranks == 2,
    ) as cluster:
        assert await stream_all(cluster, mixed_requests(16)) > 0


@given_examples(
    15,
    40,
    mode=st.sampled_from(list(Mode)),
    pages=st.integers(12, 40),
    slots=st.integers(1, 5),
    growth=st.sampled_from([1, 3, 8, 64]),
    steps=st.sampled_from([1, 2, 5]),
    page_size=st.sampled_from([4, 5, 8]),
    prefill_pages=st.integers(12, 30),
    pull_seconds=st.sampled_from([0.0, 0.005, 0.5]),
    step_seconds=st.sampled_from([0.0001, 0.01]),
    keeps=st.sampled_from([kept_as_it_is, with_state]),
    shapes=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(1, 4), st.floats(0, 0.5)),
        min_size=1,
        max_size=8,
    ),
)
def test_any_mix_in_any_room_gives_the_oracles_streams(
    mode: Mode,
    pages: int,
    slots: int,
    growth: int,
    steps: int,
    page_size: int,
    prefill_pages: int,
    pull_seconds: float,
    step_seconds: float,
    keeps: Keeps,
    shapes: list[tuple[int, int, int, float]],
) -> None:
    async def main() -> None:
        decode = toy_limits(pages_per_rank=pages, slots_per_rank=slots, page_size=page_size)
        prefill = toy_limits(pages_per_rank=prefill_pages, page_size=4)
        decode, prefill = keeps(decode), keeps(prefill)
        costs = Costs(pull=pull_seconds, decode_step=step_seconds)
        async with Cluster(
            mode,
            decode=decode,
            prefill=prefill,
            growth_tokens=growth,
            steps_per_dispatch=steps,
            costs=costs,
        ) as cluster:

            async def late(number: int, shape: tuple[int, int, int, float]) -> None:
                prompt_tokens, max_tokens, n, delay = shape
                await asyncio.sleep(delay)
                request = toy_request(
                    number,
                    prompt_tokens,
                    stop_ids=(5,),
                    max_tokens=max_tokens,
                    n=n,
                    temperature=1.0,
                    seed=number,
                )
                await cluster.ask(request)

            await asyncio.gather(*(late(number, shape) for number, shape in enumerate(shapes)))

    run_virtually(main)


async def test_the_oldest_request_is_never_preempted_for_a_younger_one() -> None:
    async with Cluster(decode=toy_limits(pages_per_rank=14), growth_tokens=1) as cluster:
        oldest = asyncio.create_task(cluster.collect(toy_request(0, max_tokens=40)))
        await asyncio.sleep(0.001)
        younger = [
            asyncio.create_task(cluster.collect(toy_request(number, max_tokens=40)))
            for number in range(1, 6)
        ]
        answer = await oldest
        assert answer.timings is not None and answer.timings.preemptions == 0
        answers = await asyncio.gather(*younger)
        assert sum(answer.timings.preemptions for answer in answers if answer.timings) > 0


async def test_a_full_decode_pool_holds_the_prefill_back() -> None:
    async with Cluster(
        decode=toy_limits(pages_per_rank=8, slots_per_rank=2), growth_tokens=64
    ) as cluster:
        requests = [toy_request(number, prompt_tokens=9, max_tokens=20) for number in range(6)]
        first = asyncio.create_task(cluster.collect(requests[0]))
        await asyncio.sleep(0.05)
        rest = [asyncio.create_task(cluster.collect(request)) for request in requests[1:]]
        await asyncio.sleep(0.05)
        prefilled = {
            row.sequence
            for command in cluster.prefill_mesh.ran(PrefillChunk)
            for row in command.rows
        }
        assert len(prefilled) == 1, "nothing is prefilled before the decode side has pages for it"
        await asyncio.gather(first, *rest)


async def test_decode_steps_run_while_chunks_are_landing() -> None:
    async with Cluster(costs=Costs(pull=0.05)) as cluster:
        requests = [toy_request(0, max_tokens=60), toy_request(1, prompt_tokens=60, max_tokens=4)]
        await asyncio.gather(*(cluster.collect(request) for request in requests))
        log = cluster.decode_mesh.log
        inserts = [at for at, command in enumerate(log) if isinstance(command, InsertBlock)]
        between = [type(command).__name__ for command in log[inserts[0] : inserts[-1]]]
        assert "DecodeSteps" in between


async def test_offers_that_nobody_fetches_hold_the_prefill_back() -> None:
    async with Cluster(costs=Costs(pull=1.0), prefill=toy_limits(pages_per_rank=200)) as cluster:
        requests = [toy_request(number, prompt_tokens=60, max_tokens=2) for number in range(4)]
        tasks = [asyncio.create_task(cluster.collect(request)) for request in requests]
        most = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            most = max(
                most, sum(len(entries) for _, entries, _ in cluster.channel.offered.values())
            )
        assert cluster.prefill.counters["chunks_held_back"] > 0
        assert most <= (4 + 1) * 16 * 2, (
            "four chunks of two layer groups, and the one that went over the mark"
        )


@pytest.mark.parametrize("pages", [400, 64])
async def test_a_stalled_decode_worker_does_not_hold_back_anothers_hand_offs(pages: int) -> None:
    stalled = Faults(pull_error=lambda nth: "stall")
    limits = LimitsConfig(pull_seconds=20.0, max_attempts=20)
    prefill = toy_limits(pages_per_rank=pages)
    async with Fleet(
        prefills=1,
        prefill=prefill,
        limits=limits,
        faults=lambda name: stalled if name == "decode0" else Faults(),
        costs=Costs(pull=0.001),
    ) as fleet:
        loop = asyncio.get_running_loop()
        paths = [fleet.new_path(decode=name) for name in ("decode0", "decode1")]
        ended: list[float] = []

        async def ask(number: int) -> None:
            request = toy_request(number, prompt_tokens=60, max_tokens=2)
            await fleet.ask(request, paths[number % 2])
            ended.append(loop.time())

        asked = [asyncio.create_task(ask(number)) for number in range(12)]
        await asyncio.sleep(5.0)
        stuck = fleet.processes["decode0"].mesh.ran(PullBlock)
        assert stuck and fleet.counted("chunks_held_back") > 0, "decode0 stalls, and is noticed to"
        assert len(ended) == 6, f"{len(ended)} of decode1's six have ended"
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await fleet.check_quiet(settle_seconds=40.0)
