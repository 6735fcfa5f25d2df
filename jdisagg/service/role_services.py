"""Changing roles over gRPC: the services of roles.proto, and both ports' other ends.

`worker_roles_service` stands on a worker, `RemoteRolePort` is the router's hold on it; `cluster_roles_service` stands on a router,
`ClusterRoles` is for scripts and autoscalers. Both services are for the cluster's own people: they ask for the cluster's token.
"""

from typing import Protocol, Self

import grpc.aio

from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.roles import AdviceReport, RolePort, SwitchCall, SwitchReport
from jdisagg.layout.axes import Layout
from jdisagg.service import roles_pb2 as pb
from jdisagg.service import roles_pb2_grpc, wire_roles
from jdisagg.service.connection import NO_CREDENTIALS, SLACK_SECONDS, Connection, Credentials
from jdisagg.service.guard import Service

WORKER_ROLES_NAME = pb.DESCRIPTOR.services_by_name["WorkerRoles"].full_name
CLUSTER_ROLES_NAME = pb.DESCRIPTOR.services_by_name["ClusterRoles"].full_name
CALL_SECONDS = 5.0
REPORT_SECONDS = 2.0

Context = grpc.aio.ServicerContext


class RoleDeskPort(Protocol):
    """What a router does with the calls; dispatch/role_desk.py's `RoleDesk` and the elastic pools are behind it."""

    async def switch(self, name: str, role: WorkerRole, layout: Layout | None, seconds: float) -> SwitchReport: ...
    def advice(self) -> AdviceReport: ...


def worker_roles_service(port: RolePort, tokens: tuple[str, ...] = ()) -> Service:
    """Its report can be had while a drain refuses everything else."""
    servicer = WorkerRolesServicer(port)
    lasting = frozenset({"GetSwitchReport"})
    return Service(WORKER_ROLES_NAME, lambda server: roles_pb2_grpc.add_WorkerRolesServicer_to_server(servicer, server), tokens, lasting)


def cluster_roles_service(desk: RoleDeskPort, tokens: tuple[str, ...] = ()) -> Service:
    servicer = ClusterRolesServicer(desk)
    lasting = frozenset({"SwitchWorker", "GetAdvice"})
    return Service(CLUSTER_ROLES_NAME, lambda server: roles_pb2_grpc.add_ClusterRolesServicer_to_server(servicer, server), tokens, lasting)


class WorkerRolesServicer(roles_pb2_grpc.WorkerRolesServicer):
    def __init__(self, port: RolePort) -> None:
        self._port = port

    async def SwitchRole(self, request: pb.SwitchRoleCall, context: Context) -> pb.SwitchRoleReply:
        await self._port.switch_role(wire_roles.switch_call_from_proto(request))
        return pb.SwitchRoleReply()

    async def GetSwitchReport(self, request: pb.SwitchReportCall, context: Context) -> pb.SwitchReport:
        return wire_roles.switch_report_to_proto(await self._port.switch_report())


class ClusterRolesServicer(roles_pb2_grpc.ClusterRolesServicer):
    def __init__(self, desk: RoleDeskPort) -> None:
        self._desk = desk

    async def SwitchWorker(self, request: pb.SwitchWorkerCall, context: Context) -> pb.SwitchReport:
        worker, role, layout, seconds = wire_roles.switch_worker_from_proto(request)
        return wire_roles.switch_report_to_proto(await self._desk.switch(worker, role, layout, seconds))

    async def GetAdvice(self, request: pb.AdviceCall, context: Context) -> pb.Advice:
        return wire_roles.advice_to_proto(self._desk.advice())


class RemoteRolePort:
    """`RolePort` of a worker at an address, whichever boot answers there."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._connection = Connection(address, credentials)
        self._stub = roles_pb2_grpc.WorkerRolesStub(self._connection.channel)

    async def switch_role(self, call: SwitchCall) -> None:
        await self._connection.call(self._stub.SwitchRole, wire_roles.switch_call_to_proto(call), CALL_SECONDS)

    async def switch_report(self) -> SwitchReport:
        reply: pb.SwitchReport = await self._connection.call(self._stub.GetSwitchReport, pb.SwitchReportCall(), REPORT_SECONDS)
        return wire_roles.switch_report_from_proto(reply)

    async def aclose(self) -> None:
        await self._connection.aclose()


class ClusterRoles:
    """A router's service, from outside.

    async with ClusterRoles("localhost:8700") as roles:
        report = await roles.switch("prefill-1", WorkerRole.DECODE)
    """

    def __init__(self, target: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._connection = Connection(target, credentials)
        self._stub = roles_pb2_grpc.ClusterRolesStub(self._connection.channel)

    async def switch(self, worker: str, role: WorkerRole, layout: Layout | None = None, seconds: float = 120.0) -> SwitchReport:
        """Returns when the worker serves in `role`, or is back in its old one (the report says FAILED). Raises our typed errors."""
        call = wire_roles.switch_worker_to_proto(worker, role, layout, seconds)
        reply: pb.SwitchReport = await self._connection.call(self._stub.SwitchWorker, call, seconds + SLACK_SECONDS)
        return wire_roles.switch_report_from_proto(reply)

    async def advice(self) -> AdviceReport:
        reply: pb.Advice = await self._connection.call(self._stub.GetAdvice, pb.AdviceCall(), CALL_SECONDS)
        return wire_roles.advice_from_proto(reply)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()
