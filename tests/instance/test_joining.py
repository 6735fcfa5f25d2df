"""How processes come together: what the flags must say, and an instance's stream under the
cluster's mutual TLS."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
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
from jdisagg.service.internal.instance_stream import InstanceServer, LeaderConnection
from jdisagg.service.server import cluster_credentials, server_credentials
from tests.instance.noting import FAST, NotingExecutor, nothing
from tests.service.certificates import certificates_in


def test_flags_that_do_not_fit_together_are_refused() -> None:
    address, half = "127.0.0.1:1", "give all three, or none"
    for given, said in (
        ((address, None, None), half),
        ((None, 2, 0), half),
        ((address, 2, None), half),
        ((address, 2, 2), r"process_id=2 must be in \[0, 2\)"),
        *(
            ((wrong, 2, 0), f"coordinator={wrong} must be host:port")
            for wrong in ("foo", "localhost:", ":1", "localhost:x")
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            join_instance(*given)


def test_without_flags_and_without_a_scheduler_both_ways_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def undetected(*_: object, **__: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", undetected)
    with pytest.raises(ConfigError, match="Slurm, Kubernetes or Open MPI started them; else say"):
        join_instance()


def _of_processes(*devices: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(process_index=process, id=100 * process + number)
        for process, count in enumerate(devices)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("devices", "count", "ids"),
    [
        ((2, 2), 4, [0, 1, 100, 101]),
        ((8, 8), 4, [0, 1, 100, 101]),  # a layout smaller than the job: not all of process 0's
        ((2, 1, 2), 3, [0, 100, 200]),
        ((3,), 2, [0, 1, 2]),  # one process keeps all: its next role may want them
    ],
)
def test_every_process_has_the_same_part_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], count: int, ids: list[int]
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: _of_processes(*devices))
    assert [one.id for one in ProcessGroup(0, len(devices)).devices(count)] == ids


def test_a_layout_that_leaves_a_process_without_its_part_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for devices, count in (((4, 4), 1), ((4, 4), 3), ((4, 1), 4), ((4, 0), 2)):
        monkeypatch.setattr(jax, "devices", lambda devices=devices: _of_processes(*devices))
        with pytest.raises(ConfigError, match=f"layout of {count} devices over 2 processes"):
            ProcessGroup(1, 2).devices(count)


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
    link = LeaderConnection(address, cluster_credentials(service))
    obeying = asyncio.create_task(run_follower(link, join, follower, nothing, clock, FAST))
    await followers.all_ready(10)
    assert await BroadcastExecutor(leader, followers).run(DropBlocks(4, (1,))) == Done(4)
    followers.stop()
    await obeying
    await server.stop()
    assert follower.seen == leader.seen == [DropBlocks(4, (1,))]
