"""The toy cluster in real time with gRPC between path and workers and between the workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.request import Request
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.worker_service import decode_service, peer_service, prefill_service
from jdisagg.service.server import GrpcServer
from tests.fakes.cluster import Cluster, Collected, ToyText
from tests.fakes.fake_executor import Costs

COSTS = Costs(prefill_token=1e-5, decode_step=1e-3, pull=1e-3, other=1e-5)


class LatePeer:
    """A peer port whose address is known only after it was handed out."""

    def __init__(self) -> None:
        self.target: PeerPort | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)


@dataclass
class Router:
    path: RequestPath
    prefill: RemoteWorker
    decode: RemoteWorker

    async def collect(self, request: Request) -> Collected:
        collected = Collected()
        async for event in self.path.stream(request):
            collected.add(event)
        return collected

    async def close(self) -> None:
        await self.prefill.aclose()
        await self.decode.aclose()


@dataclass
class Served:
    cluster: Cluster
    addresses: tuple[str, str]
    observer: Observer | None = None  # of routers

    def router(self) -> Router:
        prefill, decode = map(RemoteWorker, self.addresses)
        cluster, observer = self.cluster, self.observer
        text = lambda request: ToyText(request.sampling.stop)  # noqa: E731
        path = RequestPath(
            ClusterPorts(
                {"prefill0": wrap.prefill("prefill0", prefill.prefill, observer)},
                {"decode0": wrap.decode("decode0", decode.decode, observer)},
            ),
            text,
            cluster.limits,
            cluster.clock,
            new_id=cluster.new_id,
        )
        return Router(path, prefill, decode)

    async def is_quiet(self) -> bool:
        statuses = [await worker.status() for worker in (self.cluster.decode, self.cluster.prefill)]
        return all(
            s.free_pages == s.total_pages and not (s.running or s.waiting or s.handoffs)
            for s in statuses
        )


@contextlib.asynccontextmanager
async def served(observers: Mapping[str, Observer] | None = None) -> AsyncIterator[Served]:
    """`observers`: of "router", "prefill0" and "decode0"."""
    late, observer = LatePeer(), (observers or {}).get
    cluster = Cluster(
        costs=COSTS,
        wrap_peer=lambda _: late,
        wrap_mesh=lambda name, mesh: wrap.mesh(name, mesh, observer(name)),
    )
    async with cluster:
        own = "prefill0", cluster.prefill, observer("prefill0")
        decoding = wrap.served(DecodePort, "decode0", cluster.decode, observer("decode0"))
        config = ServiceConfig(port=0, drain_seconds=0.0)
        prefill = GrpcServer(
            (
                prefill_service(wrap.served(PrefillPort, *own)),
                peer_service(wrap.served(PeerPort, *own)),
            ),
            config,
            cluster.prefill.boot_id,
        )
        decode = GrpcServer((decode_service(decoding),), config, cluster.decode.boot_id)
        addresses = f"127.0.0.1:{await prefill.start()}", f"127.0.0.1:{await decode.start()}"
        peer = RemoteWorker(addresses[0])
        late.target = wrap.peer("decode0", peer.peer, observer("decode0"))
        try:
            yield Served(cluster, addresses, observer("router"))
        finally:
            await decode.drain()
            await prefill.drain()
            await peer.aclose()


async def quiet(served: Served) -> None:
    async with asyncio.timeout(20):
        while not await served.is_quiet():
            await asyncio.sleep(0.02)
    await served.cluster.check_quiet(0.0)
