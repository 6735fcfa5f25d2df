"""Services and typed clients of ports over gRPC, derived from the ports' Protocols (`messages/`).

A method of a port becomes a method of a gRPC service with the port's name. Its arguments travel as
one packed tuple and its reply as one packed value, or as a stream of values if it returns an
`AsyncIterator`. A method added to Protocol and implementation is thus available on both sides.

The guard (`guard.py`) catches decoding errors, so malformed bytes affect only their sender."""

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

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
    unpack_arguments: Unpacker[tuple[Any, ...]]
    unpack_reply: Unpacker[Any]

    def arguments(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns all arguments of a call in order, including defaults."""
        if len(args) == len(self.parameters) and not named:
            return args
        missing = self.parameters[len(args) :]
        return (*args, *(named.get(part.name, part.default) for part in missing))

    def deadline(self, arguments: tuple[Any, ...]) -> float | None:
        """Returns a call's deadline in seconds, from its argument `deadline_seconds` or from that
        field of a message. None without a deadline."""
        for part, value in zip(self.parameters, arguments, strict=True):
            if part.name == "deadline_seconds":
                return value
            if (seconds := getattr(value, "deadline_seconds", None)) is not None:
                return seconds
        return None


@cache
def methods(protocol: type) -> tuple[Method, ...]:
    """Returns the methods of a port's Protocol."""
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
    """Returns a service that serves a port.

    Args:
        protocol: The port's Protocol.
        port: Implementation that handles the calls.
        tokens: Bearer tokens of which a call must have one. Without tokens all are accepted.
        lasting: Methods that a drain neither refuses nor waits for.
        beside: Handlers of further methods. They take precedence over the port's own methods.
    """
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
    """Returns the gRPC handlers of a port's methods, by method name."""
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
        protocol: The port's Protocol, which the result implements.
        connection: Connection to the serving process.
        call_seconds: Time limit of calls whose arguments have no deadline. None uses the
            connection's `timeouts`.
        seconds: Time limits of single methods, which also bound calls with a deadline. None means
            no limit.
        any_boot: Methods that any boot of the process may answer.
        service: Name of the service, if it differs from the port's name.

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
    """Connects to a port in the process at `address`, whichever boot of the process answers. The
    connection ends with the context. Other arguments are as in `client`."""
    connection = Connection(address, credentials)
    try:
        yield client(protocol, connection, seconds=seconds)
    finally:
        await connection.aclose()


class _Remote:
    """Base of the clients. `client` sets a method for each method of the port."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Time limit of a method's calls: `bound` if `bounded`. Otherwise the call's own deadline plus
    `slack`, or `usual` for a call without a deadline."""

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
    kinds = tuple(hints[part.name] for part in parameters)
    return Method(
        name,
        streams,
        parameters,
        Unpacker(tuple[kinds] if kinds else tuple[()]),
        Unpacker(typing.get_args(reply)[0] if streams else reply),
    )


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
