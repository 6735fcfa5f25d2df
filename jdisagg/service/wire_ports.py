"""Ports that send every call through the wire format and back: bytes there, bytes back, errors as gRPC statuses.

For tests: around any port they prove that a call means the same across a process boundary. Know no gRPC. Errors that are not
ours pass as they are: between processes they would be INTERNAL, here the test should see them.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from jdisagg.dispatch.ports import (
    DecodePort,
    GenerateCall,
    PeerHello,
    PeerMessage,
    PeerPort,
    PrefillCall,
    PrefillPort,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    WorkerStatus,
    close_stream,
)
from jdisagg.errors import JdisaggError
from jdisagg.service import wire, wire_workers
from jdisagg.service import workers_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)
Item = TypeVar("Item")


class WirePrefillLoopback:
    """A `PrefillPort` around another."""

    def __init__(self, inner: PrefillPort) -> None:
        self._inner = inner

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        sent = wire_workers.prefill_call_from_proto(_across(wire_workers.prefill_call_to_proto(call)))
        with _errors_across():
            reply = await self._inner.prefill(sent)
        return wire_workers.prefill_reply_from_proto(_across(wire_workers.prefill_reply_to_proto(reply)))

    async def cancel_prefill(self, handoff_id: int) -> None:
        with _errors_across():
            await self._inner.cancel_prefill(_across(pb.CancelPrefillCall(handoff_id=handoff_id)).handoff_id)

    async def status(self) -> WorkerStatus:
        with _errors_across():
            status = await self._inner.status()
        return wire.worker_status_from_proto(_across(wire.worker_status_to_proto(status)))


class WireDecodeLoopback:
    """A `DecodePort` around another."""

    def __init__(self, inner: DecodePort) -> None:
        self._inner = inner

    async def reserve(self, call: ReserveCall) -> Reservation:
        sent = wire_workers.reserve_call_from_proto(_across(wire_workers.reserve_call_to_proto(call)))
        with _errors_across():
            reservation = await self._inner.reserve(sent)
        return wire_workers.reservation_from_proto(_across(wire_workers.reservation_to_proto(reservation)))

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Span, None]:
        sent = wire_workers.generate_call_from_proto(_across(wire_workers.generate_call_to_proto(call)))
        async with aclosing(_stream_across(self._inner.generate(sent))) as spans:
            async for span in spans:
                yield wire_workers.span_from_proto(_across(wire_workers.span_to_proto(span)))

    async def resume_source(self, call: ResumeCall) -> int | None:
        sent = wire_workers.resume_call_from_proto(_across(wire_workers.resume_call_to_proto(call)))
        with _errors_across():
            from_token = await self._inner.resume_source(sent)
        return wire_workers.resume_reply_from_proto(_across(wire_workers.resume_reply_to_proto(from_token)))

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        sent = wire_workers.cancel_from_proto(_across(wire_workers.cancel_to_proto(reservation_id, child)))
        with _errors_across():
            await self._inner.cancel(*sent)

    async def status(self) -> WorkerStatus:
        with _errors_across():
            status = await self._inner.status()
        return wire.worker_status_from_proto(_across(wire.worker_status_to_proto(status)))


class WirePeerLoopback:
    """A `PeerPort` around another."""

    def __init__(self, inner: PeerPort) -> None:
        self._inner = inner

    async def hello(self, hello: PeerHello) -> PeerHello:
        sent = wire_workers.hello_from_proto(_across(wire_workers.hello_to_proto(hello)))
        with _errors_across():
            reply = await self._inner.hello(sent)
        return wire_workers.hello_from_proto(_across(wire_workers.hello_to_proto(reply)))

    async def offers(self, handoff_id: int, attempt: int) -> AsyncGenerator[PeerMessage, None]:
        sent = _across(pb.OffersCall(handoff_id=handoff_id, attempt=attempt))
        async with aclosing(_stream_across(self._inner.offers(sent.handoff_id, sent.attempt))) as offers:
            async for offer in offers:
                yield wire_workers.offer_from_proto(_across(wire_workers.offer_to_proto(offer)))

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        sent = _across(pb.AcknowledgeCall(handoff_id=handoff_id, offer_ids=offer_ids))
        with _errors_across():
            await self._inner.acknowledge(sent.handoff_id, tuple(sent.offer_ids))

    async def abort(self, handoff_id: int, reason: str) -> None:
        sent = _across(pb.AbortCall(handoff_id=handoff_id, reason=reason))
        with _errors_across():
            await self._inner.abort(sent.handoff_id, sent.reason)


def _across(message: AnyMessage) -> AnyMessage:
    return wire.parse(type(message), message.SerializeToString())


@contextmanager
def _errors_across() -> Iterator[None]:
    try:
        yield
    except JdisaggError as error:
        raise wire.error_from_status(wire.error_to_status(error)) from error


async def _stream_across(items: AsyncIterator[Item]) -> AsyncGenerator[Item, None]:
    """Closing this closes `items`: so does a cancelled gRPC call on the other side."""
    try:
        with _errors_across():
            async for item in items:
                yield item
    finally:
        await close_stream(items)
