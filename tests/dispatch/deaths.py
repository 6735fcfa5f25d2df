"""Workers that die while streams run."""

import asyncio
from collections.abc import Awaitable

from tests.fakes.cluster import Fleet


async def kill_later(fleet: Fleet, name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await fleet.kill(name)


async def outlive(fleet: Fleet, streams: Awaitable[object], name: str, seconds: float) -> None:
    """The streams, which check themselves, feel the death of a worker, and nothing is left."""
    await asyncio.gather(streams, kill_later(fleet, name, seconds))
    counters = fleet.path.counters
    assert counters["sources_replaced"] + counters["attempts_failed"] > 0, "the death was felt"
    await fleet.check_quiet(settle_seconds=10.0)
