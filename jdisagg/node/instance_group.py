"""Runs one worker in several processes: one leader and its followers.

The leader serves requests. The followers run the same programs at the same time, on their part of
the mesh. Every process calls `join_instance` before the first use of a device. The leader calls
`lead`, builds its executor, warms up and calls `Leading.over`. Each follower builds its executor
and calls `follow`. All processes must warm up in the same order, because a collective waits for all
processes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jdisagg.clock import Clock
from jdisagg.config import ServiceConfig
from jdisagg.errors import UnavailableError
from jdisagg.instance.broadcast import BroadcastExecutor
from jdisagg.instance.follower import run_follower
from jdisagg.instance.followers import Followers
from jdisagg.instance.processes import ProcessGroup, exit_soon
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.instance import Join, LeaderPlace
from jdisagg.scheduler.executor import Executor
from jdisagg.service.internal.instance_stream import InstanceServer, LeaderConnection
from jdisagg.service.server import cluster_credentials, server_credentials
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts


@dataclass(frozen=True, slots=True)
class Leading:
    followers: Followers
    server: InstanceServer
    ready_seconds: float = DEFAULT_TIMEOUTS.instance.starting_silence_seconds

    async def over(self, local: Executor, end: KvEnd | None = None) -> BroadcastExecutor:
        """Waits until the followers are warmed up. Returns an executor that runs each command on
        all processes of the instance."""
        await self.followers.all_ready(self.ready_seconds)
        return BroadcastExecutor(local, self.followers, end)

    async def stop(self) -> None:
        """Stops the followers after they have run their queued commands."""
        self.followers.stop()
        await self.server.stop()


async def lead(
    group: ProcessGroup,
    clock: Clock,
    service: ServiceConfig | None = None,
    timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance,
    exit_status: int = 1,
) -> Leading:
    """Starts the server for the followers, and sends its address to them. Returns before they
    connect. If a process of the instance later fails, this process exits within seconds, even if a
    thread hangs."""
    followers = Followers(group.processes, clock, timeouts)
    followers.when_failed(lambda error: exit_soon(exit_status, timeouts.exit_seconds))
    service = service or ServiceConfig()
    server = InstanceServer(followers, server_credentials(service), timeouts)
    address = await server.start(service.host, called=service.called_host)
    await asyncio.to_thread(group.share, LeaderPlace(address, followers.secret).text())
    return Leading(followers, server, timeouts.starting_silence_seconds)


async def follow(
    group: ProcessGroup,
    executor: Executor,
    prepare: Callable[[], Awaitable[None]],
    clock: Clock,
    end: KvEnd | None = None,
    service: ServiceConfig | None = None,
    timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance,
    exit_status: int = 1,
) -> None:
    """Runs a follower until the leader stops it. Raises UnavailableError if a process of the
    instance failed. This process exits within seconds afterwards, even if a thread hangs."""
    place = LeaderPlace.parse(await asyncio.to_thread(group.share, ""))
    credentials = cluster_credentials(service or ServiceConfig())
    connection = LeaderConnection(place.address, credentials, timeouts.connect_seconds)
    try:
        await run_follower(
            connection, Join(group.process, place.secret, end), executor, prepare, clock, timeouts
        )
    except UnavailableError:
        exit_soon(exit_status, timeouts.exit_seconds)
        raise
