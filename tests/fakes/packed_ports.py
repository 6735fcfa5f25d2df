"""Ports that send every call through its bytes and back, as between two processes but without gRPC:
arguments, replies and errors.

    port = packed(DecodePort, worker)

Errors that are not ours are raised unchanged: between processes they would be INTERNAL, but here
the test should see them."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from jdisagg.errors import JdisaggError
from jdisagg.messages.packed import pack
from jdisagg.messages.ports import close_stream
from jdisagg.service.grpc import wire
from jdisagg.service.internal import rpc

P = TypeVar("P")


class _Packed:
    """A port whose methods are bound when it is made."""


def packed(protocol: type[P], port: P) -> P:
    """`port`, behind the bytes of its Protocol's messages."""
    remote = _Packed()
    for method in rpc.methods(protocol):
        make = _stream if method.streams else _unary
        setattr(remote, method.name, make(method, port))
    return cast(P, remote)


def _unary(method: rpc.Method, port: object) -> Callable[..., Awaitable[object]]:
    async def call(*args: object, **named: object) -> object:
        arguments = _across(method, args, named)
        with _errors_across():
            reply = await getattr(port, method.name)(*arguments)
        return method.unpack_reply(pack(reply))

    return call


def _stream(method: rpc.Method, port: object) -> Callable[..., AsyncGenerator[Any, None]]:
    async def call(*args: object, **named: object) -> AsyncGenerator[Any, None]:
        items = getattr(port, method.name)(*_across(method, args, named))
        try:
            with _errors_across():
                async for item in items:
                    yield method.unpack_reply(pack(item))
        finally:
            await close_stream(items)

    return call


def _across(method: rpc.Method, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    return method.unpack_arguments(pack(method.arguments(args, named)))


@contextmanager
def _errors_across() -> Iterator[None]:
    try:
        yield
    except JdisaggError as error:
        raise wire.error_from_status(wire.error_to_status(error)) from error
