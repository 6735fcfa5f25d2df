"""Streams of low priority fill all slots of the real engine, and requests of high priority come:
the low ones are set aside and their streams are those of undisturbed ones."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.config import PrefixConfig
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, running
from tests.fakes.cluster import Collected
from tests.shapes import config

PLACES, HIGH = 10, 3  # of two ranks with four slots each


def low_requests(run: Running) -> list[Request]:
    """As many as there are slots and places ahead of them, of several kinds."""
    requests = []
    for number in range(PLACES):
        options: dict[str, object] = {"max_tokens": 90, "ignore_eos": True}
        if number % 2:
            options |= {"temperature": 0.8, "seed": number, "repetition_penalty": 1.1}
        text = "a dog and a red ball " * (1 + 2 * number)
        requests.append(replace(run.request(text, f"low {number}", **options), priority=-1))
    return requests


@pytest.mark.ci
async def test_low_streams_yield_to_high_ones_and_equal_undisturbed_ones():
    engine = replace(config(), prefix=PrefixConfig(True, 16, host_gib=0.25, restores="always"))
    async with running(engine) as run:
        counters = run.cluster._workers[-1].counters
        undisturbed = [await run.complete(request) for request in low_requests(run)]
        assert counters["sequences_yielded"] == 0
        highs = [
            replace(run.request("a cat", f"high {number}", max_tokens=4), priority=2)
            for number in range(HIGH)
        ]
        alone = [await run.complete(request) for request in highs]
        begun = asyncio.Event()

        async def stream(request: Request) -> Collected:
            collected = Collected()
            async for event in run.cluster.stream(request):
                collected.add(event)
                if len(collected.tokens[0]) > 3:
                    begun.set()
            return collected

        lows = [asyncio.create_task(stream(request)) for request in low_requests(run)]
        await asyncio.wait_for(begun.wait(), 120.0)
        storm = await run.complete_all(highs)
        assert not any(task.done() for task in lows), "the low ones were to outlast the storm"
        done = await asyncio.gather(*lows)
        assert counters["sequences_yielded"] > 0
        assert counters["host_blocks_broken"] == 0
        assert [one.tokens for one in done] == [one.tokens for one in undisturbed]
        assert [one.tokens for one in storm] == [one.tokens for one in alone]
