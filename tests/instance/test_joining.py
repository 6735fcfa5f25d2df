"""How processes come together: what the flags must say, and an instance's stream under the
cluster's mutual TLS."""

import asyncio
import shutil
from pathlib import Path

import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.instance.broadcast import BroadcastExecutor
from jdisagg.instance.follower import run_follower
from jdisagg.instance.followers import Followers
from jdisagg.instance.processes import ProcessGroup, join_instance
from jdisagg.messages.instance import Join, LeaderPlace
from jdisagg.messages.step_commands import Done, DropBlocks
from jdisagg.service.instance_client import LeaderConnection
from jdisagg.service.instance_server import InstanceServer
from jdisagg.service.server import cluster_credentials, server_credentials
from tests.instance.test_broadcast import FAST, NotingExecutor, nothing
from tests.service.test_credentials import certificates_in


@pytest.mark.parametrize(
    "given", [("127.0.0.1:1", None, None), (None, 2, 0), ("127.0.0.1:1", 2, None)]
)
def test_half_of_the_flags_are_refused(given: tuple[str | None, int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="give all three, or none"):
        join_instance(*given)


def test_a_process_id_beyond_the_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"process_id=2 must be in \[0, 2\)"):
        join_instance("127.0.0.1:1", 2, 2)


def test_an_instance_of_one_process_needs_no_job() -> None:
    group = join_instance("127.0.0.1:1", 1, 0)
    assert group == ProcessGroup(0, 1) and group.leads
    place = LeaderPlace("127.0.0.1:5", 2**64 - 1)
    assert LeaderPlace.parse(group.share(place.text())) == place


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
async def test_commands_travel_under_the_clusters_mutual_tls(tmp_path: Path) -> None:
    ours = certificates_in(tmp_path)
    service = ServiceConfig(
        tls_certificate=ours.certificate, tls_key=ours.key, tls_client_ca=ours.authority
    )
    clock, follower, leader = MonotonicClock(), NotingExecutor(), NotingExecutor()
    followers = Followers(2, clock, FAST)
    server = InstanceServer(followers, server_credentials(service))
    address = await server.start()
    join = Join(1, followers.secret)
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(2):
            stranger = LeaderConnection(address, connect_seconds=0.5)
            await run_follower(stranger, join, NotingExecutor(), nothing, clock, FAST)
    obeying = asyncio.create_task(
        run_follower(
            LeaderConnection(address, cluster_credentials(service)),
            join,
            follower,
            nothing,
            clock,
            FAST,
        )
    )
    await followers.all_ready(10)
    assert await BroadcastExecutor(leader, followers).run(DropBlocks(4, (1,))) == Done(4)
    followers.stop()
    await obeying
    await server.stop()
    assert follower.seen == leader.seen == [DropBlocks(4, (1,))]
