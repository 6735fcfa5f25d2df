"""Late replies and lost cancellations between path and workers: order is kept, everything is freed,
preemption is no failure."""

import asyncio

import pytest
from hypothesis import strategies as st

from jdisagg.config import LimitsConfig, Mode
from jdisagg.messages.ports import DecodePort, PrefillPort
from jdisagg.messages.ports_middleware import through
from tests.dispatch.storms import mixed_requests, stream_all
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Costs, toy_limits
from tests.fakes.lossy_ports import Lossy, lossy_decode, lossy_prefill
from tests.fakes.virtual_time import run_virtually
from tests.lanes import given_examples


@pytest.mark.parametrize("prefill_token", [1e-4, 2e-2])
@pytest.mark.parametrize(("prefill_late", "decode_late"), [(0.5, 0.0), (0.0, 0.05), (0.3, 0.05)])
async def test_late_replies_change_no_token_and_a_preemption_is_no_failure(
    prefill_late: float, decode_late: float, prefill_token: float
) -> None:
    async with Cluster(
        decode=toy_limits(pages_per_rank=14),
        growth_tokens=1,
        costs=Costs(pull=0.02, prefill_token=prefill_token),
        limits=LimitsConfig(max_attempts=1),
        wrap_prefill=lambda port: lossy_prefill(port, prefill_late),
        wrap_decode=lambda port: lossy_decode(port, decode_late),
    ) as cluster:
        assert await stream_all(cluster, mixed_requests(10)) > 0
        assert cluster.path.counters["attempts_failed"] == 0


@given_examples(
    20,
    60,
    mode=st.sampled_from(list(Mode)),
    n=st.integers(1, 3),
    cancel_after=st.floats(0, 0.08),
    pages=st.sampled_from([17, 64]),
    decode_late=st.sampled_from([0.0, 0.02]),
)
def test_explicit_cancels_free_everything_when_closing_is_lost(
    mode: Mode, n: int, cancel_after: float, pages: int, decode_late: float
) -> None:
    async def main() -> None:
        async with Cluster(
            mode,
            decode=toy_limits(pages_per_rank=pages),
            costs=Costs(prefill_token=1e-3, decode_step=2e-3),
            wrap_prefill=lossy_prefill,
            wrap_decode=lambda port: lossy_decode(port, decode_late),
        ) as cluster:
            stays = [toy_request(number, prompt_tokens=3, max_tokens=30) for number in (0, 2)]
            leaving = asyncio.create_task(
                cluster.collect(
                    toy_request(1, prompt_tokens=40, n=n, max_tokens=25, temperature=1.0)
                )
            )
            await asyncio.sleep(0)
            staying = [asyncio.create_task(cluster.collect(request)) for request in stays]
            await asyncio.sleep(cancel_after)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            for request, answer in zip(stays, await asyncio.gather(*staying), strict=True):
                cluster.check(request, answer)

    run_virtually(main)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("cancel_after", [0.0, 0.01, 0.05, 0.3])
async def test_a_lost_close_leaves_nothing_running_right_after_a_cancel(
    mode: Mode, cancel_after: float
) -> None:
    costs = Costs(prefill_token=1e-3, decode_step=0.1)
    async with Cluster(
        mode, costs=costs, wrap_prefill=lossy_prefill, wrap_decode=lossy_decode
    ) as cluster:
        leaving = asyncio.create_task(
            cluster.collect(toy_request(1, prompt_tokens=40, max_tokens=80))
        )
        await asyncio.sleep(cancel_after)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await cluster.check_quiet(settle_seconds=0.02)


async def test_every_call_of_a_request_carries_its_age() -> None:
    lossy = Lossy()

    def wrap(port: DecodePort) -> DecodePort:
        return through(DecodePort, port, lossy)

    def wrap_prefill(port: PrefillPort) -> PrefillPort:
        return through(PrefillPort, port, lossy)

    tight = toy_limits(pages_per_rank=14)
    async with Cluster(
        decode=tight, growth_tokens=1, wrap_decode=wrap, wrap_prefill=wrap_prefill
    ) as cluster:
        requests = [toy_request(number, max_tokens=30) for number in range(5)]
        started: dict[str, float] = {}
        tasks = []
        for request in requests:
            started[request.request_id] = asyncio.get_running_loop().time()
            tasks.append(asyncio.create_task(cluster.collect(request)))
            await asyncio.sleep(0.03)
        await asyncio.gather(*tasks)
        calls = lossy.reserves
        again = [call for _, call in calls if call.attempt > 1]
        assert again and all(call.children[0].accepted for call in again)
        for at, call in calls:
            assert call.age_seconds == pytest.approx(at - started[call.request.request_id])
        assert all(call.age_seconds > 0 for call in lossy.prefills if call.attempt > 1)
