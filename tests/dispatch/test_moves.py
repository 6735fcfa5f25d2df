"""Running sequences that move to another decode worker, in virtual time: unbroken tokens, and
nothing lost when a move fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.config import LimitsConfig
from jdisagg.errors import UnavailableError
from jdisagg.messages.ports import Child, DecodePort, GenerateCall, PrefillCall, Span
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.step_commands import DecodeSteps, ExtractBlock, InsertBlock
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Request
from tests.dispatch.storms import mixed_requests
from tests.fakes.cluster import Collected, Fleet, toy_request, until
from tests.fakes.fake_executor import Costs, Faults, toy_limits
from tests.fakes.fake_states import Keeps, kept_as_it_is, with_state
from tests.fakes.virtual_time import run_virtually


def long_requests(count: int) -> list[Request]:
    return [
        toy_request(
            number,
            prompt_tokens=10 + 9 * number,
            max_tokens=60,
            repetition_penalty=1.1,
            temperature=float(number % 2),
            logprobs=1,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("keeps", [kept_as_it_is, with_state], ids=["kv", "state"])
@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.4])
async def test_a_draining_decode_worker_hands_its_sequences_on(
    seconds: float, wire: bool, keeps: Keeps
) -> None:
    roomy = keeps(toy_limits(pages_per_rank=200))
    async with Fleet(wire=wire, decode=roomy, prefill=keeps(toy_limits())) as fleet:
        streams = asyncio.create_task(fleet.collect_all(long_requests(4)))
        await asyncio.sleep(seconds)
        await fleet.decode_worker("decode0").drain(30.0)
        drained_at = asyncio.get_running_loop().time()
        assert (await fleet.decode_worker("decode0").status()).draining
        await streams
        moved = fleet.path.counters["sequences_moved"]
        assert fleet.path.counters["attempts_failed"] == 0 and fleet.counted("moves_failed") == 0
        if seconds >= 0.05:
            there = [
                item for item in fleet.path.placer.status().decisions if item.decode == "decode0"
            ]
            assert moved == fleet.counted("sequences_moved") == len(there) > 0
            assert asyncio.get_running_loop().time() - drained_at > 0.05, (
                "it did not wait for their ends"
            )


@pytest.mark.parametrize("allowed", [False, True])
async def test_float32_sequences_do_not_move_to_a_worker_of_other_autotune_results(
    allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(
        tuning=lambda name: f"{name[:-1]}:{name[-1]}",
        limits=LimitsConfig(tuned_apart=allowed),
        decode=toy_limits(pages_per_rank=200),
    ) as fleet:
        streams = asyncio.create_task(fleet.collect_all(long_requests(4)))
        await asyncio.sleep(0.2)
        await fleet.decode_worker("decode0").drain(30.0)
        await streams  # each is compared with its oracle
        moved, failed = fleet.counted("sequences_moved"), fleet.counted("moves_failed")
        assert (moved > 0, failed > 0) == (allowed, not allowed)
    assert ("autotune results are 0 on" in caplog.text) == allowed


async def test_a_sequence_moves_to_a_worker_that_failed_it_and_was_restarted() -> None:
    async with Fleet() as fleet:
        request = toy_request(1, prompt_tokens=30, max_tokens=90)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.2)
        (first,) = [one.decode for one in fleet.path.placer.status().decisions]
        await fleet.kill(first)
        await asyncio.sleep(0.1)
        await fleet.start(first)
        (other,) = {"decode0", "decode1"} - {first}
        await fleet.decode_worker(other).drain(30.0)
        fleet.check(request, await collecting)
        assert fleet.path.counters["sequences_moved"] == 1


async def test_a_moving_sequence_decodes_on_until_little_is_left_to_move() -> None:
    async with Fleet(costs=Costs(pull=0.03)) as fleet:
        request = toy_request(1, prompt_tokens=70, max_tokens=50)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.3)
        mesh = fleet.processes["decode0"].mesh
        worker = fleet.decode_worker("decode0")
        await worker.drain(30.0)
        log = mesh.log
        extracts = [at for at, command in enumerate(log) if isinstance(command, ExtractBlock)]
        steps = [at for at, command in enumerate(log) if isinstance(command, DecodeSteps)]
        during = [at for at in steps if extracts[0] < at < extracts[-1]]
        assert len(during) >= 3, "it goes on while the full pages move"
        tail = [
            command for command in log if isinstance(command, ExtractBlock) and command.start >= 70
        ]
        assert tail and not [at for at in steps if at > extracts[-1]]
        fleet.check(request, await collecting)
        assert fleet.path.counters["sequences_moved"] == 1


async def test_a_sequence_that_has_outgrown_its_new_reservation_gets_more_pages_there() -> None:
    async with Fleet(growth_tokens=1, costs=Costs(pull=0.06)) as fleet:
        request = toy_request(1, prompt_tokens=30, max_tokens=90)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.3)
        await fleet.decode_worker("decode0").drain(30.0)
        fleet.check(request, await collecting)
        assert fleet.path.counters["sequences_moved"] == 1


async def test_without_another_decode_worker_a_drain_waits_for_the_ends_within_its_deadline():
    async with Fleet(decodes=1, limits=LimitsConfig(max_attempts=1)) as fleet:
        short = toy_request(1, max_tokens=20)
        long = toy_request(2, max_tokens=120, prompt_tokens=3)
        streams = [asyncio.create_task(fleet.collect(request)) for request in (short, long)]
        await asyncio.sleep(0.05)
        worker = fleet.decode_worker("decode0")
        await worker.drain(0.6)
        fleet.check(short, await streams[0])
        with pytest.raises(UnavailableError):
            await streams[1]
        assert worker.counters["drains_cut_short"] == 1 and fleet.counted("sequences_moved") == 0
        await fleet.check_quiet(settle_seconds=40)


async def test_a_draining_prefill_worker_waits_until_its_offers_are_fetched_within_its_deadline():
    async with Fleet(costs=Costs(pull=0.2)) as fleet:
        requests = long_requests(4)
        streams = asyncio.create_task(fleet.collect_all(requests))
        await asyncio.sleep(0.05)
        worker = fleet.processes["prefill0"].worker
        await worker.drain(30.0)
        assert (await worker.status()).handoffs == 0
        with pytest.raises(UnavailableError, match="draining"):
            await worker.prefill(  # type: ignore[union-attr]
                PrefillCall(toy_request(9), 1, (Child(0),), 5, "decode0", 0, 10.0)
            )  # type: ignore[union-attr]
        await streams
        assert (
            fleet.path.counters["attempts_failed"] == fleet.path.counters["sources_replaced"] == 0
        )
    async with Fleet(costs=Costs(pull=0.2, prefill_token=1e-3)) as fleet:
        streams = asyncio.create_task(fleet.collect_all(long_requests(4)))
        await asyncio.sleep(0.02)
        worker = fleet.processes["prefill0"].worker
        await worker.drain(0.01)
        assert worker.counters["drains_cut_short"] == 1
        await streams
        assert fleet.path.counters["sources_replaced"] > 0


@pytest.mark.parametrize("name", ["decode0", "decode1"])
@pytest.mark.parametrize("after", [0.001, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12])
async def test_a_death_on_either_side_of_a_move_breaks_no_stream(name: str, after: float) -> None:
    async with Fleet(decodes=3, costs=Costs(pull=0.02)) as fleet:
        streams = asyncio.create_task(fleet.collect_all(long_requests(6)))
        await asyncio.sleep(0.3)
        draining = asyncio.create_task(fleet.decode_worker("decode0").drain(30.0))
        await asyncio.sleep(after)
        assert fleet.counted("moves_begun") > 0
        await fleet.kill(name)
        await streams
        await draining
        await fleet.check_quiet(settle_seconds=40)


async def test_a_sequence_that_is_frozen_for_a_worker_that_died_goes_on_soon() -> None:
    async with Fleet(costs=Costs(pull=0.05)) as fleet:
        request = toy_request(1, prompt_tokens=50, max_tokens=60)
        loop, times = asyncio.get_running_loop(), list[float]()

        async def collect() -> Collected:
            collected = Collected()
            async for event in fleet.path.stream(request):
                collected.add(event)
                times.append(loop.time())
            return collected

        collecting = asyncio.create_task(collect())
        await asyncio.sleep(0.4)
        worker = fleet.decode_worker("decode0")
        assert any(worker.migrate_out(key) for key in range(100))
        while not any(
            child.frozen for group in worker._state.groups.values() for child in group.alive
        ):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        await fleet.kill("decode1")
        fleet.check(request, await collecting)
        assert worker.counters["moves_failed"] == 1 and fleet.path.counters["attempts_failed"] == 0
        assert max(after - before for before, after in pairwise(times)) < 10.0


@pytest.mark.parametrize("kind", ["lost", "garble", "stall"])
async def test_a_move_that_cannot_transfer_leaves_the_sequence_where_it_is(kind: str) -> None:
    bad = [False]
    faults = Faults(pull_error=lambda _: kind if bad[0] else "")
    async with Fleet(faults=lambda name: faults) as fleet:
        requests = [toy_request(number, prompt_tokens=20, max_tokens=100) for number in range(2)]
        streams = asyncio.create_task(fleet.collect_all(requests))
        await asyncio.sleep(0.2)
        bad[0] = True
        worker = fleet.decode_worker("decode0")
        key = next(key for key in range(100) if worker.migrate_out(key))
        assert not worker.migrate_out(key), "it is on its way already"
        await streams
        assert fleet.counted("moves_begun") == 1 and fleet.counted("sequences_moved") == 0
        if kind != "stall":  # which lasts longer than the sequence
            assert fleet.counted("moves_failed") == fleet.path.counters["moves_failed"] == 1
        assert fleet.path.counters["attempts_failed"] == 0
        await fleet.check_quiet(settle_seconds=40)


@pytest.mark.ci
@settings(max_examples=60)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["decode0", "decode1"]), st.floats(0, 0.6)),
        min_size=1,
        max_size=6,
    ),
    death=st.one_of(st.none(), st.floats(0, 0.6)),
    pull=st.sampled_from([0.001, 0.03]),
    pull_faults=st.sampled_from([0, 13]),
    kind=st.sampled_from(["lost", "garble", "stall"]),
    pages=st.sampled_from([20, 64]),
    keeps=st.sampled_from([kept_as_it_is, with_state]),
    seed=st.integers(0, 1000),
)
def test_moves_at_any_moment_and_a_death_among_them_change_no_token(
    moves: list[tuple[str, float]],
    death: float | None,
    pull: float,
    pull_faults: int,
    kind: str,
    pages: int,
    keeps: Keeps,
    seed: int,
) -> None:
    async def main() -> None:
        faults = Faults(
            pull_error=lambda nth: kind if pull_faults and nth % pull_faults == 3 else ""
        )
        async with Fleet(
            costs=Costs(pull=pull),
            faults=lambda name: faults,
            seed=seed,
            growth_tokens=1 + seed % 8,
            decode=keeps(toy_limits(pages_per_rank=pages)),
            prefill=keeps(toy_limits()),
        ) as fleet:

            async def move(name: str, seconds: float) -> None:
                await asyncio.sleep(seconds)
                if not fleet.local.is_dead(fleet.processes[name].worker):
                    worker = fleet.decode_worker(name)
                    for key in range(200):
                        worker.migrate_out(key)

            async def die() -> None:
                if death is not None:
                    await asyncio.sleep(death)
                    await fleet.kill("decode0")

            await asyncio.gather(
                fleet.collect_all(mixed_requests(8, max_tokens=40)),
                die(),
                *(move(*one) for one in moves),
            )
            await fleet.check_quiet(settle_seconds=40.0)

    run_virtually(main)


class Far:
    """A decode worker's port: statuses come late, and the ends of streams later."""

    async def status(self, proceed: Callable[[], Awaitable[WorkerStatus]]) -> WorkerStatus:
        await asyncio.sleep(0.02)
        return await proceed()

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        async for span in proceed(call):
            yield span
        await asyncio.sleep(0.2)


async def test_a_move_is_earlier_than_the_attempt_after_a_preemption_also_if_it_arrives_later() -> (
    None
):
    async with Fleet(wrap_decode=lambda port: through(DecodePort, port, Far())) as fleet:
        request = toy_request(1, prompt_tokens=20, max_tokens=60)
        collecting = asyncio.create_task(fleet.collect(request))
        await asyncio.sleep(0.4)
        worker = fleet.decode_worker("decode0")
        draining = asyncio.create_task(worker.drain(30.0))  # leaves one worker for either
        await until(lambda: worker.counters["moves_begun"])
        (group,) = worker._state.groups.values()
        worker._end(group, preempted=True)
        fleet.check(request, await collecting)
        assert fleet.path.counters["preemptions"] == 1
        assert fleet.path.counters["attempts_failed"] == 0
        await draining


async def test_a_new_workers_inserts_come_before_its_first_step_of_a_moved_sequence() -> None:
    async with Fleet() as fleet:
        collecting = asyncio.create_task(
            fleet.collect(toy_request(1, prompt_tokens=30, max_tokens=60))
        )
        await asyncio.sleep(0.2)
        await fleet.decode_worker("decode0").drain(30.0)
        await collecting
        kinds = [
            type(command)
            for command in fleet.processes["decode1"].mesh.ran(InsertBlock | DecodeSteps)
        ]
        assert kinds == sorted(kinds, key=lambda kind: kind is DecodeSteps)
