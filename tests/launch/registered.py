"""Toy workers that register with routers, as processes would."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from jdisagg.layout.axes import Layout
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.registry import RegistryClient
from jdisagg.settings.timeouts import MembershipTimeouts
from tests.fakes.cluster import Cluster
from tests.service.doors import eventually

MODEL = ModelCard("toy", "toy", 89, 64, "float32", 64, "f00")


@contextlib.asynccontextmanager
async def registered(
    cluster: Cluster, addresses: Sequence[str], *routers: str
) -> AsyncIterator[None]:
    """Keeps the cluster's workers, which serve at these addresses, registered with these
    routers."""
    links: list[RegistryClient] = []
    for worker, role, at in zip(
        (cluster.prefill, cluster.decode),
        (WorkerRole.PREFILL, WorkerRole.DECODE),
        addresses,
        strict=True,
    ):
        card = WorkerCard(worker.name, worker.boot_id, role, at, Layout(), MODEL)
        timeouts = MembershipTimeouts(heartbeat_seconds=0.02)
        links.append(RegistryClient(routers, card, worker.status, timeouts=timeouts))
        links[-1].start()
    try:
        await eventually(lambda: all(link.registered == {*routers} for link in links))
        yield
    finally:
        for link in links:
            await link.leave()
