"""The decode worker by its port: leases, zombies, cancels, n > 1 on shared pages, and the loop's
commands."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from jdisagg.config import InstanceConfig, LimitsConfig, Mode
from jdisagg.errors import DeadlineExceededError, HandoffError, UnavailableError
from jdisagg.messages.ports import Child, GenerateCall, HandoffSource, ReserveCall, Span, SpanEnd
from jdisagg.messages.step_commands import CopyPages, DecodeSteps, PrefillChunk
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.cost_terms import STEPS_ALONE, STEPS_TO_JOIN
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.worker import Worker
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Costs, Faults, toy_limits
from tests.fakes.toy_model import expected_tokens
from tests.fakes.virtual_time import run_virtually
from tests.worker.calls import reserve_call


async def spans_of(
    worker: Worker, reservation_id: int, attempt: int = 1, source: HandoffSource | None = None
) -> list[Span]:
    return [
        span async for span in worker.generate(GenerateCall(reservation_id, attempt, 100.0, source))
    ]


async def test_a_reservation_that_nobody_takes_over_is_freed_by_its_lease_without_new_work():
    async with Cluster(limits=LimitsConfig(reservation_lease_seconds=8)) as cluster:
        reservation = await cluster.decode.reserve(reserve_call())
        assert 0 < reservation.lease_seconds <= 8
        await asyncio.sleep(7)
        assert (await cluster.decode.status()).free_pages != (64,)
        await asyncio.sleep(5)
        await cluster.check_quiet()
        assert cluster.decode.counters["leases_expired"] == 1
        with pytest.raises(HandoffError, match="lease"):
            await spans_of(cluster.decode, reservation.reservation_id)


async def test_a_reservation_covers_prompt_and_growth_and_full_prompt_pages_once() -> None:
    async with Cluster(growth_tokens=8, ends_quiet=False) as cluster:
        await cluster.decode.reserve(reserve_call(prompt_tokens=10, max_tokens=50))
        assert (await cluster.decode.status()).free_pages == (64 - 5,), (
            "10 + 8 positions in pages of 4"
        )
        await cluster.decode.reserve(
            reserve_call(
                2, children=(Child(0), Child(1), Child(2)), prompt_tokens=10, max_tokens=50, n=3
            )
        )
        shared, last_pages, growth = 2, 3, 3 * 2
        assert (await cluster.decode.status()).free_pages == (59 - shared - last_pages - growth,)


async def test_children_share_the_prompt_and_copy_its_last_page_once_each() -> None:
    async with Cluster(Mode.CHUNKED) as cluster:
        request = toy_request(1, prompt_tokens=10, n=4, temperature=1.0, max_tokens=9)
        await cluster.ask(request)
        copies = cluster.decode_mesh.ran(CopyPages)
        assert [len(command.copies) for command in copies] == [3]
        assert len(cluster.decode_mesh.ran(PrefillChunk)) == 1, "prefilled once"
        whole_pages = toy_request(2, prompt_tokens=12, n=4, temperature=1.0, max_tokens=9)
        await cluster.ask(whole_pages)
        assert len(cluster.decode_mesh.ran(CopyPages)) == 1, "nothing to copy"


async def test_a_late_zombie_is_ignored_and_a_later_attempt_supersedes_the_earlier() -> None:
    async with Cluster(Mode.CHUNKED) as cluster:
        first = await cluster.decode.reserve(reserve_call(attempt=1, max_tokens=90))
        running = asyncio.create_task(spans_of(cluster.decode, first.reservation_id))
        await asyncio.sleep(0.05)
        second = await cluster.decode.reserve(reserve_call(attempt=3, max_tokens=90))
        with pytest.raises(HandoffError, match="superseded"):
            await running
        with pytest.raises(HandoffError, match="attempt 2 comes after attempt 3"):
            await cluster.decode.reserve(reserve_call(attempt=2, max_tokens=90))
        with pytest.raises(HandoffError):
            await spans_of(cluster.decode, second.reservation_id, attempt=2)
        await cluster.decode.cancel(second.reservation_id)


async def test_generating_twice_from_one_reservation_is_refused() -> None:
    async with Cluster(Mode.CHUNKED) as cluster:
        reservation = await cluster.decode.reserve(reserve_call())
        first = asyncio.create_task(spans_of(cluster.decode, reservation.reservation_id))
        await asyncio.sleep(0.001)
        with pytest.raises(HandoffError):
            await spans_of(cluster.decode, reservation.reservation_id)
        spans = await first
        assert (
            sum((span.token_ids for span in spans), ())
            == expected_tokens(toy_request(1), 0, 128)[0]
        )
        assert spans[-1].end is SpanEnd.LENGTH


async def test_cancelling_one_child_leaves_the_others() -> None:
    async with Cluster(Mode.CHUNKED) as cluster:
        request = toy_request(1, n=3, temperature=1.0, max_tokens=40, prompt_tokens=6)
        call = ReserveCall(request, 1, (Child(0), Child(1), Child(2)), 100.0)
        reservation = await cluster.decode.reserve(call)
        await cluster.decode.cancel(reservation.reservation_id, child=0)
        generating = asyncio.create_task(spans_of(cluster.decode, reservation.reservation_id))
        await asyncio.sleep(0.1)
        await cluster.decode.cancel(reservation.reservation_id, child=2)
        spans = await generating
        assert {span.child for span in spans if span.end} == {1}
        tokens = sum((span.token_ids for span in spans if span.child == 1), ())
        assert tokens == expected_tokens(request, 1, 128)[0]


async def test_waiting_for_pages_ends_with_the_calls_deadline() -> None:
    async with Cluster(
        decode=toy_limits(pages_per_rank=8), growth_tokens=64, ends_quiet=False
    ) as cluster:
        await cluster.decode.reserve(reserve_call(1, max_tokens=27))
        with pytest.raises(DeadlineExceededError, match="no free pages"):
            await cluster.decode.reserve(
                msgspec.structs.replace(reserve_call(2, max_tokens=20), deadline_seconds=3.0)
            )
        assert (await cluster.decode.status()).waiting == 0


async def test_the_older_request_is_served_first_however_late_it_calls() -> None:
    async with Cluster(decode=toy_limits(pages_per_rank=8), growth_tokens=64) as cluster:
        held = await cluster.decode.reserve(reserve_call(1, max_tokens=27))
        order: list[int] = []

        async def wait(number: int, age_seconds: float) -> None:
            await cluster.decode.reserve(
                msgspec.structs.replace(
                    reserve_call(number, max_tokens=20), age_seconds=age_seconds
                )
            )
            order.append(number)

        waiting = [asyncio.create_task(wait(2, 0.0)), asyncio.create_task(wait(3, 50.0))]
        await asyncio.sleep(0.01)
        await cluster.decode.cancel(held.reservation_id)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert order == [3]
        await cluster.decode.stop()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[0], UnavailableError)


async def test_several_steps_go_into_one_dispatch_only_when_nothing_waits() -> None:
    async with Cluster(Mode.CHUNKED, steps_per_dispatch=4) as cluster:
        long = asyncio.create_task(cluster.collect(toy_request(1, max_tokens=60)))
        await asyncio.sleep(0.3)
        other = asyncio.create_task(
            cluster.collect(toy_request(2, prompt_tokens=100, max_tokens=3))
        )
        await asyncio.gather(long, other)
        log = cluster.decode_mesh.log
        during = [one.steps for one in log if isinstance(one, DecodeSteps) and one.chunk]
        assert len(during) > 5 and set(during) == {1}
        assert 4 in {command.steps for command in log if isinstance(command, DecodeSteps)}


def test_a_mesh_without_mixed_programs_alternates_and_unified_mode_prefills_first() -> None:
    def between(cluster: Cluster) -> int:
        log = cluster.decode_mesh.log
        chunks = [at for at, command in enumerate(log) if isinstance(command, PrefillChunk)][1:]
        return sum(isinstance(command, DecodeSteps) for command in log[chunks[0] : chunks[-1]])

    async def main(mode: Mode) -> int:
        async with Cluster(mode, mixes=False) as cluster:
            long = asyncio.create_task(cluster.collect(toy_request(1, max_tokens=60)))
            await asyncio.sleep(0.2)
            await cluster.collect(toy_request(2, prompt_tokens=100, max_tokens=3))
            await long
            return between(cluster)

    assert run_virtually(lambda: main(Mode.CHUNKED)) == 6, (
        "one step after each of the seven chunks but the last"
    )
    assert run_virtually(lambda: main(Mode.UNIFIED)) == 0


async def test_a_prompt_goes_in_chunks_with_steps_as_long_as_measured_times_allow() -> None:
    """A token of a prompt costs 2 ms and a step 10 ms: 8 tokens take 26 ms with a step, and 16
    take 42 ms, for a fifth more tokens per second; 48 would take more than six steps."""
    sizes = toy_limits(chunk_buckets=(8, 16, 48), context_tokens=256)
    async with Cluster(
        Mode.CHUNKED, decode=sizes, costs=Costs(prefill_token=2e-3), growth_tokens=70
    ) as cluster:
        long = asyncio.create_task(cluster.collect(toy_request(1, max_tokens=60)))
        await asyncio.sleep(0.3)
        await cluster.collect(toy_request(2, prompt_tokens=120, max_tokens=3))
        await long
        log = cluster.decode_mesh.log
        mixed = [
            one.chunk.chunk_tokens
            for one in log
            if isinstance(one, DecodeSteps) and one.chunk is not None
        ]
        assert mixed[0] == 8, "the first is measured"
        assert set(mixed[2:-1]) == {16}
        alone = [one for one in log if isinstance(one, PrefillChunk)]
        assert len(alone) == 1 and not alone[0].rows[0].start, "of the first prompt"


async def test_a_source_that_does_not_match_is_lost_by_the_field_that_differs() -> None:
    async with Cluster() as cluster:
        other = Worker(
            WorkerContext(
                "decode1",
                cluster.clock,
                cluster.new_id,
                "another model",
                kv_channels=lambda: ("prefill0 NIXL",),
            ),
            WorkerRole.DECODE,
            cluster.decode_mesh,
            InstanceConfig(),
            cluster.limits,
            lambda _: cluster.prefill,
        )
        await other.start()
        reservation = await other.reserve(reserve_call())
        spans = other.generate(
            GenerateCall(reservation.reservation_id, 1, 100.0, HandoffSource("prefill0", 1))
        )
        lost = (await anext(spans)).lost
        assert lost is not None
        assert (
            "model_fingerprint is '' on 'prefill0' and 'another model' on 'decode1'" in lost.reason
        )
        await other.cancel(reservation.reservation_id)
        assert (await other.status()).free_pages == (64,)
        assert (await other.status()).kv_channels == ("prefill0 NIXL",)
        await other.stop()


async def test_a_source_that_is_not_known_is_lost_and_the_reservation_waits_for_another():
    async with Cluster() as cluster:
        reservation = await cluster.decode.reserve(reserve_call())
        spans = cluster.decode.generate(
            GenerateCall(reservation.reservation_id, 1, 100.0, HandoffSource("nobody", 1))
        )
        lost = (await anext(spans)).lost
        assert lost is not None and lost.kept_tokens == 0 and "'nobody' is not known" in lost.reason
        with pytest.raises(HandoffError, match="its lease passed before another came"):
            await anext(spans)


async def test_a_reader_that_never_reads_stops_no_other_stream() -> None:
    async with Cluster(Mode.CHUNKED, costs=Costs()) as cluster:
        reservation = await cluster.decode.reserve(reserve_call(1, max_tokens=50))
        spans = cluster.decode.generate(GenerateCall(reservation.reservation_id, 1, 1000.0))
        await anext(spans)
        request = toy_request(2, max_tokens=50)
        await cluster.ask(request)
        rest = [span async for span in spans]
        assert sum(len(span.token_ids) for span in rest) == 49


@pytest.mark.parametrize("spans_read", [1, 3])
async def test_closing_the_spans_cancels(spans_read: int) -> None:
    async with Cluster(Mode.CHUNKED) as cluster:
        reservation = await cluster.decode.reserve(reserve_call(max_tokens=90))
        spans = cluster.decode.generate(GenerateCall(reservation.reservation_id, 1, 100.0))
        for _ in range(spans_read):
            await anext(spans)
        await spans.aclose()  # type: ignore[attr-defined]
        await cluster.check_quiet(settle_seconds=0.02)


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.UNIFIED])
@pytest.mark.parametrize("after_seconds", [0.0005, 0.002, 0.004])
async def test_a_prompt_cancelled_between_its_chunks_writes_no_more(
    mode: Mode, after_seconds: float
) -> None:
    async with Cluster(mode) as cluster:
        reservation = await cluster.decode.reserve(reserve_call(prompt_tokens=100, max_tokens=20))
        generating = asyncio.create_task(spans_of(cluster.decode, reservation.reservation_id))
        await asyncio.sleep(after_seconds)
        await cluster.decode.cancel(reservation.reservation_id)
        assert await generating == []
        issued = len(cluster.decode_mesh.ran(PrefillChunk))
        await asyncio.sleep(1.0)
        assert len(cluster.decode_mesh.ran(PrefillChunk)) == issued < 7


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_mesh_that_hangs_is_broken_after_its_time_and_every_stream_ends(side: str) -> None:
    hangs = Faults(
        hangs_at=lambda command: (
            isinstance(command, PrefillChunk | DecodeSteps) and command.step > 9
        )
    )
    faults = {f"{side}_faults": hangs}
    limits = LimitsConfig(max_attempts=2, step_seconds=20)
    async with Cluster(limits=limits, **faults, ends_quiet=False) as cluster:  # type: ignore[arg-type]
        requests = [toy_request(number, prompt_tokens=20, max_tokens=60) for number in range(4)]
        answers = await asyncio.gather(
            *(cluster.collect(request) for request in requests), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        assert errors and all(isinstance(error, UnavailableError) for error in errors)
        assert asyncio.get_running_loop().time() < 20 + 2 * 30 / 4 + 5
        broken = cluster.prefill if side == "prefill" else cluster.decode
        with pytest.raises(UnavailableError, match="did not end within 20 s"):
            await broken.status()


async def test_a_mesh_that_works_off_a_long_queue_of_commands_is_not_taken_for_one_that_hangs():
    limits = LimitsConfig(step_seconds=4.0, pull_seconds=60.0)
    async with Cluster(limits=limits, costs=Costs(other=1.0)) as cluster:
        requests = [toy_request(number, prompt_tokens=32, max_tokens=2) for number in range(3)]
        await asyncio.gather(*(cluster.collect(request) for request in requests))
        assert (
            cluster.decode.counters["mesh_failures"]
            == cluster.prefill.counters["mesh_failures"]
            == 0
        )
        await cluster.check_quiet(settle_seconds=40)


async def test_its_status_says_sequences_and_contexts_of_each_rank() -> None:
    async with Cluster(decode=replace(toy_limits(), ranks=2), ends_quiet=False) as cluster:
        await cluster.decode.reserve(reserve_call(1, prompt_tokens=10))
        await cluster.decode.reserve(
            reserve_call(2, children=(Child(0), Child(1)), prompt_tokens=20, n=2)
        )
        status = await cluster.decode.status()
        assert sorted(zip(status.rank_sequences, status.rank_contexts, strict=True)) == [
            (1, 10),
            (2, 40),
        ]
        assert status.running == 3 and not status.can_prefill and status.chunk_tokens == 0


@pytest.mark.parametrize(("at_work", "steps"), [(False, STEPS_ALONE), (True, STEPS_TO_JOIN)])
def test_a_newcomer_has_its_second_token_after_as_many_steps_as_the_router_expects(
    at_work: bool, steps: float
) -> None:
    async def main() -> float:
        limits = toy_limits(pages_per_rank=256, context_tokens=512)
        async with Cluster(
            decode=limits, prefill=limits, costs=Costs(1e-5, 1.0, 1e-4, 1e-4)
        ) as cluster:
            loop = asyncio.get_running_loop()

            async def times(number: int, tokens: int) -> list[float]:
                return [
                    loop.time()
                    async for event in cluster.path.stream(toy_request(number, max_tokens=tokens))
                    for _ in event.token_ids
                ]

            running = [asyncio.create_task(times(99, 400))] if at_work else []
            gaps = []
            for number in range(20):
                await asyncio.sleep(3 + number / 20)  # at all moments of the step under way
                first, second = await times(number, 2)
                gaps.append(second - first)
            await asyncio.gather(*running)
            return sum(gaps) / len(gaps)

    assert run_virtually(main) == pytest.approx(steps, abs=0.1)
