"""Cancels, deadlines, failures: typed errors, unbroken streams, and nothing left behind."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from jdisagg.config import LimitsConfig, Mode, RoutingConfig
from jdisagg.errors import (
    DeadlineExceededError,
    HandoffError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.messages.ports import Child, PrefillCall
from jdisagg.messages.step_commands import DecodeSteps, PrefillChunk
from jdisagg.request import FinishReason, Request
from tests.fakes.cluster import Cluster, Fleet, toy_request
from tests.fakes.fake_executor import Costs, Faults, toy_limits
from tests.fakes.toy_model import expected_tokens
from tests.fakes.virtual_time import run_virtually
from tests.lanes import given_examples


@given_examples(
    25,
    60,
    mode=st.sampled_from(list(Mode)),
    n=st.integers(1, 3),
    prompt_tokens=st.sampled_from([1, 8, 40]),
    pull_seconds=st.sampled_from([0.0, 0.02]),
    cancel_after=st.floats(0, 0.4),
    pages=st.sampled_from([17, 64]),
)
def test_a_cancel_at_any_moment_frees_everything(
    mode: Mode, n: int, prompt_tokens: int, pull_seconds: float, cancel_after: float, pages: int
) -> None:
    async def main() -> None:
        async with Cluster(
            mode, decode=toy_limits(pages_per_rank=pages), costs=Costs(pull=pull_seconds)
        ) as cluster:
            stays = toy_request(0, prompt_tokens=3, max_tokens=30)
            staying = asyncio.create_task(cluster.collect(stays))
            leaving = asyncio.create_task(
                cluster.collect(toy_request(1, prompt_tokens, n=n, max_tokens=30, temperature=1.0))
            )
            await asyncio.sleep(cancel_after)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            cluster.check(stays, await staying)

    run_virtually(main)


async def test_a_request_that_is_cancelled_twice_is_freed_and_forgotten() -> None:
    async with Cluster(Mode.DISAGGREGATED) as cluster:
        cancel = cluster.decode.cancel

        async def slowly(reservation_id: int, child: int | None = None) -> None:
            await asyncio.sleep(1)
            await cancel(reservation_id, child)

        cluster.decode.cancel = slowly
        task = asyncio.create_task(cluster.collect(toy_request(1, max_tokens=100)))
        for seconds in (0.3, 0.5):
            await asyncio.sleep(seconds)
            task.cancel()
        await asyncio.wait({task})
        assert asyncio.get_running_loop().time() < 1.0, (
            "the second one came while it was being freed"
        )
        await asyncio.sleep(1)
        again = toy_request(1)
        await cluster.ask(again)
        await asyncio.wait_for(cluster.path.drain(), 1)


@given_examples(
    15, 30, events=st.integers(0, 12), mode=st.sampled_from(list(Mode)), n=st.integers(1, 3)
)
def test_closing_the_stream_after_any_event_frees_everything(
    events: int, mode: Mode, n: int
) -> None:
    async def main() -> None:
        async with Cluster(mode) as cluster:
            stream = cluster.path.stream(toy_request(1, n=n, max_tokens=10, temperature=1.0))
            for _ in range(events):
                await anext(stream, None)
            await stream.aclose()

    run_virtually(main)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_cancelled_request_frees_its_slot_within_one_step(mode: Mode) -> None:
    async with Cluster(mode) as cluster:
        task = asyncio.create_task(cluster.collect(toy_request(1, max_tokens=100)))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        steps = len(cluster.decode_mesh.ran(DecodeSteps))
        await asyncio.sleep(1.0)
        later = len(cluster.decode_mesh.ran(DecodeSteps))
        assert later <= steps + 1


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seconds", [0.0001, 0.003, 0.05, 0.31])
async def test_a_passed_deadline_is_a_typed_error_that_counts_the_tokens(
    mode: Mode, seconds: float
) -> None:
    async with Cluster(mode) as cluster:
        with pytest.raises(DeadlineExceededError, match=r"passed after \d+ tokens"):
            await cluster.collect(
                toy_request(1, prompt_tokens=30, max_tokens=90, deadline_seconds=seconds)
            )


async def test_too_many_waiting_requests_are_refused_at_once_with_a_hint() -> None:
    async with Cluster(limits=LimitsConfig(max_waiting_requests=3)) as cluster:
        tasks = [asyncio.create_task(cluster.collect(toy_request(number))) for number in range(5)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
        assert len(refused) == 2
        assert all(error.retry_after_seconds and error.retry_after_seconds > 0 for error in refused)
        assert isinstance(await cluster.collect(toy_request(9)), object)


async def test_a_full_reservation_queue_refuses_fresh_requests() -> None:
    async with Cluster(decode=toy_limits(slots_per_rank=1), queue_limit=2) as cluster:
        tasks = [asyncio.create_task(cluster.collect(toy_request(number))) for number in range(8)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(answer, OverloadedError) for answer in answers) == 8 - 2 - 2


async def test_requests_that_workers_refuse_use_no_quota() -> None:
    cost = 5 + 2 * 12  # of the prompt, and twice of the answer

    def of_tenant(number: int) -> Request:
        return replace(toy_request(number), tenant="t")

    burst = RoutingConfig(
        hold_seconds=1e9, local_gain=0.0, tenant_quotas="t=1", quota_burst_seconds=8.5 * cost
    )
    async with Fleet(
        prefills=1, decodes=1, decode=toy_limits(slots_per_rank=1), queue_limit=2, routing=burst
    ) as fleet:
        tasks = [asyncio.create_task(fleet.collect(of_tenant(number))) for number in range(8)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        refused = sum(isinstance(answer, OverloadedError) for answer in answers)
        assert refused == 4
        for number in range(refused):
            await fleet.collect(of_tenant(8 + number))
        with pytest.raises(OverloadedError, match="used up"):
            await fleet.collect(of_tenant(99))


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_can_never_fit_is_refused_with_its_numbers(mode: Mode) -> None:
    async with Cluster(mode, decode=toy_limits(pages_per_rank=8, samples_per_chunk=4)) as cluster:
        with pytest.raises(InvalidRequestError, match="33 positions.* 32 "):
            await cluster.collect(toy_request(1, prompt_tokens=14, max_tokens=20))
        with pytest.raises(InvalidRequestError, match="n=5"):
            await cluster.collect(toy_request(1, n=5))
        with pytest.raises(InvalidRequestError, match="n=4 streams.* 9 pages"):
            await cluster.collect(toy_request(1, prompt_tokens=20, max_tokens=12, n=4))
        with pytest.raises(InvalidRequestError, match="128"):
            await cluster.collect(toy_request(1, prompt_tokens=128))


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_edges_of_sizes(mode: Mode) -> None:
    async with Cluster(mode) as cluster:
        for number, (prompt_tokens, max_tokens) in enumerate(
            [(4, 1), (8, 5), (1, 1), (127, 5), (120, 100), (16, 4), (32, 1)]
        ):
            request = toy_request(number, prompt_tokens, max_tokens=max_tokens, n=1 + number % 2)
            await cluster.ask(request)
            await cluster.check_quiet()


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_stop_id_as_the_first_token_gives_an_empty_stream(mode: Mode) -> None:
    async with Cluster(mode) as cluster:
        first = expected_tokens(toy_request(1), 0, 128)[0][0]
        request = toy_request(1, stop_ids=(first,))
        answer = await cluster.collect(request)
        assert answer.tokens == {0: []}
        assert answer.finish == {0: FinishReason.STOP}
        assert answer.text == {0: ""}
        assert answer.usage is not None and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_stop_string_ends_its_child_alone(mode: Mode) -> None:
    async with Cluster(mode) as cluster:
        plain = toy_request(1, n=2, temperature=1.0, seed=3, max_tokens=20)
        streams = [expected_tokens(plain, child, 128)[0] for child in range(2)]
        word = next(
            token
            for token in streams[0][5:]
            if token not in streams[1] and streams[0].index(token) >= 5
        )
        at = streams[0].index(word)
        answer = await cluster.collect(
            toy_request(1, n=2, temperature=1.0, seed=3, max_tokens=20, stop=(f"<{word}>",))
        )
        assert tuple(answer.tokens[0]) == streams[0][: at + 1]
        assert answer.finish[0] is FinishReason.STOP
        assert answer.text[0] == "".join(f"<{token}>" for token in streams[0][:at])
        assert tuple(answer.tokens[1]) == streams[1]


async def test_logprobs_come_with_their_tokens_across_hand_off_and_preemption() -> None:
    async with Cluster(decode=toy_limits(pages_per_rank=14), growth_tokens=1) as cluster:
        requests = [toy_request(number, logprobs=1, max_tokens=24) for number in range(6)]
        answers = await asyncio.gather(*(cluster.collect(request) for request in requests))
        assert (await cluster.decode.status()).preemptions > 0
        for request, answer in zip(requests, answers, strict=True):
            cluster.check(request, answer)
            alone = await cluster.collect(request)
            assert answer.logprobs == alone.logprobs
            assert len(answer.logprobs[0]) == len(answer.tokens[0])


@pytest.mark.parametrize("failing", [{1}, {2, 3}, {1, 4, 7}])
async def test_failed_pulls_are_pulled_again(failing: set[int]) -> None:
    faults = Faults(pull_error=lambda nth: "lost" if nth in failing else "")
    async with Cluster(decode_faults=faults) as cluster:
        request = toy_request(1, prompt_tokens=40)
        await cluster.ask(request)
        assert cluster.decode.counters["pulls_failed"] == len(failing)
        assert cluster.path.counters["attempts_failed"] == 0


async def test_a_hand_off_that_fails_is_done_again_and_the_stream_is_unbroken() -> None:
    faults = Faults(pull_error=lambda nth: "lost" if nth <= 96 else "")
    async with Cluster(decode_faults=faults) as cluster:
        requests = [toy_request(number, prompt_tokens=30, n=1 + number) for number in range(2)]
        await cluster.collect_all(requests)
        assert cluster.path.counters["sources_replaced"] > 0
        assert cluster.path.counters["attempts_failed"] == 0


async def test_pulls_that_always_fail_end_in_a_typed_error_after_bounded_tries() -> None:
    async with Cluster(
        decode_faults=Faults(pull_error=lambda _: "lost"), limits=LimitsConfig(max_attempts=3)
    ) as cluster:
        with pytest.raises(HandoffError, match="lost"):
            await cluster.collect(toy_request(1))
        assert cluster.path.counters["attempts_failed"] == 3


async def test_a_stalled_pull_gives_way_to_another_attempt_after_its_lease() -> None:
    faults = Faults(pull_error=lambda nth: "stall" if nth == 1 else "")
    async with Cluster(
        decode_faults=faults, limits=LimitsConfig(handoff_lease_seconds=5)
    ) as cluster:
        request = toy_request(1, prompt_tokens=30)
        await cluster.ask(request)
        assert cluster.decode.counters["pulls_timed_out"] == 1


async def test_offers_are_freed_by_their_lease_when_the_receiver_says_nothing() -> None:
    faults = Faults(pull_error=lambda _: "stall")
    limits = LimitsConfig(handoff_lease_seconds=5, max_attempts=1, default_deadline_seconds=60)
    async with Cluster(decode_faults=faults, limits=limits) as cluster:
        with pytest.raises(DeadlineExceededError):
            await cluster.collect(toy_request(1, prompt_tokens=30))
        await cluster.check_quiet(settle_seconds=20)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_broken_mesh_ends_every_stream_with_a_typed_error(side: str) -> None:
    breaks = Faults(
        breaks_at=lambda command: (
            isinstance(command, PrefillChunk | DecodeSteps) and command.step > 9
        )
    )
    faults = {f"{side}_faults": breaks}
    limits = LimitsConfig(max_attempts=2)
    async with Cluster(limits=limits, ends_quiet=False, **faults) as cluster:  # type: ignore[arg-type]
        requests = [toy_request(number, prompt_tokens=20, max_tokens=60) for number in range(9)]
        answers = await asyncio.gather(
            *(cluster.collect(request) for request in requests), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        assert errors and all(isinstance(error, UnavailableError) for error in errors)
        broken, whole = (
            (cluster.prefill, cluster.decode)
            if side == "prefill"
            else (cluster.decode, cluster.prefill)
        )
        with pytest.raises(UnavailableError, match="the fake mesh broke"):
            await broken.status()
        await asyncio.sleep(60)
        status = await whole.status()
        assert status.free_pages == status.total_pages and status.handoffs == 0


async def test_draining_lets_the_running_finish_and_refuses_the_new() -> None:
    async with Cluster(
        decode=toy_limits(pages_per_rank=14), growth_tokens=1, limits=LimitsConfig(max_attempts=2)
    ) as cluster:
        requests = [toy_request(number, max_tokens=30) for number in range(4)]
        running = [asyncio.create_task(cluster.collect(request)) for request in requests]
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(cluster.path.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await cluster.collect(toy_request(9))
        for request, answer in zip(requests, await asyncio.gather(*running), strict=True):
            cluster.check(request, answer)
        await draining
        await asyncio.gather(cluster.prefill.drain(), cluster.decode.drain())
        with pytest.raises(UnavailableError, match="draining"):
            await cluster.prefill.prefill(
                PrefillCall(toy_request(1), 1, (Child(0),), 7, "decode0", 0, 10.0)
            )


async def test_timings_tell_where_the_time_went() -> None:
    async with Cluster(costs=Costs(pull=0.5)) as cluster:
        request = toy_request(1, prompt_tokens=10, max_tokens=11)
        answer = await cluster.collect(request)
        timings = answer.timings
        assert timings is not None
        assert timings.kv_bytes_moved == 10 * 8 * 2, (
            "ten tokens of two layer groups, eight bytes each in the toy"
        )
        assert 0 < timings.ttft_seconds < 0.1, "the first token does not wait for the transfer"
        assert timings.handoff_gap_seconds > 0.5
        assert timings.total_seconds >= timings.ttft_seconds + timings.handoff_gap_seconds
        assert 10 * timings.tpot_seconds == pytest.approx(
            timings.total_seconds - timings.ttft_seconds, rel=0.01
        )


@pytest.mark.parametrize("mode", list(Mode))
async def test_an_answer_that_its_first_token_ends_took_as_long_to_come_as_any_other(
    mode: Mode,
) -> None:
    async with Cluster(mode) as cluster:
        whole = await cluster.collect(toy_request(1))
        empty = await cluster.collect(toy_request(1, stop_ids=(whole.tokens[0][0],)))
        assert not empty.tokens[0] and empty.timings is not None and whole.timings is not None
        assert empty.timings.ttft_seconds > 0
        assert empty.timings.ttft_seconds == pytest.approx(whole.timings.ttft_seconds)
        assert (empty.timings.tpot_seconds, empty.timings.handoff_gap_seconds) == (0, 0)
