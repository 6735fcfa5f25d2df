"""The services of a worker process: its ports over gRPC, for routers and for other workers.

Each method is a conversion, a call of the port, a conversion back. Errors are left to the guard. Knows what `wire` says and nothing of
what is behind the ports. Whether a call may be made at all (its token, the boot it is meant for) is the guard's. Token ids that the model
does not have are refused here: on a mesh they would end it, with all that runs there, and a router that has not met a worker yet lets
them through.
"""

import grpc.aio

from jdisagg.dispatch.ports import DecodePort, PeerPort, PrefillCall, PrefillPort, ReserveCall, close_stream
from jdisagg.errors import InvalidRequestError
from jdisagg.request import foreign_token
from jdisagg.service import common_pb2, wire, wire_workers, workers_pb2_grpc
from jdisagg.service import workers_pb2 as pb
from jdisagg.service.guard import Service
from jdisagg.service.span_sessions import SpanSessions

PREFILL_NAME = pb.DESCRIPTOR.services_by_name["PrefillWorker"].full_name
DECODE_NAME = pb.DESCRIPTOR.services_by_name["DecodeWorker"].full_name
PEER_NAME = pb.DESCRIPTOR.services_by_name["PeerWorker"].full_name

ANY_ID = 2**31

Context = grpc.aio.ServicerContext


def prefill_service(port: PrefillPort, tokens: tuple[str, ...] = (), vocabulary: int = ANY_ID) -> Service:
    """`vocabulary`: of the model behind the port; its ids are below."""
    servicer = PrefillServicer(port, vocabulary)
    return Service(PREFILL_NAME, lambda server: workers_pb2_grpc.add_PrefillWorkerServicer_to_server(servicer, server), tokens)


def decode_service(port: DecodePort, tokens: tuple[str, ...] = (), vocabulary: int = ANY_ID) -> Service:
    """`vocabulary`: of the model behind the port; its ids are below."""
    servicer = DecodeServicer(port, vocabulary)
    return Service(
        DECODE_NAME, lambda server: workers_pb2_grpc.add_DecodeWorkerServicer_to_server(servicer, server), tokens, frozenset({"Spans"})
    )


def peer_service(port: PeerPort, tokens: tuple[str, ...] = ()) -> Service:
    servicer = PeerServicer(port)
    return Service(PEER_NAME, lambda server: workers_pb2_grpc.add_PeerWorkerServicer_to_server(servicer, server), tokens)


class PrefillServicer(workers_pb2_grpc.PrefillWorkerServicer):
    """A call that its client cancels, or whose connection breaks, is cancelled here, as a direct call would be."""

    def __init__(self, port: PrefillPort, vocabulary: int) -> None:
        self._port, self._vocabulary = port, vocabulary

    async def Prefill(self, request: pb.PrefillCall, context: Context) -> pb.PrefillReply:
        call = wire_workers.prefill_call_from_proto(request)
        _check_ids(call, self._vocabulary)
        return wire_workers.prefill_reply_to_proto(await self._port.prefill(call))

    async def CancelPrefill(self, request: pb.CancelPrefillCall, context: Context) -> pb.CancelPrefillReply:
        await self._port.cancel_prefill(request.handoff_id)
        return pb.CancelPrefillReply()

    async def Status(self, request: pb.StatusCall, context: Context) -> common_pb2.WorkerStatus:
        return wire.worker_status_to_proto(await self._port.status())


class DecodeServicer(workers_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, port: DecodePort, vocabulary: int) -> None:
        self._port, self._vocabulary = port, vocabulary
        self._sessions = SpanSessions(port)

    async def Reserve(self, request: pb.ReserveCall, context: Context) -> pb.Reservation:
        call = wire_workers.reserve_call_from_proto(request)
        _check_ids(call, self._vocabulary)
        return wire_workers.reservation_to_proto(await self._sessions.reserve(request.session_id, call))

    async def Spans(self, request: pb.SpansCall, context: Context) -> None:
        await self._sessions.serve(request.session_id, context.write)

    async def Start(self, request: pb.StartCall, context: Context) -> pb.StartReply:
        self._sessions.start(request.session_id, wire_workers.generate_call_from_proto(request.call))
        return pb.StartReply()

    async def ResumeSource(self, request: pb.ResumeCall, context: Context) -> pb.ResumeReply:
        return wire_workers.resume_reply_to_proto(await self._port.resume_source(wire_workers.resume_call_from_proto(request)))

    async def Cancel(self, request: pb.CancelCall, context: Context) -> pb.CancelReply:
        await self._sessions.cancel(*wire_workers.cancel_from_proto(request))
        return pb.CancelReply()

    async def Status(self, request: pb.StatusCall, context: Context) -> common_pb2.WorkerStatus:
        return wire.worker_status_to_proto(await self._port.status())


class PeerServicer(workers_pb2_grpc.PeerWorkerServicer):
    def __init__(self, port: PeerPort) -> None:
        self._port = port

    async def Hello(self, request: pb.PeerHello, context: Context) -> pb.PeerHello:
        return wire_workers.hello_to_proto(await self._port.hello(wire_workers.hello_from_proto(request)))

    async def Offers(self, request: pb.OffersCall, context: Context) -> None:
        offers = self._port.offers(request.handoff_id, request.attempt)
        try:
            async for offer in offers:
                await context.write(wire_workers.offer_to_proto(offer))
        finally:
            await close_stream(offers)

    async def Acknowledge(self, request: pb.AcknowledgeCall, context: Context) -> pb.AcknowledgeReply:
        await self._port.acknowledge(request.handoff_id, tuple(request.offer_ids))
        return pb.AcknowledgeReply()

    async def Abort(self, request: pb.AbortCall, context: Context) -> pb.AbortReply:
        await self._port.abort(request.handoff_id, request.reason)
        return pb.AbortReply()


def _check_ids(call: PrefillCall | ReserveCall, vocabulary: int) -> None:
    request = call.request
    accepted = ((f"accepted tokens of child {child.index}", child.accepted) for child in call.children)
    biased = tuple(token_id for token_id, _ in request.sampling.logit_bias)
    for name, ids in (("prompt", request.prompt_token_ids), ("logit_bias", biased), *accepted):
        if (at := foreign_token(ids, vocabulary)) is not None:
            raise InvalidRequestError(f"{name} holds {ids[at]}, which is not a token id of the model; they are 0 to {vocabulary - 1}")
