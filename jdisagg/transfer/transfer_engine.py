"""The backend over the JAX transfer engine (`jax.experimental.transfer`). It uses the engine only
in ways that tests showed to be safe. No other module of jdisagg calls the engine. The sender posts
arrays on a server under an id, and the receiver pulls them by this id.

Failure modes of the engine and the countermeasures (see test_engine_dangers.py):
- One stalled receiver stalls a whole server. Therefore each `EngineOutlet` (server) serves only one
  receiver process.
- A server without transport addresses, or with fewer than the other side, hangs or aborts. Both
  sides use `transports` addresses, and the numbers are compared before a pull.
- Invalid data sent to a port can abort the process. Servers therefore bind one named interface,
  never all.
- The engine has no time-outs. `EngineOutlet.tick` enforces them and must be called a few times a
  second.
- Posted arrays that are not pulled are never freed. After a time-out, or by `withdraw`, posted
  arrays are replaced by error arrays.
- Arrays of size zero never arrive, and deleted arrays crash the process. Neither is posted.
- A reused id may match an abandoned request with the same id. Ids are random and used once. Only
  error arrays are posted under an id that was used before, to end such requests.
- A broken connection never recovers, and blocks its server until the connection object is deleted.
  `EngineInlet.close` fails all its pulls and then deletes the object.
- Deleting a server during a transfer may stop the whole process. Such servers are never deleted,
  and their few threads remain.
- With its default chunk size, the engine uses gigabytes of memory and is slow. `transfer_size` sets
  smaller chunks.
- A pull that was given up may hang, and then blocks its connection. `EngineInlet.is_stuck` finds a
  connection whose abandoned pull has not ended and on which nothing arrives.
- A server and its posted arrays exist as long as a connection to the server is open.
  `EngineOutlet.close` therefore removes the posted arrays first.
- Data of another shape or dtype is reinterpreted without an error. Callers compare shapes and
  dtypes first."""

import ctypes
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import transfer

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend
from jdisagg.settings.address import host_port, numeric
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from jdisagg.transfer.arrivals import received_bytes
from jdisagg.transfer.backend import AnnouncedArrays, Backend, Inlet, Outlet, Reserved
from jdisagg.transfer.channel import Leaf, is_ready
from jdisagg.transfer.pieces import RequestedPieces

TICK_ID = 2**64 - 1
# Fewer bytes within a fraction of the time limit do not count as progress, because gRPC pings and
# heartbeats of other processes on the sender's host are counted, too.
LEAST_BYTES = 16 << 10
ID_BITS = 63  # of a pull's id, which therefore never equals TICK_ID
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of all transfer servers of a process. `host`: address of the only interface that
    servers bind."""

    host: str = "127.0.0.1"
    transports: int = 4
    transfer_size: int = 1 << 20
    timeouts: TransferTimeouts = DEFAULT_TIMEOUTS.transfer

    def __post_init__(self) -> None:
        if self.host in _EVERY_INTERFACE:
            raise ConfigError(
                f"the KV plane's host is {self.host!r}, which means every interface; it has no"
                " authentication: name one private address of this machine, with --kv_host"
            )
        if self.transports < 1 or self.transfer_size < 4096:
            raise ConfigError(
                f"KV plane: transports {self.transports} must be at least 1, transfer_size"
                f" {self.transfer_size} at least 4096"
            )

    def start_server(self) -> transfer.TransferServer:
        # Must be an IP address: with a host name the server would listen on every interface.
        address = host_port(numeric(self.host, "KV plane"), 0)
        return transfer.start_transfer_server(
            jax.local_devices()[0].client,
            address,
            [address] * self.transports,
            transfer_size=self.transfer_size,
        )


class EngineBackend(Backend):
    """Reaches every process."""

    kind = KvBackend.ENGINE

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def reaches(self, end: KvEnd) -> bool:
        return True

    def outlet(self) -> "EngineOutlet":
        return EngineOutlet(self._options)

    def inlet(self, end: KvEnd) -> "EngineInlet":
        return EngineInlet(self._options, end.control)


class EngineOutlet(Outlet):
    answers_early = True

    def __init__(self, options: EngineOptions) -> None:
        self._error_seconds = options.timeouts.error_seconds
        self._server = options.start_server()
        self._withdrew = False
        self._tick = jax.device_put(np.zeros(1, np.uint8), jax.local_devices()[0])
        self.address = self._server.address()

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        """The engine itself waits until the arrays are computed."""
        arrays = pieces.on_devices()
        self.post(pull_id, arrays, seconds)
        return Reserved(len(arrays))

    def post(self, pull_id: int, arrays: Sequence[jax.Array], seconds: float) -> None:
        """Posts single-device arrays under the id, in the order in which the receiver pulls them.
        The arrays are held until they are pulled or withdrawn, or until `seconds` have passed."""
        for array in arrays:
            assert array.size and len(array.devices()) == 1, (
                "a posted array must be non-empty and lie on one device"
            )
            if array.is_deleted():
                raise HandoffError("a block was deleted or donated after it had been offered")
        self._server.await_pull(pull_id, list(arrays), timeout=_in(seconds))

    def write(self, pull_id: int) -> None:
        """Does nothing, because `reserve` has posted the arrays."""

    def pulled(self, pull_id: int) -> None:
        """Does nothing, because the engine frees arrays that were pulled."""

    def withdraw(self, pull_id: int, leaves: int, reason: str, given_up: bool = False) -> None:
        """Posts error arrays under the id. The engine may be sending them until they expire."""
        self._withdrew = True
        error = transfer.make_error_array(
            jax.ShapeDtypeStruct((1,), np.uint8, sharding=self._tick.sharding), reason
        )
        self._server.await_pull(pull_id, [error] * leaves, timeout=_in(self._error_seconds))

    def tick(self) -> None:
        self._server.await_pull(TICK_ID, [self._tick])

    def close(self, in_flight: bool) -> None:
        """Frees all posted arrays and fails waiting pulls. The object cannot be used afterwards.
        The engine's threads end when the receiver has closed its connection, too."""
        # Uses a private method, because there is no public one, and an open connection would keep
        # the posted arrays alive.
        self._server._reset_rendevous_table()  # pyright: ignore[reportAttributeAccessIssue]
        if in_flight or self._withdrew:
            _keep_for_ever(self._server)
        del self._server


class EngineInlet(Inlet):
    """`control`: control address of the sender, whose bytes do not count as KV."""

    backend = KvBackend.ENGINE

    def __init__(self, options: EngineOptions, control: str = "") -> None:
        self._options, self._timeouts, self._control = options, options.timeouts, control
        self._server: transfer.TransferServer | None = None
        self._connection: transfer.TransferConnection | None = None
        self.address = ""
        self._abandoned: list[tuple[Sequence[jax.Array | Leaf], float]] = []
        # times of the last count of bytes, the last that found some, arrival, and error
        self._counted = self._flowed = self._arrived = self._suspected = -math.inf
        self._received = 0

    def _open(self, address: str) -> None:
        """If the server's address has changed, the old connection is closed and its running pulls
        fail."""
        if address != self.address:
            self._drop()
            if self._server is None:
                self._server = self._options.start_server()
            self._connection, self.address = self._server.connect(address), address

    def pull(self, arrays: AnnouncedArrays) -> list[jax.Array]:
        """The sender may post the arrays later than this call."""
        self._open(arrays.answer.address)
        assert self._connection is not None
        return self._connection.pull(arrays.answer.pull_id, list(arrays.avals))

    def close(self, in_flight: bool) -> None:
        """Fails all running pulls."""
        in_flight = in_flight or self.abandoned() > 0
        self._drop()
        if in_flight and self._server is not None:
            _keep_for_ever(self._server)
        self._server = None

    def flows(self, now: float, seconds: float) -> bool:
        if now - self._counted >= seconds / 4:
            first, self._counted = self._counted == -math.inf, now
            received = received_bytes(self.address, self._control)
            if received - self._received >= LEAST_BYTES and not first:
                self._received, self._flowed = received, now
            elif first or received < self._received:  # a connection was closed
                self._received = received
        return now - self._flowed < seconds

    def arrived(self, now: float) -> None:
        self._arrived = now

    def failed(self, address: str, now: float) -> bool:
        """The cause may be a failed program at the sender, or a broken socket, which would fail all
        later pulls. So the second error within some time closes the connection."""
        if address != self.address:
            return False
        again = now - self._suspected < self._timeouts.suspect_seconds
        self._suspected = now
        return again

    def abandon(self, arrays: Sequence[jax.Array | Leaf], until: float) -> None:
        self._abandoned.append((arrays, until))

    def abandoned(self) -> int:
        return sum(not all(map(is_ready, arrays)) for arrays, _ in self._abandoned)

    def is_stuck(self, now: float) -> bool:
        self._abandoned = [one for one in self._abandoned if not all(map(is_ready, one[0]))]
        late = any(now >= until for _, until in self._abandoned)
        moved = max(self._arrived, self._flowed)
        return late and now - moved >= self._timeouts.quiet_seconds

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection, self.address = self._connection, None, ""
            # Uses a private method, because there is no public way to cancel pulls.
            connection._poison_connection()  # pyright: ignore[reportAttributeAccessIssue]
            del connection  # the sender's server is blocked until the poisoned object is deleted


def _in(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=min(seconds, 1e7))


def _keep_for_ever(server: transfer.TransferServer) -> None:
    """Used for servers with data in transfer: deleting such a server can block for ever while
    holding the interpreter's lock. The server is leaked on purpose, because a module-level list
    would delete it at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
