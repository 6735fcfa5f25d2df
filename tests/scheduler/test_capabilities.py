"""Waits for programs that are loaded while a worker serves."""

import asyncio

import pytest

from jdisagg.errors import UnavailableError
from jdisagg.scheduler.capabilities import Capabilities, Capability


async def waiting(readiness: Capabilities) -> asyncio.Task[None]:
    task = asyncio.create_task(readiness.wait(Capability.IMAGES))
    await asyncio.sleep(0)
    return task


async def test_a_wait_ends_when_its_capability_is_loaded_and_not_before() -> None:
    readiness = Capabilities()
    await readiness.wait(Capability.IMAGES)  # nothing is missing
    readiness.load_later([Capability.IMAGES, Capability.TIERS])
    task = await waiting(readiness)
    readiness.loaded(Capability.TIERS)
    await asyncio.sleep(0)
    assert not task.done() and readiness.missing == ("images",)
    readiness.loaded(Capability.IMAGES)
    await task


async def test_a_wait_fails_when_the_programs_cannot_be_loaded() -> None:
    readiness = Capabilities()
    readiness.load_later([Capability.IMAGES])
    task = await waiting(readiness)
    assert readiness.possible(Capability.IMAGES)
    readiness.give_up()
    with pytest.raises(UnavailableError, match="could not be loaded"):
        await task
    assert not readiness.possible(Capability.IMAGES) and readiness.possible(Capability.TIERS)
