"""Strangers on every port of every process, while streams run: each stream comes to its end with
the right tokens.

Where the transfer engine aborts its process over what it was sent, the supervisor starts the worker
again and the streams recover; what happened is printed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.soak.cluster import ChaosCluster, Shape
from benchmarks.soak.garbage import ENDS, MESSAGES, idle_connections, listening_ports, send
from benchmarks.soak.load import Kind, Stream, known_kinds
from jdisagg.client import AsyncClient
from tests import time_scale
from tests.programs import PROGRAMS

IDLE = 1000
RECOVER_SECONDS = time_scale.seconds(60.0)
SHAPE = Shape(warm_up=False)

pytestmark = [pytest.mark.ci, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kinds() -> list[Kind]:
    return await known_kinds(8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory) -> AsyncIterator[ChaosCluster]:
    folder: Path = tmp_path_factory.mktemp("garbage")
    cluster = ChaosCluster(SHAPE, folder, str(PROGRAMS))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


class Load:
    """Streams one after the other, several at a time, for as long as the block runs."""

    def __init__(self, cluster: ChaosCluster, kinds: list[Kind], at_once: int = 3) -> None:
        self._cluster = cluster
        self._kinds = kinds
        self._at_once = at_once
        self._over = False
        self.streams: list[Stream] = []

    async def __aenter__(self) -> "Load":
        self._client = AsyncClient(self._cluster.address, connect_seconds=30.0)
        self._tasks = [asyncio.create_task(self._go(number)) for number in range(self._at_once)]
        return self

    async def _go(self, number: int) -> None:
        while not self._over:
            stream = Stream(self._kinds[(number + len(self.streams)) % len(self._kinds)])
            self.streams.append(stream)
            await stream.run(self._client)

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)
        await self._client.close()


async def attacked(
    cluster: ChaosCluster,
    kinds: list[Kind],
    attack: Callable[[str, int], Awaitable[None]],
    most: int,
) -> dict[str, int]:
    """Attacks up to `most` ports of each process under load, then sees to it that all is well;
    restarts by group."""
    restarts = {name: group.restarts for name, group in cluster.groups.items()}
    async with Load(cluster, kinds) as load:
        for name in cluster.groups:
            ports = listening_ports(cluster.processes(name))
            # those are attacked in any case
            ports.sort(key=lambda port: port not in cluster.control_ports)
            for port in ports[:most]:
                await attack(name, port)
            await cluster.until_live(cluster.workers, RECOVER_SECONDS)
    assert [stream.wrong for stream in load.streams if stream.wrong] == []
    assert load.streams
    await cluster.until_quiet(10)
    died = {
        name: group.restarts - restarts[name]
        for name, group in cluster.groups.items()
        if group.restarts > restarts[name]
    }
    assert "router" not in died
    return died


async def test_every_process_listens_where_it_was_told_and_on_one_interface_only(
    cluster: ChaosCluster,
):
    for name in cluster.groups:
        addresses = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in cluster.processes(name)
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN"
        }
        assert addresses == {"127.0.0.1"}, (name, addresses)


async def test_garbage_on_every_port_ends_nobodys_stream(cluster: ChaosCluster, kinds: list[Kind]):
    answered: list[tuple[str, str]] = []

    async def attack(name: str, port: int) -> None:
        for number, (what, message) in enumerate(MESSAGES.items()):
            if await send(port, message(), ENDS[number % len(ENDS)]):
                answered.append((name, what))

    died = await attacked(cluster, kinds, attack, most=100)
    print(f"started again: {died or 'none'}")
    assert {name for name, _ in answered} == set(cluster.groups), "a process was not reached"
    assert {what for _, what in answered} == set(MESSAGES)


@pytest.mark.slow
async def test_a_thousand_idle_connections_on_a_port_end_nobodys_stream(
    cluster: ChaosCluster, kinds: list[Kind]
):
    let_in: dict[str, int] = {}

    async def attack(name: str, port: int) -> None:
        async with idle_connections(port, IDLE) as count:
            let_in[f"{name}:{port}"] = count
            await asyncio.sleep(1.0)

    died = await attacked(cluster, kinds, attack, most=3)
    print(f"let in: {let_in}; started again: {died or 'none'}")
    assert {int(name.partition(":")[2]) for name in let_in} >= cluster.control_ports
    assert sum(count > IDLE / 2 for count in let_in.values()) >= len(cluster.groups)
