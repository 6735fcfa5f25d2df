"""A process of the matrix: builds one worker after another on command and serves it.

`main` runs in the child: it executes the parent's calls one at a time and ends with the connection.
The link, the transfer channel and its servers live as long as the process; executor, worker and its
gRPC port live as long as a case. A half lies on the same devices as in the reference, so that its
programs are compiled once for both."""

import asyncio
import os
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import jax

from jdisagg.assembly import Worker, WorkerHost
from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.engine.limits import worker_config
from jdisagg.engine.replica import KvPlane, build_replica
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster_plan import free_ports
from jdisagg.node.peer_ports import PeerPorts
from jdisagg.node.worker import worker_services
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.server import GrpcServer, cluster_credentials
from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from jdisagg.worker.mesh_worker import WorkerContext
from launch.model import loader
from tests.end_to_end.process_matrix.cases import DECODE_DEVICES, PREFILL_DEVICES, Case, Seen
from tests.end_to_end.process_matrix.kv_watch import KvWatch

HOST, TRANSPORTS = "127.0.0.1", 2


@dataclass(frozen=True)
class Looked:
    """State of the worker's mesh, its counters and the process's channel."""

    seen: Seen
    counters: dict[str, int]
    offers: int
    bytes_moved: int
    channels: tuple[str, ...]


class Host:
    """The process's channel and the worker of the present case. Runs on the event loop."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        end = KvEnd(f"{HOST}:{free_ports(HOST, 1)[0]}", random_id())
        self._plane = KvPlane((end,), TRANSPORTS)
        self._link = GrpcKvLink(end)
        self._channel = NegotiatedChannel(
            self._clock, end, self._link, host=HOST, transports=TRANSPORTS
        )
        self._link.deliver_to(self._channel)
        port = int(end.control.rpartition(":")[2])
        self._link_server = GrpcServer((self._link.service(),), ServiceConfig(HOST, port))
        self._served: tuple[Worker, KvWatch, GrpcServer, PeerPorts] | None = None

    async def start(self) -> None:
        await self._link_server.start()

    async def build(self, role: WorkerRole, case: Case) -> str:
        """Serves the worker of one half of the case; returns its address."""
        assert self._served is None
        engine = case.engine()
        service = ServiceConfig(HOST, free_ports(HOST, 1)[0], drain_seconds=0.0)
        address = f"{HOST}:{service.port}"
        context = WorkerContext(role.value, self._clock, random_id, address=address)
        instance = await asyncio.to_thread(
            build_replica,
            WorkerHost(context, role, worker_config(engine, role)),
            loader(engine.model.directory, engine.model.dtype),
            jax.devices()[PREFILL_DEVICES if role is WorkerRole.PREFILL else DECODE_DEVICES],
            self._channel,
            self._plane,
        )
        peers = PeerPorts(cluster_credentials(service), self._clock, engine.limits.timeouts.call)
        watch = KvWatch(instance.executor)
        worker = instance.host.worker(watch, peers.find)
        server = GrpcServer(worker_services(worker), service, worker.boot_id)
        await worker.start()
        await server.start()
        self._served = worker, watch, server, peers
        return address

    async def look(self) -> Looked:
        assert self._served is not None
        worker, watch, _, _ = self._served
        moved = sum(self._channel.bytes_per_pair().values())
        seen, counters = await watch.seen(), dict(worker.counters.snapshot())
        offers = self._channel.offered().offers
        return Looked(seen, counters, offers, moved, self._channel.channels())

    async def tear_down(self) -> None:
        if self._served is None:
            return
        worker, watch, server, peers = self._served
        self._served = None
        server.force()
        await server.drain()
        await worker.stop()
        await asyncio.to_thread(watch.close)
        await peers.close()


async def _live(connection: Connection) -> None:
    calls: asyncio.Queue[tuple[str, tuple[object, ...]]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        """On its own thread, so that the parent's death ends this process even if the loop
        hangs."""
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    host = Host()
    await host.start()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        name, arguments = await calls.get()
        try:
            answer = True, await getattr(host, name)(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        await asyncio.to_thread(connection.send, answer)


def main(pipe: int, cache: str) -> None:
    """Runs the child.

    Args:
        pipe: File number of this process's end of the pipe.
        cache: Folder of compiled programs.
    """
    use_compilation_cache(cache)
    asyncio.run(_live(Connection(pipe)))
