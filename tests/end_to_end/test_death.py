"""The one death of README's line: `test_chaos.py` has the others, in real processes."""

import asyncio
from dataclasses import replace

from tests.end_to_end.clusters import Running, greedy_beginning, running
from tests.end_to_end.drafts import same_logprobs
from tests.end_to_end.two_decoders import LEASES, TwoDecoders, rounds_to_death, until_all_free
from tests.shapes import LLAMA, config

# The test waits until what the dead worker held has been freed.
SHORT = replace(LEASES, handoff_lease_seconds=4.0)


def requests(run: Running) -> list:
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    starts = ("One day a girl", "Tom and his mother went", "The little boat was", "A dog named Max")
    greedy = [run.request(text, f"greedy {text}", **options) for text in starts[:2]]
    hot = {"temperature": 1.0, "seed": 7}
    return [*greedy, *(run.request(text, text, **options, **hot) for text in starts)]


async def test_streams_of_a_decode_mesh_that_dies_go_on_as_if_nothing_had_happened() -> None:
    """Log-probabilities show a position whose KV is missing where tokens may not."""
    async with running(config(limits=SHORT), kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        undisturbed = await run.complete_all(requests(run))
        for request, one in zip(requests(run)[:2], undisturbed, strict=False):
            assert greedy_beginning(LLAMA, request.prompt_token_ids, one.tokens[0]) == 60
        moving = asyncio.create_task(cluster.move_some())
        rounds = await rounds_to_death(run, requests, tokens=20)
        moving.cancel()
        for done in rounds:
            assert [one.tokens for one in done] == [one.tokens for one in undisturbed]
            same_logprobs(done, undisturbed)
        await until_all_free(run)
