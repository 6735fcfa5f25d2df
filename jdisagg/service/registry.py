"""The registry that a router serves, and a router as its workers' registration reaches it.

Knows what a `Registrar` is (dispatch/roster.py has it) and nothing of what a router makes of it; how a worker keeps itself known is
dispatch/registration.py's.
"""

from typing import Protocol

import grpc.aio

from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.dispatch.roster import WorkerCard
from jdisagg.service import registry_pb2 as pb
from jdisagg.service import registry_pb2_grpc, wire, wire_registry
from jdisagg.service.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.service.guard import Service

REGISTRY_NAME = pb.DESCRIPTOR.services_by_name["Registry"].full_name

CALL_SECONDS = 2.0


class Registrar(Protocol):
    """What a router does with workers that come and go; dispatch/roster.py's `Roster` is one."""

    def register(self, card: WorkerCard) -> None: ...
    def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """False: not known; register again."""
        ...

    def deregister(self, name: str, boot_id: int) -> None: ...


def registry_service(registrar: Registrar, tokens: tuple[str, ...] = ()) -> Service:
    servicer = RegistryServicer(registrar)
    return Service(REGISTRY_NAME, lambda server: registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server), tokens)


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def Register(self, request: pb.WorkerCard, context: grpc.aio.ServicerContext) -> pb.RegisterReply:
        self._registrar.register(wire_registry.worker_card_from_proto(request))
        return pb.RegisterReply()

    async def Heartbeat(self, request: pb.HeartbeatCall, context: grpc.aio.ServicerContext) -> pb.HeartbeatReply:
        return pb.HeartbeatReply(known=self._registrar.heartbeat(request.boot_id, wire.worker_status_from_proto(request.status)))

    async def Deregister(self, request: pb.DeregisterCall, context: grpc.aio.ServicerContext) -> pb.DeregisterReply:
        self._registrar.deregister(request.name, request.boot_id)
        return pb.DeregisterReply()


class RemoteRouter:
    """A router as its workers see it: a `RouterPort` (dispatch/registration.py) over gRPC."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._connection = Connection(address, credentials)
        self._stub = registry_pb2_grpc.RegistryStub(self._connection.channel)

    async def register(self, card: WorkerCard) -> None:
        await self._connection.call(self._stub.Register, wire_registry.worker_card_to_proto(card), CALL_SECONDS)

    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        call = pb.HeartbeatCall(name=status.name, boot_id=boot_id, status=wire.worker_status_to_proto(status))
        reply: pb.HeartbeatReply = await self._connection.call(self._stub.Heartbeat, call, CALL_SECONDS)
        return reply.known

    async def deregister(self, name: str, boot_id: int) -> None:
        await self._connection.call(self._stub.Deregister, pb.DeregisterCall(name=name, boot_id=boot_id), CALL_SECONDS)

    async def aclose(self) -> None:
        await self._connection.aclose()
