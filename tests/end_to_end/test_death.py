"""The one death of README's line: `test_chaos.py` has the others, in real processes."""

import asyncio

from tests.end_to_end.clusters import greedy_beginning, running
from tests.end_to_end.two_decoders import LEASES, TwoDecoders, until_all_free
from tests.shapes import LLAMA, config


async def test_streams_of_a_decode_mesh_that_dies_go_on_with_the_tokens_of_a_dense_pass() -> None:
    async with running(config(limits=LEASES), kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        moving = asyncio.create_task(cluster.move_some())
        dying = asyncio.create_task(cluster.die_when_busy())
        asked = [
            run.request("once upon a time " * (1 + at), f"r{at}", max_tokens=90, ignore_eos=True)
            for at in range(6)
        ]
        done = await run.complete_all(asked)
        moving.cancel()
        assert await asyncio.wait_for(dying, 1.0) >= 2, "nobody ran where the worker died"
        for request, one in zip(asked, done, strict=True):
            tokens = one.tokens[0]
            assert len(tokens) == 90
            assert greedy_beginning(LLAMA, request.prompt_token_ids, tokens) == 90
        await until_all_free(run)
