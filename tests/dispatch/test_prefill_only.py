"""Requests whose answer ends with the token of the prefill: nothing is handed over, and no decode
worker is asked."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.request import Request
from tests.dispatch.deaths import outlive
from tests.fakes.cluster import Fleet, toy_request
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES


def requests(count: int = 12) -> list[Request]:
    return [
        replace(
            toy_request(number, prompt_tokens=9 + 5 * number, max_tokens=1, logprobs=2),
            prefill_only=True,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("wire", [False, True])
async def test_a_prefill_worker_answers_alone(wire: bool) -> None:
    async with Fleet(wire=wire) as fleet:
        await fleet.collect_all(requests())
        assert not fleet.channel.owners, "nothing was ever offered"
        await fleet.check_quiet()
        await fleet.collect_all([*requests(4), toy_request(40, prompt_tokens=30, max_tokens=9)])
        assert fleet.channel.owners


async def test_its_prompt_is_cached_and_used_again() -> None:
    async with Fleet(prefills=1, names=NAMES) as fleet:
        (request,) = requests(1)
        long = replace(request, prompt_token_ids=tuple(range(3, 80)))
        first = await fleet.collect(long)
        second = await fleet.collect(replace(long, request_id="again"))
        assert first.tokens == second.tokens
        assert first.cached_tokens == 0 < second.cached_tokens


async def test_it_outlives_its_worker() -> None:
    async with Fleet(costs=Costs(prefill_token=1e-3)) as fleet:
        await outlive(fleet, fleet.collect_all(requests(20)), "prefill0", 0.03)


async def test_a_cancelled_one_leaves_nothing() -> None:
    async with Fleet(costs=Costs(prefill_token=1e-2)) as fleet:
        asking = [asyncio.create_task(fleet.collect(one)) for one in requests()]
        await asyncio.sleep(0.3)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await fleet.check_quiet(settle_seconds=5.0)
