"""How servers of grpc.aio are made and bound, and its machinery, which lasts as long as the process
once begun.

Channels are made by connection.open_channel.

grpc.aio counts its channels and servers and ends its polling thread with the last of them. Where
that last one is found by the garbage collector, the collecting thread joins the polling thread:
seen to hang for ever on a thread that was compiling a program. One hold that is never given back
keeps the count above zero."""

from collections.abc import Sequence

import grpc
import grpc.aio

from jdisagg.address import host_port

Options = Sequence[tuple[str, int | str]]

_held = False


def keep_grpc_alive() -> None:
    """Before the first channel or server is made, on the thread that makes it. Idempotent."""
    global _held
    if not _held:
        _held = True
        # It is public, but missing in the stubs.
        grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue]


def new_server(
    options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """On the event loop that will serve."""
    keep_grpc_alive()
    return grpc.aio.server(interceptors=interceptors, options=options)


def bind(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """The port it will listen on (the one the system chose for 0). Raises RuntimeError where it
    cannot."""
    address = host_port(host, port)
    return (
        server.add_secure_port(address, credentials)
        if credentials
        else server.add_insecure_port(address)
    )
