"""Prompts on a prefill worker whose sliding-window layers have pages of their own."""

import asyncio
from dataclasses import replace

from jdisagg.layout.kv_spec import KVSpec
from tests.fakes.cluster import Cluster, Collected
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, asked, limits, prompt

SPEC = KVSpec.attention(2, 1, 1, "float32", (10, None))


def windowed(window_pages: int, costs: Costs | None = None) -> Cluster:
    mesh = replace(
        limits(pages=400, rows=2),
        kv_spec=SPEC,
        window_pages_per_rank=window_pages,
        snapshot_tokens=16,
    )
    decode = replace(limits(1, 400), kv_spec=SPEC)
    return Cluster(decode=decode, prefill=mesh, names=NAMES, costs=costs)


async def test_a_prompt_that_gives_way_returns_only_the_pages_of_windows_that_it_held() -> None:
    """It is nearly all cached, and holds fewer pages than a prompt of its length may need."""
    async with windowed(45, Costs(prefill_token=1e-3)) as cluster:
        await cluster.collect(asked(1, prompt(200)))

        def start(number: int, tokens: tuple[int, ...], priority: int) -> asyncio.Future[Collected]:
            request = replace(asked(number, tokens), priority=priority)
            return asyncio.ensure_future(cluster.collect(request))

        running = [start(3, (5,) * 240, 1), start(2, (*prompt(200), 1), 0)]
        await asyncio.sleep(0.005)
        running += [start(4, (6,) * 88, 1), start(6, (8,) * 24, 1)]
        await asyncio.sleep(0.045)
        (windows,) = cluster.prefill._state.room.windows
        assert windows.available == 0
        yielding = [one for one in cluster.prefill._prompts.placed if not one.begun]
        assert [one.priority for one in yielding] == [0, 1, 1]
        running.append(start(5, (7,) * 240, 2))
        await asyncio.gather(*running)
        assert cluster.prefill._loop.failure is None
        assert windows.available == windows.total


async def test_prompts_do_not_repeat_pages_because_of_windows_where_nothing_ended() -> None:
    async with windowed(90) as cluster:
        for number in range(1, 40):
            tokens = tuple(1000 * number + at for at in range(100))
            await cluster.collect(asked(number, tokens))
        (windows,) = cluster.prefill._state.room.windows
        assert windows.free_pages < 25 < windows.kept_pages
        at = cluster.prefill._kept.cached_tokens(
            0, cluster.prefill._kept.chain(asked(99, tokens), tokens), 48, True
        )
        assert at == 48, "every block of the newest prompt can be continued from"
