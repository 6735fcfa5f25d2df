"""Memory of every process is flat: hundreds of requests, a fifth and more of them cut off at random
moments, leave nothing behind.

Both forms are slow ones: `-m slow`; the long one prints the figures. By default
tests/end_to_end/test_soak.py looks after memory."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.soak.cluster import ChaosCluster, Shape
from benchmarks.soak.load import Kind, Stream, known_kinds
from jdisagg.client import AsyncClient
from tests.programs import PROGRAMS

pytestmark = pytest.mark.ci

AT_ONCE = 12
# Many end before they are given up: of all requests a fifth and more are cut off.
GIVEN_UP = 0.6
# Allocators' arenas grow for a while; a leak of one hand-off's blocks a request would be many times
# this.
MARGIN_BYTES = {200: 48 << 20, 2000: 64 << 20}


async def storm(
    cluster: ChaosCluster, kinds: Sequence[Kind], numbers: range
) -> tuple[int, list[str]]:
    """How many were given up, and what was wrong with the others."""
    room, given_up, wrong = asyncio.Semaphore(AT_ONCE), 0, []

    async def one(client: AsyncClient, number: int) -> None:
        nonlocal given_up
        rng = random.Random(number)
        stream = Stream(rng.choice(kinds))
        async with room:
            task = asyncio.create_task(stream.run(client))
            if rng.random() < GIVEN_UP:
                await asyncio.wait({task}, timeout=rng.random() * 0.6)
                given_up += not task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif (await task).wrong:
                wrong.append(stream.wrong)

    async with AsyncClient(cluster.address) as client, asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(one(client, number))
    await cluster.until_quiet(10)
    return given_up, wrong


def resident(cluster: ChaosCluster) -> dict[str, int]:
    """Bytes of each process, by group and place in it."""
    return {
        f"{name}.{index}": process.memory_info().rss
        for name in cluster.groups
        for index, process in enumerate(cluster.processes(name))
    }


@pytest.mark.slow
@pytest.mark.parametrize("requests", [200, 2000])
async def test_memory_of_every_process_is_flat_however_requests_end(requests: int, tmp_path: Path):
    kinds = await known_kinds(6, tokens=(6, 16, 30))
    cluster = ChaosCluster(Shape(prefill=1, decode=1), tmp_path, str(PROGRAMS))
    try:
        await cluster.start()
        await storm(cluster, kinds, range(10_000, 10_000 + max(100, requests // 4)))
        before, pids = (
            resident(cluster),
            {name: group.pids for name, group in cluster.groups.items()},
        )
        given_up, wrong = await storm(cluster, kinds, range(requests))
        await asyncio.sleep(1.0)
        after = resident(cluster)
        assert wrong == []
        assert given_up >= 0.2 * requests
        assert pids == {name: group.pids for name, group in cluster.groups.items()}, (
            "a process was started again"
        )
    finally:
        await cluster.stop()
    grown = {name: after[name] - before[name] for name in after}
    figures = {
        name: f"{before[name] / 2**20:.0f} -> {after[name] / 2**20:.0f} MiB" for name in after
    }
    print(f"{requests} requests, {given_up} given up: {figures}")
    assert {name: count for name, count in grown.items() if count > MARGIN_BYTES[requests]} == {}
    assert not any(
        process.pid in {pid for group in pids.values() for pid in group}
        for process in psutil.process_iter()
    ), "left running"
