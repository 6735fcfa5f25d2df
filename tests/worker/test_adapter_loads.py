"""Loads of LoRA adapters at a worker: one load for all that wait for it, a wait for a slot with a
deadline, and a slot that is free again after a load that failed."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from jdisagg.errors import DeadlineExceededError, InvalidRequestError
from jdisagg.messages.step_commands import (
    DiskResult,
    PutAdapter,
    ReadAdapter,
    StepCommand,
    StepResult,
)
from jdisagg.request import Adapter, Request
from jdisagg.telemetry import Counters
from jdisagg.worker.adapter_loads import AdapterLoads
from jdisagg.worker.step_loop import StepLoop

TAKES = 0.01


class Mesh:
    """Runs commands at once, and reads adapters in `TAKES` seconds."""

    def __init__(self, broken: str = "") -> None:
        self.log: list[StepCommand] = []
        self._broken = broken

    def next_number(self) -> int:
        return len(self.log) + 1

    async def submit(self, command: ReadAdapter) -> StepResult:
        self.log.append(command)
        await asyncio.sleep(TAKES)
        broken = command.digest == self._broken
        return DiskResult(command.step, "r exceeds 8; choose less" if broken else "", bytes_moved=9)

    def fire(self, command: StepCommand) -> None:
        self.log.append(command)


def of(digest: str) -> Request:
    return Request("r", (1,), adapter=Adapter(digest, f"/{digest}", digest))


def loads(
    mesh: Mesh, slots: int, in_use: Callable[[], list[Request]] = list
) -> tuple[AdapterLoads, Counters]:
    counters = Counters()
    return AdapterLoads("w", slots, cast(StepLoop, mesh), counters, in_use), counters


async def hold(adapters: AdapterLoads, digest: str, seconds: float = 5.0) -> int:
    async with adapters.held(of(digest), seconds):
        return adapters.table.slot_of(of(digest))


async def test_requests_that_come_together_share_a_load() -> None:
    mesh = Mesh()
    adapters, counters = loads(mesh, 2)
    assert await asyncio.gather(*(hold(adapters, "ab"[one % 2]) for one in range(8)))
    kinds = [type(command) for command in mesh.log]
    assert kinds.count(ReadAdapter) == kinds.count(PutAdapter) == 2 == counters["adapter_loads"]
    await hold(adapters, "a")
    assert len(mesh.log) == 4, "it is still there"
    assert counters["adapter_load_bytes"] == 18


async def test_nothing_is_left_of_requests_that_have_ended_but_what_is_loaded() -> None:
    adapters, _ = loads(Mesh(), 2)
    await asyncio.gather(*(hold(adapters, digest) for digest in "abcd"))
    assert adapters.idle and not adapters._held and len(adapters.table.loaded) == 2


async def test_a_request_waits_for_a_slot_until_its_deadline() -> None:
    running = [of("a")]
    mesh = Mesh()
    adapters, counters = loads(mesh, 1, lambda: running)
    await hold(adapters, "a")
    with pytest.raises(DeadlineExceededError, match="all 1 of --adapters are used"):
        await hold(adapters, "b", 0.05)
    waiting = asyncio.create_task(hold(adapters, "b"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    running.clear()
    adapters.poke()
    assert await waiting == 1
    assert counters["adapter_evictions"] == 1


async def test_a_slot_is_free_again_after_a_load_that_failed() -> None:
    adapters, _ = loads(Mesh(broken="bad"), 1)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="r exceeds 8"):
            await hold(adapters, "bad")
    assert await hold(adapters, "good") == 1


async def test_a_caller_that_leaves_ends_no_load_for_others() -> None:
    adapters, _ = loads(Mesh(), 1)
    first = asyncio.create_task(hold(adapters, "a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(hold(adapters, "a"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


async def test_a_worker_without_slots_refuses_adapters_by_name() -> None:
    adapters, _ = loads(Mesh(), 0)
    with pytest.raises(InvalidRequestError, match="'a': worker 'w' has no adapter slots"):
        await hold(adapters, "a")
