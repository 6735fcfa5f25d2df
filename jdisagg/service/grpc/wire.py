"""Conversions that all services share: errors to and from gRPC statuses, and the common parts of
the protobuf messages.

`wire_generation` converts the messages of generation.proto. This module does not use gRPC. An error
becomes a `WireStatus` of plain strings, which the service sends.

Invariants: `x_from_proto(x_to_proto(x)) == x` for every x. Invalid input raises an
InvalidRequestError that names the field, and never another exception."""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.message import EncodeError, Message

from jdisagg import errors
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
from jdisagg.prompt.experts import ChosenExperts
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
    message = pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )
    if logprobs.experts is not None:
        message.experts.MergeFrom(pb.ChosenExperts(**msgspec.structs.asdict(logprobs.experts)))
    return message


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    found = message.experts if message.HasField("experts") else None
    return TokenLogprobs(
        message.logprob,
        tuple((entry.token_id, entry.logprob) for entry in message.top),
        found and ChosenExperts(found.layers, found.chosen, found.data, found.dtype),
    )


def all_logprobs_from_proto(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(map(logprobs_from_proto, messages))


def layout_to_proto(layout: Layout) -> pb.Layout:
    return pb.Layout(dp=layout.dp, tp=layout.tp, ep=layout.ep, pp=layout.pp)


def layout_from_proto(message: pb.Layout) -> Layout:
    return Layout(dp=message.dp, tp=message.tp, ep=message.ep, pp=message.pp or 1)


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


def plain_from(value: Any) -> Any:
    """Returns the JSON form of messages between processes: objects with the names of fields."""
    if isinstance(value, msgspec.Struct):
        return plain_from(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {name: plain_from(one) for name, one in value.items()}
    return [plain_from(one) for one in value] if isinstance(value, tuple) else value


def plain_to(kind: Any, value: Any) -> Any:
    """The inverse of `plain_from`. Ignores unknown names. Raises InvalidRequestError if a name is
    missing."""
    given = [one for one in get_args(kind) if one is not NoneType]
    if get_origin(kind) is tuple:
        kinds = given[:1] * len(value) if given[-1] is Ellipsis else given
        return tuple(plain_to(*pair) for pair in zip(kinds, value, strict=True))
    if given:  # X | None
        return None if value is None else plain_to(given[0], value)
    if not issubclass(kind, msgspec.Struct):
        return msgspec.convert(value, kind)
    hints = get_type_hints(kind)
    known = {name: plain_to(hints[name], one) for name, one in value.items() if name in hints}
    try:
        return kind(**known)
    except TypeError as error:
        raise InvalidRequestError(f"{error}; run the same version on both sides") from None
