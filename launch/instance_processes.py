"""An instance of several processes, from the command line's three flags to a leader with followers: what workers share.

Every process: `join_instance` (before the first use of a device). The leader: `lead`, build the mesh's executor, warm up, `Leading.over`.
The others: build, then `follow`. All warm up alike, since their programs meet in collectives.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jdisagg.clock import Clock
from jdisagg.instance.broadcast import BroadcastExecutor
from jdisagg.instance.follower import run_follower
from jdisagg.instance.followers import Followers
from jdisagg.instance.liveness import InstanceTiming
from jdisagg.instance.messages import Join, LeaderPlace
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.scheduler.commands import Executor
from jdisagg.service.instance_client import LeaderConnection
from jdisagg.service.instance_server import InstanceServer

READY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Leading:
    """The leader's hold on its followers."""

    followers: Followers
    server: InstanceServer

    async def over(self, local: Executor, end: KvEnd | None = None, ready_seconds: float = READY_SECONDS) -> BroadcastExecutor:
        """Once this process is warm: waits for the others, and gives the executor of the whole instance."""
        await self.followers.all_ready(ready_seconds)
        return BroadcastExecutor(local, self.followers, end)

    async def stop(self) -> None:
        """Lets the followers finish and go."""
        self.followers.stop()
        await self.server.stop()


async def lead(group: ProcessGroup, clock: Clock, host: str = "127.0.0.1", timing: InstanceTiming | None = None) -> Leading:
    """Listens for the followers on `host` and tells them where. Returns before they join."""
    followers = Followers(group.processes, clock, timing)
    server = InstanceServer(followers)
    address = await server.start(host)
    await asyncio.to_thread(group.share, LeaderPlace(address, followers.secret).text())
    return Leading(followers, server)


async def follow(
    group: ProcessGroup,
    executor: Executor,
    prepare: Callable[[], Awaitable[None]],
    clock: Clock,
    end: KvEnd | None = None,
    timing: InstanceTiming | None = None,
) -> None:
    """A follower's whole life once its executor is built. Returns when told to stop; raises `UnavailableError` when the instance failed."""
    place = LeaderPlace.parse(await asyncio.to_thread(group.share, ""))
    await run_follower(LeaderConnection(place.address), Join(group.process, place.secret, end), executor, prepare, clock, timing)
