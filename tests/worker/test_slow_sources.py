"""A source that computes for long is waited for: it is neither given up as lost nor
disconnected."""

import asyncio

import pytest

from jdisagg.messages.ports import Child, PrefillCall
from jdisagg.messages.step_commands import DisconnectPeer
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import Costs, toy_limits


@pytest.mark.parametrize("prompt_tokens", [14, 60])
async def test_chunks_that_take_longer_than_all_tries_of_a_pull_are_waited_for(
    prompt_tokens: int,
) -> None:
    async with Cluster(costs=Costs(prefill_token=5.0)) as cluster:
        request = toy_request(1, prompt_tokens=prompt_tokens, max_tokens=3, deadline_seconds=2000.0)
        await cluster.ask(request)
        counters = cluster.decode.counters
        assert counters["pulls_timed_out"] > 0, "chunks of 80 s, and pulls of at most 62.5"
        assert counters["handoffs_failed"] == cluster.path.counters["sources_replaced"] == 0


async def test_a_peer_is_not_idle_while_a_prompt_of_it_waits_for_pages() -> None:
    async with Cluster(prefill=toy_limits(pages_per_rank=40)) as cluster:
        first = PrefillCall(
            toy_request(1, prompt_tokens=128), 1, (Child(0),), 1, "silent", 0, 5000.0
        )
        holding = asyncio.create_task(cluster.prefill.prefill(first))
        await asyncio.sleep(0.1)
        request = toy_request(2, prompt_tokens=60, max_tokens=5, deadline_seconds=4000.0)
        stream = asyncio.create_task(cluster.collect(request))
        await asyncio.sleep(650)
        await cluster.prefill.cancel_prefill(1)
        cluster.check(request, await stream)
        assert not cluster.decode_mesh.ran(DisconnectPeer)
        assert cluster.decode.counters["handoffs_failed"] == 0
        await asyncio.gather(holding, return_exceptions=True)
