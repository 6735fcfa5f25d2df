"""Real processes for tests of the transfer channel: each has a `NegotiatedChannel`, and obeys its
parent over a local socket.

The parent is the post office: it carries the messages of all processes' links, its own included,
and gives commands, one at a time and process (`child` is its whole life). Blocks hold the same
values in every process, so that nothing but KV must move."""

import dataclasses
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.layout.axes import MESH_AXES, Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import KvMessage
from jdisagg.node.cluster_plan import free_ports
from jdisagg.transfer.channel import PullTarget, block_sharding, resident_zeros
from jdisagg.transfer.negotiated_channel import Memories, NegotiatedChannel
from jdisagg.transfer.nixl_agent import NixlAgent
from jdisagg.transfer.nixl_memory import NixlMemory
from jdisagg.transfer.shared_memory import SharedMemory
from tests import time_scale

ROOT = Path(__file__).parents[2]

TRANSPORTS = 2
WAIT_SECONDS = time_scale.seconds(40.0)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block on a mesh of the first devices of its process or job."""

    layout: str
    kv_heads: int = 4
    tokens: int = 4

    def shape(self, ranks: int) -> tuple[int, int, int, int, int]:
        return (ranks, 2, self.kv_heads, self.tokens, 2)

    def values(self, ranks: int) -> np.ndarray:
        shape = self.shape(ranks)
        return (np.arange(np.prod(shape)) % 251).reshape(shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class MakeOffer:
    offer_id: int
    block: Block
    rank: int


@dataclasses.dataclass(frozen=True)
class MakePull:
    """`granule` heads a piece."""

    offer_id: int
    peer: str
    block: Block
    rank: int
    granule: int
    deadline_seconds: float


@dataclasses.dataclass(frozen=True)
class Introduce:
    peer: str
    card: MeshCard


@dataclasses.dataclass(frozen=True)
class Arrived:
    """`shards`: own devices of the receiving rank -> their heads."""

    error: str = ""
    shards: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)


Command = MakeOffer | MakePull | Introduce


class Post:
    """The parent's side."""

    def __init__(self) -> None:
        self._listener = Listener(("127.0.0.1", 0))
        self._places: dict[KvEnd, Callable[[KvEnd, KvMessage], None]] = {}
        self.processes: list[Process] = []

    def join(self, end: KvEnd, handle: Callable[[KvEnd, KvMessage], None]) -> None:
        """A channel of this process."""
        self._places[end] = handle

    def of(self, sender: KvEnd) -> "PostEnd":
        return PostEnd(self, sender)

    def deliver(self, sender: KvEnd, end: KvEnd, message: KvMessage) -> None:
        if handle := self._places.get(end):
            handle(sender, message)

    def start(
        self, devices: int, count: int = 1, shares: bool = False, nixl: bool = False
    ) -> list["Process"]:
        """`count` processes of one job, each with so many devices; ready when this returns.
        `shares`: they share memory with who can map it. `nixl`: theirs can be read over
        NIXL."""
        coordinator = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        port = self._listener.address[1]  # type: ignore[misc]
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        children = []
        for number in range(count):
            how = (port, number, count, coordinator, shares, nixl)
            program = f"from tests.transfer.kv_processes import child; child{how}"
            command = [sys.executable, "-c", program]
            children.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        started: dict[int, Process] = {}
        for _ in children:
            connection = self._listener.accept()
            number, end = connection.recv()
            process = started[number] = Process(self, children[number], connection, end)
            self._places[end] = process.forward
            self.processes.append(process)
        return [started[number] for number in range(count)]

    def close(self) -> None:
        for process in self.processes:
            process.end_it()
        self._listener.close()


@dataclasses.dataclass(frozen=True)
class PostEnd:
    post: Post
    sender: KvEnd

    def send(self, end: KvEnd, message: KvMessage) -> None:
        self.post.deliver(self.sender, end, message)


class Process:
    """One child. `do` gives a command, `answer` waits for what became of it."""

    def __init__(
        self, post: Post, child: subprocess.Popen[bytes], connection: Connection, end: KvEnd
    ) -> None:
        self.end = end
        self._post, self._child, self._connection = post, child, connection
        self._answers: queue.Queue[Arrived | None] = queue.Queue()
        self._outgoing: queue.Queue[object] = queue.Queue()
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def forward(self, sender: KvEnd, message: KvMessage) -> None:
        self._outgoing.put((sender, message))

    def do(self, command: Command) -> None:
        self._outgoing.put(command)

    def answer(self) -> Arrived:
        answer = self._answers.get(timeout=WAIT_SECONDS)
        assert answer is not None, "the process has ended"
        return answer

    def has_answered(self) -> bool:
        return not self._answers.empty()

    @property
    def pid(self) -> int:
        return self._child.pid

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def end_it(self) -> None:
        self._child.kill()
        self._child.wait(timeout=WAIT_SECONDS)
        self._outgoing.put(None)

    def _read(self) -> None:
        try:
            while True:
                match self._connection.recv():
                    case (KvEnd() as end, message):
                        self._post.deliver(self.end, end, message)
                    case answer:
                        self._answers.put(answer)
        except (EOFError, OSError):
            self._answers.put(None)

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                self._connection.send(item)
        except OSError:
            pass
        self._connection.close()


class _Sending:
    """A child's link: hands to a thread, for a socket may block."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, end: KvEnd, message: KvMessage) -> None:
        self._outgoing.put((end, message))

    def answer(self, answer: object) -> None:
        self._outgoing.put(answer)

    def _run(self) -> None:
        while True:
            self._connection.send(self._outgoing.get())


def child(port: int, number: int, count: int, coordinator: str, shares: bool, nixl: bool) -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, count, number)
    jax.devices()
    connection = Client(("127.0.0.1", port))
    memories = Memories(
        SharedMemory.of_host() if shares else None,
        NixlMemory(NixlAgent("127.0.0.1")) if nixl else None,
    )
    end = memories.end(f"process {os.getpid()}", secrets.randbits(64))
    link, clock = _Sending(connection), MonotonicClock()
    channel = NegotiatedChannel(clock, end, link, transports=TRANSPORTS, memories=memories)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def obey() -> None:
        while True:
            try:
                link.answer(_obey(channel, commands.get()))
            except Exception as error:
                link.answer(Arrived(repr(error)))

    threading.Thread(target=obey, daemon=True).start()
    connection.send((number, end))
    try:
        while True:
            match connection.recv():
                case (KvEnd() as sender, message):
                    channel.handle(sender, message)
                case command:
                    commands.put(command)
    except EOFError:
        os._exit(0)


def _obey(channel: NegotiatedChannel, command: Command) -> Arrived:
    if isinstance(command, Introduce):
        channel.connect(command.peer, command.card)
        return Arrived()
    block = command.block
    layout = Layout.parse(block.layout)
    devices = np.array(jax.devices()[: layout.devices])
    mesh = jax.sharding.Mesh(devices.reshape(layout.mesh_shape(block.kv_heads)), MESH_AXES)
    if isinstance(command, MakeOffer):
        values, sharding = block.values(layout.dp), block_sharding(mesh)
        array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
        channel.offer(command.offer_id, array, command.rank)
        return Arrived()
    zeros = resident_zeros(mesh, 2, command.granule, block.tokens, 2, np.dtype(np.float32))
    target = PullTarget(zeros, command.rank, command.peer)
    pull = channel.pull(command.offer_id, target, command.deadline_seconds)
    while not pull.is_ready():
        time.sleep(0.002)
    if error := pull.failed():
        return Arrived(f"{type(error).__name__}: {error}")
    shards: dict[int, list[np.ndarray]] = {}
    for array in pull.arrays():
        for shard in array.addressable_shards:
            if shard.index[0].indices(array.shape[0])[0] == command.rank:
                shards.setdefault(shard.device.id, []).append(np.asarray(shard.data))
    return Arrived("", {device: np.concatenate(parts, axis=2) for device, parts in shards.items()})
