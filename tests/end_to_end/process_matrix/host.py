"""A process of the matrix: builds one worker after another on command, and serves it until the
next.

`main` is the whole life of a process: it obeys its parent, one command at a time, and ends with the
connection. What carries KV (link, transfer channel and its servers) lives as long as the process;
executor, worker and its gRPC port as long as a case.

A half lies on the devices on which it lies in the reference, whose programs are then the same, and
are compiled once for both."""

import asyncio
import os
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import jax

from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig, WorkerConfig
from jdisagg.engine.compilation import use_compilation_cache
from jdisagg.engine.replica import KvPlane, build_worker_replica
from jdisagg.ids import random_id
from jdisagg.messages.ports import HandoffSource, PeerPort
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster_plan import free_ports
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import GrpcServer
from jdisagg.transfer.backend_choice import Memories
from jdisagg.transfer.device_memory import LentMemory
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.prefill_worker import PrefillWorker
from models.checkpoint import load_model
from tests.end_to_end.process_matrix.cases import DECODE_DEVICES, PREFILL_DEVICES, Case, Seen
from tests.end_to_end.process_matrix.kv_watch import KvWatch
from tests.transfer.cuda_stand_in import StandIn

HOST, TRANSPORTS = "127.0.0.1", 2


@dataclass(frozen=True)
class Build:
    """A worker of one half of the case; answered by `Built`."""

    role: WorkerRole
    case: Case


@dataclass(frozen=True)
class Built:
    address: str


@dataclass(frozen=True)
class Look:
    """Answered by `Looked`: what the worker's mesh held, and its counters."""


@dataclass(frozen=True)
class Looked:
    seen: Seen
    counters: dict[str, int]
    offers: int
    bytes_moved: int
    channels: tuple[str, ...]


@dataclass(frozen=True)
class TearDown:
    """The worker's end; answered by `Gone`."""


@dataclass(frozen=True)
class Gone:
    pass


@dataclass(frozen=True)
class Failed:
    traceback: str


class Host:
    """What lives as long as the process, and the worker of the moment. On the event loop."""

    def __init__(self, lends: bool) -> None:
        self._clock = MonotonicClock()
        memories = Memories(device=LentMemory(StandIn())) if lends else Memories()
        end = memories.end(f"{HOST}:{free_ports(HOST, 1)[0]}", random_id())
        self._plane = KvPlane((end,), TRANSPORTS)
        self._link = GrpcKvLink(end)
        self._channel = NegotiatedChannel(
            self._clock, end, self._link, host=HOST, transports=TRANSPORTS, memories=memories
        )
        self._link.deliver_to(self._channel)
        self._door = GrpcServer(
            (self._link.service(),), ServiceConfig(HOST, int(end.control.rpartition(":")[2]))
        )
        self._served: _Served | None = None

    async def start(self) -> None:
        await self._door.start()

    async def obey(self, command: Build | Look | TearDown) -> Built | Looked | Gone:
        match command:
            case Build():
                assert self._served is None
                self._served = await _Served.build(command, self._channel, self._plane, self._clock)
                return Built(self._served.address)
            case Look():
                assert self._served is not None
                worker, moved = self._served.worker, sum(self._channel.bytes_per_pair().values())
                seen, counters = await self._served.watch.seen(), dict(worker.counters.snapshot())
                offers, channels = self._channel.offered().offers, self._channel.channels()
                return Looked(seen, counters, offers, moved, channels)
            case TearDown():
                served, self._served = self._served, None
                if served is not None:
                    await served.close()
                return Gone()


@dataclass
class _Served:
    worker: PrefillWorker | DecodeWorker
    watch: KvWatch
    server: GrpcServer
    peers: "_Peers"
    address: str

    @classmethod
    async def build(
        cls, command: Build, channel: NegotiatedChannel, plane: KvPlane, clock: MonotonicClock
    ) -> "_Served":
        engine, role = command.case.engine(), command.role
        half = engine.prefill if role is WorkerRole.PREFILL else engine.decode
        config = WorkerConfig(model=engine.model, instance=half, warm_up=False)
        load = lambda layout, devices: load_model(  # noqa: E731
            engine.model.directory, layout, devices, dtype=engine.model.dtype
        )
        devices = jax.devices()[PREFILL_DEVICES if role is WorkerRole.PREFILL else DECODE_DEVICES]
        instance = await asyncio.to_thread(
            build_worker_replica, role.value, role, config, load, devices, channel, plane
        )
        watch, limits, peers = KvWatch(instance.executor), engine.limits, _Peers()
        service = ServiceConfig(HOST, free_ports(HOST, 1)[0], drain_seconds=0.0)
        address = f"{HOST}:{service.port}"
        context = WorkerContext(role.value, clock, random_id, address=address)
        if role is WorkerRole.PREFILL:
            worker = PrefillWorker(context, watch, half, limits)
            services = prefill_service(worker), peer_service(worker)
        else:
            worker = DecodeWorker(context, watch, half, limits, peers.find)
            services = decode_service(worker), peer_service(worker)
        server = GrpcServer(services, service, worker.boot_id)
        await worker.start()
        await server.start()
        return cls(worker, watch, server, peers, address)

    async def close(self) -> None:
        self.server.force()
        await self.server.drain()
        await self.worker.stop()
        await asyncio.to_thread(self.watch.close)
        await self.peers.close()


class _Peers:
    """Ports of the workers that KV comes from, by address."""

    def __init__(self) -> None:
        self._workers: dict[str, RemoteWorker] = {}

    def find(self, source: HandoffSource) -> PeerPort:
        if source.address not in self._workers:
            self._workers[source.address] = RemoteWorker(source.address)
        return self._workers[source.address].peer

    async def close(self) -> None:
        for worker in self._workers.values():
            await worker.aclose()


async def _live(connection: Connection, lends: bool) -> None:
    commands: asyncio.Queue[Build | Look | TearDown] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        """On a thread of its own: the parent's death must end this process whatever the loop is
        at."""
        try:
            while True:
                loop.call_soon_threadsafe(commands.put_nowait, connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    host = Host(lends)
    await host.start()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        command = await commands.get()
        try:
            answer: object = await host.obey(command)
        except Exception:
            answer = Failed(traceback.format_exc())
        await asyncio.to_thread(connection.send, answer)


def main(pipe: int, cache: str, lends: bool) -> None:
    """`pipe`: the number of an open file, this process's end. `lends`: its devices' memory, by a
    stand-in of the CUDA driver, instead of the transfer engine."""
    use_compilation_cache(cache)
    asyncio.run(_live(Connection(pipe), lends))
