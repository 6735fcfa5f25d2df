"""The ports of a worker in another process: `PrefillPort`, `DecodePort` and `PeerPort` over one gRPC connection.

What they raise is what the worker's own ports raise, and UnavailableError where the worker is away, gone silent or another boot. Every
call has a deadline: the caller's own where the port's call has one. Knows what `wire` says.
"""

from collections.abc import AsyncGenerator

from jdisagg.dispatch.ports import (
    GenerateCall,
    PeerHello,
    PeerMessage,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    WorkerStatus,
)
from jdisagg.service import common_pb2, wire, wire_workers, workers_pb2_grpc
from jdisagg.service import workers_pb2 as pb
from jdisagg.service.connection import NO_CREDENTIALS, SLACK_SECONDS, Connection, Credentials
from jdisagg.service.remote_spans import RemoteSpans

CALL_SECONDS = 5.0
STATUS_SECONDS = 3.0
# No hand-off lasts longer; its receiver's own deadline closes the stream before.
OFFERS_SECONDS = 3600.0


class RemoteWorker:
    """A worker's ports, which share its connection. `boot_id`: calls are meant for that boot of the worker alone."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS, boot_id: int | None = None) -> None:
        self.connection = Connection(address, credentials, boot_id)
        self.prefill = RemotePrefillPort(self.connection)
        self.decode = RemoteDecodePort(self.connection)
        self.peer = RemotePeerPort(self.connection)

    def close(self) -> None:
        """Ends all calls with UnavailableError. Idempotent."""
        self.connection.close()

    async def aclose(self) -> None:
        await self.connection.aclose()


class RemotePrefillPort:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = workers_pb2_grpc.PrefillWorkerStub(connection.channel)

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        request = wire_workers.prefill_call_to_proto(call)
        reply: pb.PrefillReply = await self._connection.call(self._stub.Prefill, request, call.deadline_seconds + SLACK_SECONDS)
        return wire_workers.prefill_reply_from_proto(reply)

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self._connection.call(self._stub.CancelPrefill, pb.CancelPrefillCall(handoff_id=handoff_id), CALL_SECONDS)

    async def status(self) -> WorkerStatus:
        reply: common_pb2.WorkerStatus = await self._connection.call(self._stub.Status, pb.StatusCall(), STATUS_SECONDS)
        return wire.worker_status_from_proto(reply)


class RemoteDecodePort:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = workers_pb2_grpc.DecodeWorkerStub(connection.channel)
        self._spans = RemoteSpans(connection)

    async def reserve(self, call: ReserveCall) -> Reservation:
        request = wire_workers.reserve_call_to_proto(call)
        request.session_id = await self._spans.session_id(call.deadline_seconds)
        reply: pb.Reservation = await self._connection.call(self._stub.Reserve, request, call.deadline_seconds + SLACK_SECONDS)
        return wire_workers.reservation_from_proto(reply)

    def generate(self, call: GenerateCall) -> AsyncGenerator[Span, None]:
        return self._spans.generate(call)

    async def resume_source(self, call: ResumeCall) -> int | None:
        request = wire_workers.resume_call_to_proto(call)
        reply: pb.ResumeReply = await self._connection.call(self._stub.ResumeSource, request, 2 * CALL_SECONDS)
        return wire_workers.resume_reply_from_proto(reply)

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        await self._connection.call(self._stub.Cancel, wire_workers.cancel_to_proto(reservation_id, child), CALL_SECONDS)

    async def status(self) -> WorkerStatus:
        reply: common_pb2.WorkerStatus = await self._connection.call(self._stub.Status, pb.StatusCall(), STATUS_SECONDS)
        return wire.worker_status_from_proto(reply)


class RemotePeerPort:
    """After a `hello` the port is bound to the boot that answered it: when the worker was restarted, calls raise UnavailableError until
    the next `hello`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = workers_pb2_grpc.PeerWorkerStub(connection.channel)

    async def hello(self, hello: PeerHello) -> PeerHello:
        reply: pb.PeerHello = await self._connection.call(self._stub.Hello, wire_workers.hello_to_proto(hello), CALL_SECONDS, any_boot=True)
        self._connection.boot_id = reply.boot_id or None
        return wire_workers.hello_from_proto(reply)

    async def offers(self, handoff_id: int, attempt: int) -> AsyncGenerator[PeerMessage, None]:
        request = pb.OffersCall(handoff_id=handoff_id, attempt=attempt)
        stream = self._connection.stream(self._stub.Offers, request, pb.OfferOrEnd, OFFERS_SECONDS)
        try:
            async for message in stream:
                yield wire_workers.offer_from_proto(message)
        finally:
            await stream.aclose()

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        request = pb.AcknowledgeCall(handoff_id=handoff_id, offer_ids=offer_ids)
        await self._connection.call(self._stub.Acknowledge, request, CALL_SECONDS)

    async def abort(self, handoff_id: int, reason: str) -> None:
        await self._connection.call(self._stub.Abort, pb.AbortCall(handoff_id=handoff_id, reason=reason), CALL_SECONDS)
