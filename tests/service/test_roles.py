"""Changing roles over real gRPC: what arrives equals what was sent, errors keep their type, and the
cluster's token is asked for."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.errors import UnauthenticatedError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import AdviceReport, SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.connection import Credentials
from jdisagg.service.internal.role_services import (
    cluster_roles,
    cluster_roles_service,
    worker_roles,
    worker_roles_service,
)
from jdisagg.service.server import GrpcServer

REPORT = SwitchReport(
    "p1",
    2**64 - 1,
    WorkerRole.DECODE,
    Layout(dp=2),
    SwitchState.DONE,
    2**64 - 2,
    "",
    0.5,
    0.25,
    1.5,
    2.25,
)
ADVICE = AdviceReport(
    3,
    2,
    2,
    2,
    2.5,
    1.25,
    "prefill is short",
    True,
    "p1 is changing its role",
    0.5,
    1.0,
    4.0,
    0.1,
    7.5,
    2.0,
    0.2,
    0.9,
)


class Desk:
    """Both sides at once: a worker's port and a router's desk."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.error: Exception | None = None

    async def switch_role(self, call: SwitchCall) -> None:
        self.asked.append(call)
        if self.error is not None:
            raise self.error

    async def switch_report(self) -> SwitchReport:
        return REPORT

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        self.asked.append((name, role, layout, deadline_seconds))
        if self.error is not None:
            raise self.error
        return REPORT

    async def advice(self) -> AdviceReport:
        return ADVICE


@contextlib.asynccontextmanager
async def served(desk: Desk, tokens: tuple[str, ...] = ()) -> AsyncIterator[str]:
    services = (worker_roles_service(desk, tokens), cluster_roles_service(desk, tokens))
    server = GrpcServer(services, ServiceConfig(port=0, drain_seconds=0.0))
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.drain()


async def test_a_worker_and_a_router_are_asked_over_their_connections() -> None:
    desk = Desk()
    call = SwitchCall(7, WorkerRole.DECODE, Layout(dp=2))
    async with served(desk) as address:
        async with worker_roles(address) as port:
            await port.switch_role(call)
            assert await port.switch_report() == REPORT
        async with cluster_roles(address) as roles:
            assert await roles.switch("p1", WorkerRole.DECODE, deadline_seconds=9.0) == REPORT
            assert await roles.advice() == ADVICE
            desk.error = UnavailableError(
                "worker 'p1' is the last prefill worker", retry_after_seconds=2.0
            )
            with pytest.raises(UnavailableError, match="last prefill worker") as caught:
                await roles.switch("p1", WorkerRole.DECODE)
            assert caught.value.retry_after_seconds == 2.0
    assert desk.asked[:2] == [call, ("p1", WorkerRole.DECODE, None, 9.0)]


async def test_nobody_changes_roles_without_the_clusters_token() -> None:
    desk = Desk()
    async with served(desk, ("secret",)) as address:
        async with cluster_roles(address) as roles:
            with pytest.raises(UnauthenticatedError):
                await roles.switch("p1", WorkerRole.DECODE)
        async with worker_roles(address, Credentials(token="wrong")) as port:
            with pytest.raises(UnauthenticatedError):
                await port.switch_role(SwitchCall(7, WorkerRole.DECODE, Layout()))
        assert not desk.asked
        async with cluster_roles(address, Credentials(token="secret")) as roles:
            assert await roles.switch("p1", WorkerRole.DECODE) == REPORT
