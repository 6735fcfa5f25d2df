"""Changing roles over gRPC: the services, and both ports' other ends.

`worker_roles_service` stands on a worker, `RemoteRolePort` is the router's hold on it;
`cluster_roles_service` stands on a router, `ClusterRoles` is for scripts and autoscalers. Both
services are for the cluster's own people: they ask for the cluster's token."""

from typing import Protocol, Self

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import (
    AdviceReport,
    ClusterRolesPort,
    RolePort,
    SwitchCall,
    SwitchReport,
)
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service import rpc
from jdisagg.service.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.service.guard import Service

REPORT_SECONDS = 2.0


class RoleDeskPort(Protocol):
    """What a router does with the calls; dispatch/role_desk.py's `RoleDesk` and the elastic pools
    are behind it."""

    async def switch(
        self, name: str, role: WorkerRole, layout: Layout | None, seconds: float
    ) -> SwitchReport: ...
    def advice(self) -> AdviceReport: ...


def worker_roles_service(port: RolePort, tokens: tuple[str, ...] = ()) -> Service:
    """Its report can be had while a drain refuses everything else."""
    return rpc.service(RolePort, port, tokens, lasting=("switch_report",))


def cluster_roles_service(desk: RoleDeskPort, tokens: tuple[str, ...] = ()) -> Service:
    return rpc.service(ClusterRolesPort, _ClusterRoles(desk), tokens, ("switch", "advice"))


class _ClusterRoles:
    """Implements `ClusterRolesPort`."""

    def __init__(self, desk: RoleDeskPort) -> None:
        self._desk = desk

    async def switch(
        self, name: str, role: WorkerRole, layout: Layout | None, deadline_seconds: float
    ) -> SwitchReport:
        if not 0 < deadline_seconds < float("inf"):
            raise InvalidRequestError(
                f"switch: deadline_seconds must be positive and finite, got {deadline_seconds}"
            )
        return await self._desk.switch(name, role, layout, deadline_seconds)

    async def advice(self) -> AdviceReport:
        return self._desk.advice()


class RemoteRolePort:
    """`RolePort` of a worker at an address, whichever boot answers there."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._connection = Connection(address, credentials)
        self._port = rpc.client(
            RolePort, self._connection, seconds={"switch_report": REPORT_SECONDS}
        )

    async def switch_role(self, call: SwitchCall) -> None:
        await self._port.switch_role(call)

    async def switch_report(self) -> SwitchReport:
        return await self._port.switch_report()

    async def aclose(self) -> None:
        await self._connection.aclose()


class ClusterRoles:
    """A router's service, from outside.

    async with ClusterRoles("localhost:8700") as roles:
        report = await roles.switch("prefill-1", WorkerRole.DECODE)
    """

    def __init__(self, target: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._connection = Connection(target, credentials)
        self._port = rpc.client(ClusterRolesPort, self._connection)

    async def switch(
        self, worker: str, role: WorkerRole, layout: Layout | None = None, seconds: float = 120.0
    ) -> SwitchReport:
        """Returns when the worker serves in `role`, or is back in its old one (the report says
        FAILED). Raises our typed errors."""
        return await self._port.switch(worker, role, layout, seconds)

    async def advice(self) -> AdviceReport:
        return await self._port.advice()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()
