"""Our data <-> the messages of workers.proto: every argument and reply of the prefill, decode and peer ports.

Knows what `wire` says.
"""

from collections.abc import Iterable

from jdisagg.dispatch.ports import (
    Child,
    FirstToken,
    GenerateCall,
    HandoffEnd,
    HandoffSource,
    Offer,
    OfferChecksum,
    PeerHello,
    PeerMessage,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    SourceLost,
    Span,
    SpanEnd,
)
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Request
from jdisagg.service import workers_pb2 as pb
from jdisagg.service.wire import (
    all_logprobs_from_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    mesh_card_from_proto,
    mesh_card_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)


def request_to_proto(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        stop_ids=request.stop_ids,
        deadline_seconds=request.deadline_seconds,
        tenant=request.tenant,
        priority=request.priority,
        life=request.life,
    )


def request_from_proto(message: pb.Request) -> Request:
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        stop_ids=tuple(message.stop_ids),
        deadline_seconds=message.deadline_seconds if message.HasField("deadline_seconds") else None,
        tenant=message.tenant,
        priority=message.priority,
        life=message.life,
    )


def reserve_call_to_proto(call: ReserveCall) -> pb.ReserveCall:
    return pb.ReserveCall(
        request=request_to_proto(call.request),
        attempt=call.attempt,
        children=map(_child_to_proto, call.children),
        deadline_seconds=call.deadline_seconds,
        age_seconds=call.age_seconds,
    )


def reserve_call_from_proto(message: pb.ReserveCall) -> ReserveCall:
    return ReserveCall(
        request=request_from_proto(message.request),
        attempt=message.attempt,
        children=_children_from_proto(message.children),
        deadline_seconds=message.deadline_seconds,
        age_seconds=message.age_seconds,
    )


def reservation_to_proto(reservation: Reservation) -> pb.Reservation:
    return pb.Reservation(
        reservation_id=reservation.reservation_id,
        worker=reservation.worker,
        rank=reservation.rank,
        lease_seconds=reservation.lease_seconds,
        cached_tokens=reservation.cached_tokens,
    )


def reservation_from_proto(message: pb.Reservation) -> Reservation:
    return Reservation(
        reservation_id=message.reservation_id,
        worker=message.worker,
        rank=message.rank,
        lease_seconds=message.lease_seconds,
        cached_tokens=message.cached_tokens,
    )


def generate_call_to_proto(call: GenerateCall) -> pb.GenerateCall:
    source = call.source
    return pb.GenerateCall(
        reservation_id=call.reservation_id,
        attempt=call.attempt,
        deadline_seconds=call.deadline_seconds,
        source=_source_to_proto(source) if source is not None else None,
    )


def generate_call_from_proto(message: pb.GenerateCall) -> GenerateCall:
    return GenerateCall(
        reservation_id=message.reservation_id,
        attempt=message.attempt,
        deadline_seconds=message.deadline_seconds,
        source=_source_from_proto(message.source) if message.HasField("source") else None,
    )


_END_TO_PROTO = {
    SpanEnd.STOP: pb.SPAN_END_STOP,
    SpanEnd.LENGTH: pb.SPAN_END_LENGTH,
    SpanEnd.PREEMPTED: pb.SPAN_END_PREEMPTED,
    SpanEnd.MOVED: pb.SPAN_END_MOVED,
}
_END_FROM_PROTO: dict[int, SpanEnd] = {value: end for end, value in _END_TO_PROTO.items()}


def span_to_proto(span: Span) -> pb.Span:
    return pb.Span(
        child=span.child,
        first_index=span.first_index,
        token_ids=span.token_ids,
        logprobs=map(logprobs_to_proto, span.logprobs),
        end=_END_TO_PROTO[span.end] if span.end is not None else pb.SPAN_END_UNSPECIFIED,
        kv_bytes_moved=span.kv_bytes_moved,
        exposed_transfer_seconds=span.exposed_transfer_seconds,
        lost=_lost_to_proto(span.lost) if span.lost is not None else None,
        moving=_source_to_proto(span.moving) if span.moving is not None else None,
    )


def span_from_proto(message: pb.Span) -> Span:
    if message.end != pb.SPAN_END_UNSPECIFIED and message.end not in _END_FROM_PROTO:
        raise InvalidRequestError(f"Span.end must be a known end, got {message.end}; are both sides of one version?")
    return Span(
        child=message.child,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=all_logprobs_from_proto(message.logprobs),
        end=_END_FROM_PROTO.get(message.end),
        kv_bytes_moved=message.kv_bytes_moved,
        exposed_transfer_seconds=message.exposed_transfer_seconds,
        lost=_lost_from_proto(message.lost) if message.HasField("lost") else None,
        moving=_source_from_proto(message.moving) if message.HasField("moving") else None,
    )


def resume_call_to_proto(call: ResumeCall) -> pb.ResumeCall:
    return pb.ResumeCall(
        reservation_id=call.reservation_id,
        attempt=call.attempt,
        source=_source_to_proto(call.source),
        firsts=map(_first_to_proto, call.firsts),
    )


def resume_call_from_proto(message: pb.ResumeCall) -> ResumeCall:
    firsts = tuple(map(_first_from_proto, message.firsts))
    return ResumeCall(message.reservation_id, message.attempt, _source_from_proto(message.source), firsts)


def resume_reply_to_proto(from_token: int | None) -> pb.ResumeReply:
    return pb.ResumeReply(from_token=from_token)


def resume_reply_from_proto(message: pb.ResumeReply) -> int | None:
    return message.from_token if message.HasField("from_token") else None


def prefill_call_to_proto(call: PrefillCall) -> pb.PrefillCall:
    return pb.PrefillCall(
        request=request_to_proto(call.request),
        attempt=call.attempt,
        children=map(_child_to_proto, call.children),
        handoff_id=call.handoff_id,
        destination=call.destination,
        from_token=call.from_token,
        deadline_seconds=call.deadline_seconds,
        age_seconds=call.age_seconds,
    )


def prefill_call_from_proto(message: pb.PrefillCall) -> PrefillCall:
    return PrefillCall(
        request=request_from_proto(message.request),
        attempt=message.attempt,
        children=_children_from_proto(message.children),
        handoff_id=message.handoff_id,
        destination=message.destination,
        from_token=message.from_token,
        deadline_seconds=message.deadline_seconds,
        age_seconds=message.age_seconds,
    )


def prefill_reply_to_proto(reply: PrefillReply) -> pb.PrefillReply:
    return pb.PrefillReply(
        tokens=map(_first_to_proto, reply.tokens), queue_seconds=reply.queue_seconds, prefill_seconds=reply.prefill_seconds
    )


def prefill_reply_from_proto(message: pb.PrefillReply) -> PrefillReply:
    return PrefillReply(tuple(map(_first_from_proto, message.tokens)), message.queue_seconds, message.prefill_seconds)


def cancel_to_proto(reservation_id: int, child: int | None) -> pb.CancelCall:
    return pb.CancelCall(reservation_id=reservation_id, child=child)


def cancel_from_proto(message: pb.CancelCall) -> tuple[int, int | None]:
    return message.reservation_id, message.child if message.HasField("child") else None


def hello_to_proto(hello: PeerHello) -> pb.PeerHello:
    return pb.PeerHello(
        protocol=hello.protocol,
        worker=hello.worker,
        model_fingerprint=hello.model_fingerprint,
        kv_layers=hello.kv_layers,
        kv_dtype=hello.kv_dtype,
        layer_groups=hello.layer_groups,
        boot_id=hello.boot_id,
        checksum_key=hello.checksum_key,
        mesh=mesh_card_to_proto(hello.mesh) if hello.mesh is not None else None,
        block_bytes=hello.block_bytes,
    )


def hello_from_proto(message: pb.PeerHello) -> PeerHello:
    return PeerHello(
        protocol=message.protocol,
        worker=message.worker,
        model_fingerprint=message.model_fingerprint,
        kv_layers=message.kv_layers,
        kv_dtype=message.kv_dtype,
        layer_groups=message.layer_groups,
        boot_id=message.boot_id,
        checksum_key=message.checksum_key,
        mesh=mesh_card_from_proto(message.mesh) if message.HasField("mesh") else None,
        block_bytes=message.block_bytes,
    )


def offer_to_proto(offer: PeerMessage) -> pb.OfferOrEnd:
    if isinstance(offer, OfferChecksum):
        return pb.OfferOrEnd(checksum=pb.OfferChecksum(offer_id=offer.offer_id, checksum=offer.checksum))
    if isinstance(offer, HandoffEnd):
        firsts = map(_first_to_proto, offer.firsts)
        return pb.OfferOrEnd(end=pb.HandoffEnd(offers=offer.offers, tokens=offer.tokens, firsts=firsts, moved=offer.moved))
    return pb.OfferOrEnd(
        offer=pb.Offer(
            offer_id=offer.offer_id,
            group=offer.group,
            start=offer.start,
            valid_tokens=offer.valid_tokens,
            block_tokens=offer.block_tokens,
            rank=offer.rank,
            groups=offer.groups,
        )
    )


def offer_from_proto(message: pb.OfferOrEnd) -> PeerMessage:
    kind = message.WhichOneof("kind")
    if kind == "checksum":
        return OfferChecksum(message.checksum.offer_id, message.checksum.checksum)
    if kind == "end":
        end = message.end
        return HandoffEnd(end.offers, end.tokens, tuple(map(_first_from_proto, end.firsts)), tuple(end.moved))
    if kind is None:
        raise InvalidRequestError("OfferOrEnd.kind must be an offer or an end, got neither; are both sides of one version?")
    offer = message.offer
    return Offer(
        offer_id=offer.offer_id,
        group=offer.group,
        start=offer.start,
        valid_tokens=offer.valid_tokens,
        block_tokens=offer.block_tokens,
        rank=offer.rank,
        groups=offer.groups,
    )


def _lost_to_proto(lost: SourceLost) -> pb.SourceLost:
    return pb.SourceLost(handoff_id=lost.handoff_id, kept_tokens=lost.kept_tokens, reason=lost.reason)


def _lost_from_proto(message: pb.SourceLost) -> SourceLost:
    return SourceLost(message.handoff_id, message.kept_tokens, message.reason)


def _source_to_proto(source: HandoffSource) -> pb.HandoffSource:
    return pb.HandoffSource(worker=source.worker, handoff_id=source.handoff_id, address=source.address, boot_id=source.boot_id)


def _source_from_proto(message: pb.HandoffSource) -> HandoffSource:
    return HandoffSource(message.worker, message.handoff_id, message.address, message.boot_id)


def _child_to_proto(child: Child) -> pb.Child:
    return pb.Child(index=child.index, accepted=child.accepted)


def _children_from_proto(messages: Iterable[pb.Child]) -> tuple[Child, ...]:
    return tuple(Child(message.index, tuple(message.accepted)) for message in messages)


def _first_to_proto(first: FirstToken) -> pb.FirstToken:
    logprobs = logprobs_to_proto(first.logprobs) if first.logprobs is not None else None
    return pb.FirstToken(child=first.child, token_id=first.token_id, logprobs=logprobs)


def _first_from_proto(message: pb.FirstToken) -> FirstToken:
    logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    return FirstToken(message.child, message.token_id, logprobs)
