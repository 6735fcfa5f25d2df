"""The guard of a gRPC server: an interceptor that every call of a jdisagg service passes through.

The guard refuses calls without a valid token, and calls that were meant for this process before a
restart. It decodes requests itself, so that malformed bytes become INVALID_ARGUMENT instead of
gRPC's UNKNOWN. It converts jdisagg errors to gRPC statuses, and any other exception to INTERNAL and
a log entry. It tracks running calls and can cancel them. During a drain it refuses new calls. The
health and reflection services bypass the guard.

Service methods are coroutines that take one request. Streaming methods write their replies to the
gRPC context."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from jdisagg.dispatch.caller import Caller, calling
from jdisagg.errors import (
    IncompatiblePeerError,
    InvalidRequestError,
    JdisaggError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.messages.packed import check_protocol
from jdisagg.messages.spans import WireStatus
from jdisagg.messages.trace_context import incoming, within
from jdisagg.service.bearer import Tokens, identify
from jdisagg.service.calls import DrainingGuard, cut_short, internal_error, shutting_down
from jdisagg.service.grpc import wire
from jdisagg.service.internal.connection import BOOT_KEY, PROTOCOL_KEY, TOKEN_KEY

Reply = TypeVar("Reply")
Behaviour = Callable[[object, grpc.aio.ServicerContext], Awaitable[Reply]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service of jdisagg, to be registered with a server.

    Attributes:
        name: Full name of the service.
        add: Function that adds the servicer to a server.
        tokens: Bearer tokens that are accepted, or a function that returns the current ones.
            Without tokens, all calls are accepted.
        lasting: Names of methods that a drain neither refuses nor waits for.
        internal: Whether only jdisagg processes call the service. If so, the guard refuses callers
            with an incompatible protocol version.
    """

    name: str
    add: Callable[[grpc.aio.Server], None]
    tokens: Tokens = field(default=(), repr=False)
    lasting: frozenset[str] = frozenset()
    internal: bool = False


class Guard(DrainingGuard, grpc.aio.ServerInterceptor):
    """The interceptor of one gRPC server.

    Args:
        services: Services to guard.
        boot_id: Random number of this process, drawn at its start. Calls that contain another boot
            id are refused. With None, no call is refused for its boot id.
        refused: Callback for each call that fails before it reaches its service. Its arguments are
            the method and the error.
    """

    def __init__(
        self,
        services: Sequence[Service],
        boot_id: int | None = None,
        refused: Callable[[str, JdisaggError], None] = lambda method, error: None,
    ) -> None:
        super().__init__()
        self._refused = refused
        self._tokens = {service.name: service.tokens for service in services}
        self._lasting = {
            f"/{service.name}/{method}" for service in services for method in service.lasting
        }
        self._internal = {service.name for service in services if service.internal}
        self._boot = f"{boot_id:x}" if boot_id is not None else None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        service = method[1:].rpartition("/")[0]
        if handler is None or service not in self._tokens:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        caller = identify(self._tokens[service], metadata.get(TOKEN_KEY, ""))
        refusal, trace = self._refusal(service, caller, metadata), incoming(metadata)
        assert not handler.request_streaming, f"{method}: the guard reads one request of each call"
        # Generated code sets both functions, but gRPC's types allow None.
        behaviour = cast(
            Behaviour[object],
            handler.unary_stream if handler.response_streaming else handler.unary_unary,
        )
        decode = cast(Callable[[bytes], object], handler.request_deserializer)

        async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> object:
            if refusal is not None:
                self._refused(method, refusal)
                return await _abort(context, wire.error_to_status(refusal))
            with within(trace), calling(caller or Caller()):
                return await self._run(method, decode, behaviour, data, context)

        wrap = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(guarded, None, handler.response_serializer)

    def _refusal(
        self, service: str, caller: Caller | None, metadata: dict[str, str | bytes]
    ) -> JdisaggError | None:
        if caller is None:
            return UnauthenticatedError(
                f"{service} requires a bearer token; send a valid one as `authorization: Bearer"
                " ...`"
            )
        if service in self._internal:
            try:
                check_protocol(metadata.get(PROTOCOL_KEY), service)
            except IncompatiblePeerError as refusal:
                return refusal
        boot = metadata.get(BOOT_KEY)
        if boot is not None and self._boot is not None and boot != self._boot:
            return UnavailableError(
                f"the call is for boot {boot!s} of this process, but it was restarted as boot"
                f" {self._boot}"
            )
        return None

    async def _run(
        self,
        method: str,
        decode: Callable[[bytes], object],
        behaviour: Behaviour[object],
        data: bytes,
        context: grpc.aio.ServicerContext,
    ) -> object:
        task = asyncio.current_task()
        assert task is not None
        served = False
        try:
            if self._cutting or (self._refusing and method not in self._lasting):
                raise shutting_down()
            (self._unhurried if method in self._lasting else self._running).add(task)
            request = _decoded(method, decode, data)
            served = True
            return await behaviour(request, context)
        except asyncio.CancelledError:
            if not self._cutting or context.cancelled():
                raise
            task.uncancel()
            status = wire.error_to_status(cut_short())
        except JdisaggError as error:
            # Keep the status instead of the error: the error's traceback would keep this frame,
            # and with it the request, alive until a garbage collection.
            status = wire.error_to_status(error)
            if not served:
                self._refused(method, error)
        except Exception as error:
            if context.cancelled():
                # The client disconnected while a message was being written.
                raise asyncio.CancelledError from error
            log.exception("%s failed", method)
            status = wire.error_to_status(internal_error(error))
        finally:
            self._running.discard(task)
            self._unhurried.discard(task)
        return await _abort(context, status)


def _decoded(method: str, decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return decode(data)
    except DecodeError:
        raise InvalidRequestError(
            f"the message of {method} ({len(data)} bytes) is malformed or has text that is not"
            " valid UTF-8; send valid protobuf"
        ) from None


async def _abort(context: grpc.aio.ServicerContext, status: WireStatus) -> object:
    metadata = (*(context.trailing_metadata() or ()), *status.metadata)
    try:
        return await context.abort(grpc.StatusCode[status.code], status.details, metadata)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        # No status can be sent: the call is over, or the client no longer reads, so that the
        # previous message is still being written.
        raise asyncio.CancelledError from error
