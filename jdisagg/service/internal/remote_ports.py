"""Client of a worker in another process: implements `PrefillPort`, `DecodePort` and `PeerPort` over
one gRPC connection.

Calls raise the errors that the worker raises. They raise UnavailableError if the worker is
unreachable or has restarted. Every call has a time limit: the deadline in its arguments, or a
configured limit if it has none."""

from collections.abc import Awaitable, Callable

from jdisagg.messages.ports import DecodePort, PeerHello, PeerPort, PrefillPort
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.weights import WeightsPort
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import NO_CREDENTIALS, Connection, Credentials
from jdisagg.service.internal.remote_spans import RemoteSpans
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, CallTimeouts


class RemoteWorker:
    """The interfaces (ports) of one remote worker, which share a connection.

    A call of `peer.hello` binds the connection to the running process of the worker. If the worker
    then restarts, other calls raise UnavailableError until the next `hello`. `boot_id`: if set, a
    worker process with another boot id (after a restart) refuses the calls."""

    def __init__(
        self,
        address: str,
        credentials: Credentials = NO_CREDENTIALS,
        boot_id: int | None = None,
        timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
    ) -> None:
        self.connection = Connection(address, credentials, boot_id, timeouts)
        status_seconds = timeouts.status_seconds
        self.prefill = rpc.client(PrefillPort, self.connection, seconds={"status": status_seconds})
        decode = rpc.client(
            DecodePort,
            self.connection,
            seconds={"status": status_seconds, "resume_source": 2 * timeouts.call_seconds},
        )
        self.decode = through(DecodePort, decode, RemoteSpans(self.connection, decode))
        self.weights = rpc.client(WeightsPort, self.connection)
        peer = rpc.client(
            PeerPort,
            self.connection,
            seconds={"offers": timeouts.peer_idle_seconds},
            any_boot=("hello",),
        )
        self.peer = through(PeerPort, peer, _BoundByHello(self.connection))

    def close(self) -> None:
        """Ends all calls with UnavailableError and closes the connection. Idempotent."""
        self.connection.close()

    async def aclose(self) -> None:
        await self.connection.aclose()


class _BoundByHello:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def hello(
        self, proceed: Callable[[PeerHello], Awaitable[PeerHello]], hello: PeerHello
    ) -> PeerHello:
        reply = await proceed(hello)
        self._connection.boot_id = reply.boot_id or None
        return reply
