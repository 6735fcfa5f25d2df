"""Conversions that all services share: errors to and from gRPC statuses, and the common parts of
the protobuf messages.

`wire_generation` converts the messages of generation.proto. This module does not use gRPC. An error
becomes a `WireStatus` of plain strings, which the service sends.

Invariants: `x_from_proto(x_to_proto(x)) == x` for every x. Invalid input raises an
InvalidRequestError that names the field, and never another exception."""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import msgspec
from google.protobuf.message import EncodeError, Message

from jdisagg import errors
from jdisagg.costs.measured import StepTimes
from jdisagg.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.layout.axes import Layout
from jdisagg.messages.spans import WireStatus
from jdisagg.messages.worker_status import (
    KeptTier,
    LinkTimes,
    PriorityLoad,
    WorkerRole,
    WorkerStatus,
)
from jdisagg.request import TokenLogprobs
from jdisagg.service.grpc import common_pb2 as pb

ERROR_KEY = "jdisagg-error"
RETRY_AFTER_KEY = "retry-after"
# gRPC percent-encodes the message, at most three bytes for one, and limits headers to 8 KiB.
MAX_DETAILS_BYTES = 2000

Arguments = ParamSpec("Arguments")
AnyMessage = TypeVar("AnyMessage", bound=Message)
Plain = TypeVar("Plain")

_ERROR_TYPES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, JdisaggError)
}
# Error types for statuses without jdisagg metadata, which gRPC itself, a proxy or another server
# has sent.
_BY_CODE: dict[str, type[JdisaggError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "CANCELLED": CancelledError,
    "UNAVAILABLE": UnavailableError,
}


def error_to_status(error: JdisaggError) -> WireStatus:
    metadata = [(ERROR_KEY, type(error).__name__)]
    if error.retry_after_seconds is not None:
        metadata.append((RETRY_AFTER_KEY, repr(float(error.retry_after_seconds))))
    raw = error.message.encode("utf-8", "replace")
    details = (
        raw.decode()
        if len(raw) <= MAX_DETAILS_BYTES
        else raw[:MAX_DETAILS_BYTES].decode("utf-8", "ignore") + " ..."
    )
    return WireStatus(error.status, details, tuple(metadata))


def error_from_status(status: WireStatus) -> JdisaggError:
    """If the status comes from gRPC itself, returns the jdisagg error for its status code."""
    metadata = dict(status.metadata)
    retry_after_seconds: float | None = None
    with contextlib.suppress(KeyError, ValueError):
        retry_after_seconds = float(metadata[RETRY_AFTER_KEY])
    kind = _ERROR_TYPES.get(metadata.get(ERROR_KEY, ""))
    if kind is not None:
        return kind(status.details, retry_after_seconds=retry_after_seconds)
    if status.code == "RESOURCE_EXHAUSTED" and "message larger than max" in status.details:
        return InvalidRequestError(
            f"the message is too large: {status.details}; send less, or increase max_message_bytes"
            " on both sides"
        )
    return _BY_CODE.get(status.code, JdisaggError)(
        f"{status.code}: {status.details}", retry_after_seconds=retry_after_seconds
    )


def build(
    kind: Callable[Arguments, AnyMessage], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> AnyMessage:
    """Raises InvalidRequestError for a wrong type, a number out of range, or invalid UTF-8."""
    try:
        message = kind(*args, **kwargs)
        message.ByteSize()
        return message
    except (TypeError, ValueError, OverflowError, EncodeError) as error:
        raise InvalidRequestError(
            f"a value cannot be sent: {error}; see {getattr(kind, '__name__', 'the message')}'s"
            " fields"
        ) from error


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top)
    )


def all_logprobs_from_proto(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(map(logprobs_from_proto, messages))


def layout_to_proto(layout: Layout) -> pb.Layout:
    return pb.Layout(dp=layout.dp, tp=layout.tp, ep=layout.ep, pp=layout.pp)


def layout_from_proto(message: pb.Layout) -> Layout:
    return Layout(dp=message.dp, tp=message.tp, ep=message.ep, pp=message.pp or 1)


_ROLE_TO_PROTO = {
    WorkerRole.PREFILL: pb.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: pb.WORKER_ROLE_DECODE,
    WorkerRole.MIXED: pb.WORKER_ROLE_MIXED,
}
_ROLE_FROM_PROTO: dict[int, WorkerRole] = {value: role for role, value in _ROLE_TO_PROTO.items()}


def role_to_proto(role: WorkerRole) -> pb.WorkerRole:
    return _ROLE_TO_PROTO[role]


def role_from_proto(message: str, role: int) -> WorkerRole:
    """Raises InvalidRequestError for an unknown role."""
    if role not in _ROLE_FROM_PROTO:
        raise InvalidRequestError(
            f"{message}.role must be a known role, got {role}; run the same version on both sides"
        )
    return _ROLE_FROM_PROTO[role]


def flat_from_proto(kind: type[Plain], message: Message, **known: object) -> Plain:
    """Builds an instance of class `kind` from a message whose fields have the same names.

    The fields must be numbers, texts or lists of these. An optional field that is not set becomes
    None. `known` gives the values of fields that cannot be copied, or that the message lacks."""
    values = dict(known)
    for field in message.DESCRIPTOR.fields:
        if field.name in known:
            continue
        value = getattr(message, field.name)
        if field.containing_oneof is not None and not message.HasField(field.name):
            values[field.name] = None
        else:
            values[field.name] = value if isinstance(value, int | float | str) else tuple(value)
    return kind(**values)


def worker_status_to_proto(status: WorkerStatus) -> pb.WorkerStatus:
    fields = msgspec.structs.asdict(status)
    fields["role"] = role_to_proto(status.role)
    fields["kept"] = [pb.KeptTier(**msgspec.structs.asdict(tier)) for tier in status.kept]
    fields["links"] = [pb.LinkTimes(**msgspec.structs.asdict(link)) for link in status.links]
    fields["priorities"] = [
        pb.PriorityLoad(**msgspec.structs.asdict(load)) for load in status.priorities
    ]
    fields["times"] = status.times and _times_to_proto(status.times)
    return pb.WorkerStatus(**fields)


def worker_status_from_proto(message: pb.WorkerStatus) -> WorkerStatus:
    role = role_from_proto("WorkerStatus", message.role)
    kept = tuple([flat_from_proto(KeptTier, tier) for tier in message.kept])
    links = tuple([flat_from_proto(LinkTimes, link) for link in message.links])
    times = _times_from_proto(message.times) if message.HasField("times") else None
    known = {
        "priorities": tuple([flat_from_proto(PriorityLoad, load) for load in message.priorities]),
        **{"role": role, "kept": kept, "links": links, "times": times},
    }
    return flat_from_proto(WorkerStatus, message, **known)


def _times_to_proto(times: StepTimes) -> pb.StepTimes:
    return pb.StepTimes(
        chunk_sizes=times.chunk_sizes,
        chunks=[
            pb.ProgramTime(size=size, context_tokens=cached, seconds=seconds)
            for size, cached, seconds in times.chunks
        ],
        batch_sizes=times.batch_sizes,
        steps=[
            pb.ProgramTime(size=size, context_tokens=context, seconds=seconds)
            for size, context, seconds in times.steps
        ],
    )


def _times_from_proto(message: pb.StepTimes) -> StepTimes:
    chunks, steps = (
        tuple([(one.size, one.context_tokens, one.seconds) for one in of])
        for of in (message.chunks, message.steps)
    )
    return StepTimes(tuple(message.chunk_sizes), chunks, tuple(message.batch_sizes), steps)
