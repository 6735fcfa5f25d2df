"""Toy workers that register with routers, as processes would."""

import contextlib
from collections.abc import AsyncIterator

from jdisagg.layout.axes import Layout
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.registry import RegistryClient
from jdisagg.timeouts import MembershipTimeouts
from tests.service.doors import eventually
from tests.service.test_cluster_over_grpc import Served

MODEL = ModelCard("toy", "toy", 89, 64, "float32", 64, "f00")


@contextlib.asynccontextmanager
async def registered(workers: Served, *routers: str) -> AsyncIterator[None]:
    """Keeps the workers registered with these routers."""
    links: list[RegistryClient] = []
    for worker, role, at in zip(
        (workers.cluster.prefill, workers.cluster.decode),
        (WorkerRole.PREFILL, WorkerRole.DECODE),
        workers.addresses,
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
