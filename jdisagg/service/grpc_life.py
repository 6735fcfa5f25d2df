"""Creates and binds grpc.aio servers, and keeps grpc.aio alive for the life of the process.

Channels are made by `connection.open_channel`.

grpc.aio counts its channels and servers. When the last of them is destroyed, it ends its polling
thread. If the garbage collector destroys the last one, the thread that runs the collector waits for
the polling thread to end. This wait has hung forever on a thread that was compiling a program.
`keep_grpc_alive` takes a reference that is never released, so that the count never becomes zero."""

from collections.abc import Sequence

import grpc
import grpc.aio

from jdisagg.settings.address import cannot_listen, host_port

Options = Sequence[tuple[str, int | str]]

_held = False


def keep_grpc_alive() -> None:
    """Keeps grpc.aio's polling thread running. Call it before the first channel or server is
    created, on the thread that creates it. Idempotent."""
    global _held
    if not _held:
        _held = True
        # This function is public, but gRPC's type stubs lack it.
        grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue]


def new_server(
    options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """Creates a grpc.aio server. Must be called on the event loop that will run the server."""
    keep_grpc_alive()
    return grpc.aio.server(interceptors=interceptors, options=options)


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
    remedy: str,
) -> int:
    """Binds the server to an address and returns its port. Raises ConfigError if the address cannot
    be bound."""
    address = host_port(host, port)
    try:
        if credentials:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise cannot_listen(host, port, error, remedy) from error
