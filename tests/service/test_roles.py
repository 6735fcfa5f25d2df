"""Changing roles over real gRPC: what arrives equals what was sent, errors keep their type, and the
cluster's token is asked for."""

import pytest

from jdisagg.errors import UnauthenticatedError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchCall
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.connection import Credentials
from jdisagg.service.internal.role_services import cluster_roles, worker_roles
from tests.service.role_desk import ADVICE, REPORT, Desk, served


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
