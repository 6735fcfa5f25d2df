"""gRPC services and typed clients for ports.

A port is an interface between jdisagg processes, declared as a Protocol in `messages/`. This module
derives the gRPC service and the client from the Protocol. The arguments are sent as one packed
sequence. The reply is one packed value, or a stream of values if the method returns an
`AsyncIterator`. A parameter with a default may be added at the end (`messages/packed.py`).

The guard (`guard.py`) catches decoding errors, so that malformed bytes fail only the call that sent
them."""

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import msgspec

from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.messages.packed import Unpacker, pack
from jdisagg.messages.ports import close_stream
from jdisagg.messages.ports_middleware import port_methods
from jdisagg.service.guard import Service
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a port, described by the annotations of its Protocol."""

    name: str
    streams: bool
    parameters: tuple[inspect.Parameter, ...]
    arguments_kind: type[msgspec.Struct]
    unpacker: Unpacker[msgspec.Struct]
    unpack_reply: Unpacker[Any]

    def unpack_arguments(self, data: bytes) -> tuple[Any, ...]:
        """Parameters that the caller does not have get their defaults. Arguments for parameters
        that this process does not have are dropped."""
        return msgspec.structs.astuple(self.unpacker(data))

    def arguments(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        if len(args) == len(self.parameters) and not named:
            return args
        missing = self.parameters[len(args) :]
        return (*args, *(named.get(part.name, part.default) for part in missing))

    def deadline(self, arguments: tuple[Any, ...]) -> float | None:
        """Returns the deadline of a call in seconds, or None if the call has no deadline. The
        deadline is the argument `deadline_seconds`, or the field of this name of an argument."""
        for part, value in zip(self.parameters, arguments, strict=True):
            if part.name == "deadline_seconds":
                return value
            if (seconds := getattr(value, "deadline_seconds", None)) is not None:
                return seconds
        return None


@cache
def methods(protocol: type) -> tuple[Method, ...]:
    return tuple(_method(name, getattr(protocol, name)) for name, _ in port_methods(protocol))


def service_name(protocol: type) -> str:
    return f"jdisagg.{protocol.__name__}"


def service(
    protocol: type[P],
    port: P,
    tokens: tuple[str, ...] = (),
    lasting: Iterable[str] = (),
    beside: Mapping[str, grpc.RpcMethodHandler] | None = None,
) -> Service:
    """Returns a gRPC service that serves a port. `beside`: handlers of additional methods, which
    take precedence over methods of the port with the same name."""
    name = service_name(protocol)
    table = {**handlers(protocol, port), **(beside or {})}
    handler = grpc.method_handlers_generic_handler(name, table)
    return Service(
        name,
        lambda server: server.add_generic_rpc_handlers((handler,)),
        tokens,
        frozenset(lasting),
        internal=True,
    )


def handlers(protocol: type[P], port: P) -> dict[str, grpc.RpcMethodHandler]:
    return {method.name: _handler(method, port) for method in methods(protocol)}


def client(
    protocol: type[P],
    connection: Connection,
    *,
    call_seconds: float | None = None,
    seconds: Mapping[str, float | None] | None = None,
    any_boot: Iterable[str] = (),
    service: str = "",
) -> P:
    """Returns a client of a port in another process.

    Args:
        call_seconds: Time limit of calls whose arguments have no deadline. None uses the limit in
            the connection's `timeouts`.
        seconds: Time limits by method name. They also apply to calls with a deadline. None means
            that the method has no limit.
        any_boot: Names of methods that are called without the connection's boot id. A process that
            has restarted accepts these calls.

    Returns:
        An object that raises the errors of the served port, and UnavailableError if the process is
            unreachable, silent, or sends an invalid reply.
    """
    remote = _Remote()
    for method in methods(protocol):
        path = f"/{service or service_name(protocol)}/{method.name}"
        limit = _Limit(
            connection.timeouts.call_seconds if call_seconds is None else call_seconds,
            method.name in (seconds or {}),
            (seconds or {}).get(method.name),
            connection.timeouts.slack_seconds,
        )
        make = _streamer if method.streams else _caller
        setattr(
            remote, method.name, make(method, connection, path, limit, method.name in set(any_boot))
        )
    return cast(P, remote)


@asynccontextmanager
async def connected(
    protocol: type[P],
    address: str,
    credentials: Credentials = NO_CREDENTIALS,
    seconds: Mapping[str, float | None] | None = None,
) -> AsyncIterator[P]:
    """The client stays usable if the process restarts."""
    connection = Connection(address, credentials)
    try:
        yield client(protocol, connection, seconds=seconds)
    finally:
        await connection.aclose()


class _Remote:
    pass


@dataclass(frozen=True, slots=True)
class _Limit:
    """Without `bounded`, the limit is the call's deadline plus `slack`, or `usual` for a call
    without a deadline. With `bounded`, the limit is `bound`, or the call's deadline plus `slack` if
    that is less. `bounded` with `bound` None means no limit."""

    usual: float
    bounded: bool
    bound: float | None
    slack: float

    def seconds(self, deadline: float | None) -> float | None:
        if not self.bounded:
            return self.usual if deadline is None else deadline + self.slack
        if self.bound is None or deadline is None:
            return self.bound
        return min(self.bound, deadline + self.slack)


def _method(name: str, function: Callable[..., object]) -> Method:
    hints = typing.get_type_hints(function)
    reply = hints.pop("return")
    streams = typing.get_origin(reply) is AsyncIterator
    parameters = tuple(inspect.signature(function).parameters.values())[1:]
    kind = _arguments_kind(function.__qualname__.replace(".", "_"), parameters, hints)
    return Method(
        name,
        streams,
        parameters,
        kind,
        Unpacker(kind),
        Unpacker(typing.get_args(reply)[0] if streams else reply),
    )


def _arguments_kind(
    name: str, parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]
) -> type[msgspec.Struct]:
    fields = [
        (part.name, hints[part.name])
        if part.default is inspect.Parameter.empty
        else (part.name, hints[part.name], part.default)
        for part in parameters
    ]
    return msgspec.defstruct(name, fields, array_like=True, frozen=True, gc=False)


def _handler(method: Method, port: object) -> grpc.RpcMethodHandler:
    async def unary(arguments: tuple[Any, ...], _: grpc.aio.ServicerContext) -> object:
        return await getattr(port, method.name)(*arguments)

    async def stream(arguments: tuple[Any, ...], context: grpc.aio.ServicerContext) -> None:
        items = getattr(port, method.name)(*arguments)
        try:
            async for item in items:
                await context.write(item)
        finally:
            await close_stream(items)

    if method.streams:
        return grpc.unary_stream_rpc_method_handler(stream, method.unpack_arguments, pack)
    return grpc.unary_unary_rpc_method_handler(unary, method.unpack_arguments, pack)


def _caller(
    method: Method, connection: Connection, path: str, limit: _Limit, any_boot: bool
) -> Callable[..., Awaitable[Any]]:
    stub = connection.channel.unary_unary(path)

    async def call(*args: object, **named: object) -> object:
        arguments = method.arguments(args, named)
        seconds = limit.seconds(method.deadline(arguments))
        reply = await connection.call(stub, pack(arguments), seconds, any_boot)
        return _unpacked(method, connection, reply)

    return call


def _streamer(
    method: Method, connection: Connection, path: str, limit: _Limit, any_boot: bool
) -> Callable[..., AsyncGenerator[Any, None]]:
    stub = connection.channel.unary_stream(path)

    async def call(*args: object, **named: object) -> AsyncGenerator[Any, None]:
        arguments = method.arguments(args, named)
        seconds = limit.seconds(method.deadline(arguments))
        replies = connection.stream(stub, pack(arguments), seconds, any_boot)
        try:
            async for reply in replies:
                yield _unpacked(method, connection, reply)
        finally:
            await replies.aclose()

    return call


def _unpacked(method: Method, connection: Connection, reply: bytes) -> object:
    try:
        return method.unpack_reply(reply)
    except InvalidRequestError as error:
        raise UnavailableError(
            f"{connection.address}: {method.name} returned an invalid reply: {error}"
        ) from None
