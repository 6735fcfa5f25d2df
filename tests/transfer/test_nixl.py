"""KV over NIXL: the suite of backends, deaths and invalid answers, and that no memory is used twice
at once.

UCX uses TCP on loopback here, as it does between hosts without RDMA."""

import dataclasses
import gc
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import jax
import msgspec
import numpy as np
import pytest

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import InRegistered, KvMessage, Posted
from jdisagg.transfer import nixl_agent
from jdisagg.transfer import nixl_memory as nixl_memory_module
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.negotiated_channel import Memories
from jdisagg.transfer.nixl_agent import INSTALL, NixlAgent, nixl_bindings, ucx_devices
from jdisagg.transfer.nixl_memory import NixlInlet, NixlMemory, NixlOutlet, nixl_memory
from tests import time_scale
from tests.transfer.conformance import (
    LONG_SECONDS,
    Ends,
    answer,
    arrives,
    case,
    fails,
    finished,
    one_piece,
    settled,
)
from tests.transfer.kv_processes import Block, Introduce, MakePull, Process
from tests.transfer.loopback import SENDER, Loopback, Pair
from tests.transfer.process_conformance import MemoryConformance, fails_and_the_next_arrives
from tests.transfer.world import PATIENCE_SECONDS, World
from tests.transfer.world import card as process_card


def installed() -> bool:
    try:
        nixl_bindings()
    except ConfigError:
        return False
    return True


needs_nixl = pytest.mark.skipif(not installed(), reason=f"NIXL is not installed: {INSTALL}")


@pytest.fixture(autouse=True)
def _as_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def regions() -> tuple[NixlMemory, NixlMemory]:
    return NixlMemory(NixlAgent("127.0.0.1")), NixlMemory(NixlAgent("127.0.0.1"))


@pytest.fixture
def memories(regions: tuple[NixlMemory, NixlMemory]) -> tuple[Memories, ...]:
    return tuple(Memories(nixl=memory) for memory in regions)


@needs_nixl
class TestNixlChannel(MemoryConformance):
    title, memory, early = "NIXL", InRegistered, False

    def check_nothing_is_kept(self, pair: Pair) -> None:
        """A sender keeps the region of a revoked pull until the pull's deadline: its receiver may
        still read it."""
        past_deadlines = SimpleNamespace(monotonic=lambda: time.monotonic() + LONG_SECONDS)
        with patch.object(nixl_memory_module, "time", past_deadlines):
            for memories in pair.memories:
                assert memories.nixl is not None
                settled(lambda nixl=memories.nixl: gc.collect() >= 0 and nixl.regions()[1] == 0)


@needs_nixl
def test_who_has_no_nixl_is_served_through_the_engine(loopback: Loopback) -> None:
    pair = Pair.of(loopback, Memories(nixl=NixlMemory(NixlAgent("127.0.0.1"))), Memories())
    block = case("tp=2", "tp=2")
    pair.sender.offer(7, block.block, 0)
    arrives(pair.ends.pull(7, block), block)
    assert pair.receiver.channels() == (f"{SENDER.control} transfer engine",)
    pair.close()


@needs_nixl
@pytest.mark.parametrize(
    "spoil",
    [
        lambda lies: {"metadata": b""},
        lambda lies: {"metadata": lies.metadata[:-1]},
        lambda lies: {"metadata": bytes(len(lies.metadata))},
        lambda lies: {"metadata": nixl_agent._digest(b"no") + b"no"},
        lambda lies: {"address": lies.address + (1 << 40)},
        lambda lies: {"size": 1 << 50},
        lambda lies: {"offsets": ()},
        lambda lies: {"offsets": (0,)},
    ],
)
def test_an_answer_that_cannot_be_read_fails_its_pull_and_the_next_one_comes_through_the_engine(
    pair: Pair, spoil: Callable[[InRegistered], dict[str, object]]
) -> None:
    fails_and_the_next_arrives(pair, lambda lies: msgspec.structs.replace(lies, **spoil(lies)))
    assert pair.heard(Posted)[-1].memory is None  # type: ignore[union-attr]


@needs_nixl
def test_regions_are_used_again_once_nobody_needs_them_and_not_before(
    ends: Ends, regions: tuple[NixlMemory, NixlMemory]
) -> None:
    block = case("tp=1", "tp=1")
    other = dataclasses.replace(block, block=block.block + 1, values=block.values + 1)
    ends.sender.offer(1, block.block, 0)
    ends.sender.offer(2, other.block, 0)
    kept = finished(ends.pull(1, block))
    for _ in range(4):
        arrives(ends.pull(2, other), other)
    arrives(kept, block)
    del kept
    for memory in regions:
        settled(lambda memory=memory: gc.collect() >= 0 and memory.regions()[1] == 0)
        assert memory.regions()[0] <= 6


@needs_nixl
def test_a_posting_past_its_deadline_keeps_its_region_from_others_until_then(
    regions: tuple[NixlMemory, NixlMemory],
) -> None:
    """The receiver may be reading it; what was read or given up is free at once."""
    memory, _ = regions
    outlet = NixlOutlet(memory)
    for pull_id, seconds in ((1, 1000.0), (2, 0.0), (3, 1000.0)):
        outlet.reserve(pull_id, one_piece(np.ones((1, 1, 1, 4, 4), np.float32)), seconds)
    assert memory.regions() == (3, 3)
    outlet.withdraw(1, 1, "revoked")
    outlet.withdraw(2, 1, "too late")
    outlet.pulled(3)
    assert memory.regions() == (3, 1)
    outlet.close(in_flight=True)


@needs_nixl
def test_what_is_read_after_the_deadline_counts_for_nothing(
    regions: tuple[NixlMemory, NixlMemory],
) -> None:
    """By then the sender may have written something else there."""
    outlet, sender = NixlOutlet(regions[0]), NixlInlet(regions[1])
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    aval = jax.ShapeDtypeStruct((1, 1, 1, 4, 4), np.float32, sharding=place)
    for pull_id, in_time in ((1, True), (2, False)):
        values = np.full(aval.shape, pull_id, aval.dtype)
        lies = outlet.reserve(pull_id, one_piece(values), 1000.0).memory
        outlet.write(pull_id)
        (leaf,) = sender.pull(
            AnnouncedArrays(answer(lies), [aval], lambda in_time=in_time: in_time)
        )
        settled(leaf.is_ready)
        if in_time:
            np.testing.assert_array_equal(leaf.array(), values)
        else:
            with pytest.raises(HandoffError, match="after the pull's deadline"):
                leaf.array()


class NixlWorld(World):
    """Its processes have NIXL, and this one has."""

    def __init__(self) -> None:
        self.memory = NixlMemory(NixlAgent("127.0.0.1"))
        super().__init__(Memories(nixl=self.memory))

    def stopped_at_its_answer(
        self, process: Process, receiver: KvEnd | None = None
    ) -> list[Posted]:
        """From now on the process is stopped as its answer to `receiver` (here) goes out: what it
        announced cannot be read to the end."""
        answers: list[Posted] = []
        deliver = self.post.deliver

        def stop(sender: KvEnd, end: KvEnd, message: KvMessage) -> None:
            if isinstance(message, Posted) and end == (receiver or self.here) and not answers:
                process.signal(signal.SIGSTOP)
                settled(lambda: is_stopped(process.pid))
                answers.append(message)
            deliver(sender, end, message)

        self.post.deliver = stop
        return answers


@pytest.fixture
def nixl_world() -> Iterator[NixlWorld]:
    world = NixlWorld()
    yield world
    world.close()


@needs_nixl
def test_a_sender_that_is_killed_while_it_is_read_fails_the_pull_and_its_successor_serves(
    nixl_world: NixlWorld,
) -> None:
    first = nixl_world.start("first")
    nixl_world.is_pulled_from("first")
    answers = nixl_world.stopped_at_its_answer(first)
    pull = nixl_world.pull("first")
    settled(lambda: bool(answers))
    assert isinstance(answers[0].memory, InRegistered)
    assert not pull.is_ready()
    first.end_it()
    fails(pull, "NIXL")
    nixl_world.channel.disconnect("first")
    nixl_world.start("second")
    nixl_world.is_pulled_from("second")
    del pull
    settled(lambda: gc.collect() >= 0 and nixl_world.memory.regions()[1] == 0)


@needs_nixl
def test_a_sender_that_is_stopped_while_it_is_read_ends_the_pull_at_its_deadline_and_goes_on_later(
    nixl_world: NixlWorld,
) -> None:
    sender = nixl_world.start("peer")
    nixl_world.is_pulled_from("peer")
    answers = nixl_world.stopped_at_its_answer(sender)
    pull = nixl_world.pull("peer", seconds=1.0)
    fails(pull, "within the deadline")
    assert answers
    assert nixl_world.memory.regions()[1] >= 1, "the sender may still write there"
    sender.signal(signal.SIGCONT)
    nixl_world.is_pulled_from("peer")
    del pull
    settled(lambda: gc.collect() >= 0 and nixl_world.memory.regions()[1] == 0)


@needs_nixl
def test_a_receiver_that_is_killed_while_it_reads_harms_neither_its_sender_nor_other_receivers(
    nixl_world: NixlWorld,
) -> None:
    sender = nixl_world.start("sender")
    (receiver,) = nixl_world.job()
    receiver.do(Introduce("sender", process_card(sender.end)))
    assert receiver.answer().error == ""
    answers = nixl_world.stopped_at_its_answer(sender, receiver.end)
    receiver.do(MakePull(1, "sender", Block("tp=2"), 0, 1, PATIENCE_SECONDS))
    settled(lambda: bool(answers))
    receiver.end_it()
    sender.signal(signal.SIGCONT)
    for _ in range(3):
        nixl_world.is_pulled_from("sender")


@needs_nixl
def test_garbage_on_its_ports_harms_no_process_and_it_listens_on_loopback_alone(
    nixl_world: NixlWorld,
) -> None:
    sender = nixl_world.start("peer")
    places = listening(sender.pid)
    assert places
    for host, port in places:
        assert host == "127.0.0.1"
        for garbage in (b"", bytes(8), b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16)):
            with socket.create_connection((host, port)) as connection:
                connection.settimeout(time_scale.seconds(5.0))
                try:
                    connection.sendall(garbage)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(64)
                except OSError:
                    continue  # it has hung up
    for _ in range(3):
        nixl_world.is_pulled_from("peer")


def is_stopped(pid: int) -> bool:
    """All of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process takes TCP connections."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


@needs_nixl
def test_the_log_has_the_version_of_ucx_that_nixl_brings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        NixlAgent("127.0.0.1")
    assert re.search(r"over UCX [1-9]\d*\.\d+\.\d+, devices lo", caplog.text)


def test_without_the_wheel_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(nixl_agent.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps nixl-cu12"):
        NixlAgent("127.0.0.1")


def test_nixl_is_used_by_itself_where_there_is_rdma_and_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> None:
        raise ConfigError("NIXL is missing")

    made: list[str] = []
    monkeypatch.setattr(nixl_memory_module, "NixlAgent", made.append)
    monkeypatch.setattr(nixl_memory_module, "nixl_bindings", lambda: None)
    for rdma in ((), ("mlx5_0:1",)):
        monkeypatch.setattr(nixl_memory_module, "rdma_devices", lambda rdma=rdma: rdma)
        assert nixl_memory("engine", "198.51.100.7") is None
        assert nixl_memory("auto", "127.0.0.1") is None
        asked = nixl_memory("nixl", "127.0.0.1")
        assert asked is not None and asked.first
        found = nixl_memory("auto", "198.51.100.7")
        assert (found is not None) == bool(rdma)
        assert found is None or not found.first
    assert made == ["127.0.0.1", "127.0.0.1", "198.51.100.7"]
    monkeypatch.setattr(nixl_memory_module, "nixl_bindings", none)
    assert nixl_memory("auto", "198.51.100.7") is None


def test_a_host_that_is_no_interface_of_this_machine_is_refused() -> None:
    assert ucx_devices("127.0.0.1") == ("lo",)
    with pytest.raises(ConfigError, match=r"no network interface .* 198\.51\.100\.7"):
        ucx_devices("198.51.100.7")
    with pytest.raises(ConfigError, match="no IPv4 address"):
        ucx_devices("::1")
