"""The backend over `jax.experimental.transfer`, used only in ways that were measured to be safe. No
other module of jdisagg calls the engine.

Failure modes of the engine and the countermeasures (see test_engine_dangers.py):
- One stalled puller stalls a whole server: an `EngineOutlet` (server) serves one receiver process,
  an `EngineInlet` connects to one sender process.
- No transport addresses, or fewer than the other side: hang or abort. Both sides use `transports`
  addresses; compare before pulling.
- Garbage on a port can abort the process: servers bind one named interface, never all.
- Time-outs have no timer: `EngineOutlet.tick` enforces them and must be called a few times a
  second.
- An unpulled posting holds its arrays for ever: postings have a time-out, and `withdraw` replaces
  them by error arrays.
- Zero-size leaves never arrive and deleted arrays crash: neither is posted.
- A reused id may match the dead request of its first use: ids are random and used once, except for
  error arrays, which end such requests.
- A broken connection never recovers, and a poisoned one blocks its server until the object is
  deleted: `EngineInlet.close` poisons and then deletes it.
- Deleting a server during a transfer may stop the whole process: such servers are kept, with their
  few threads.
- The default chunks take gigabytes and are slower: `transfer_size` is small.
- A server lives, with all that is posted, while a connection to it is open: `EngineOutlet.close`
  empties it first.
- Bytes of another shape or dtype are reinterpreted silently: callers compare the geometry first."""

import ctypes
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import transfer

from jdisagg.address import host_port
from jdisagg.errors import ConfigError, HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend, Posted
from jdisagg.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from jdisagg.transfer.backend import Backend, Inlet, Outlet, Reserved
from jdisagg.transfer.pieces import RequestedPieces

TICK_ID = 2**64 - 1
ID_BITS = 63  # of a pull's id, which therefore never equals TICK_ID
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of all servers of a process.

    Attributes:
        host: The one interface that servers bind.
        transports: Parallel connections, equal on both sides.
        transfer_size: Bytes of a chunk.
        timeouts: Time-outs of the channel.
    """

    host: str = "127.0.0.1"
    transports: int = 4
    transfer_size: int = 1 << 20
    timeouts: TransferTimeouts = DEFAULT_TIMEOUTS.transfer

    def __post_init__(self) -> None:
        if self.host in _EVERY_INTERFACE:
            raise ConfigError(
                f"the KV plane's host is {self.host!r}, which means every interface; it has no"
                " authentication: name one private address"
            )
        if self.transports < 1 or self.transfer_size < 4096:
            raise ConfigError(
                f"KV plane: transports {self.transports} must be at least 1, transfer_size"
                f" {self.transfer_size} at least 4096"
            )

    def start_server(self) -> transfer.TransferServer:
        address = host_port(self.host, 0)
        return transfer.start_transfer_server(
            jax.local_devices()[0].client,
            address,
            [address] * self.transports,
            transfer_size=self.transfer_size,
        )


class EngineBackend(Backend):
    """The transfer engine as a backend, which reaches every process."""

    kind = KvBackend.ENGINE

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def reaches(self, end: KvEnd) -> bool:
        return True

    def outlet(self) -> "EngineOutlet":
        return EngineOutlet(self._options)

    def inlet(self, end: KvEnd) -> "EngineInlet":
        return EngineInlet(self._options)


class EngineOutlet(Outlet):
    """A transfer server that one receiver process pulls from."""

    answers_early = True

    def __init__(self, options: EngineOptions) -> None:
        self._error_seconds = options.timeouts.error_seconds
        self._server = options.start_server()
        self._withdrew = False
        self._tick = jax.device_put(np.zeros(1, np.uint8), jax.local_devices()[0])
        self.address = self._server.address()

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        """Posts the pieces; the engine itself waits until they are computed."""
        arrays = pieces.on_devices()
        self.post(pull_id, arrays, seconds)
        return Reserved(len(arrays))

    def post(self, pull_id: int, arrays: Sequence[jax.Array], seconds: float) -> None:
        """Posts single-device arrays in the order in which they are pulled. They are kept until
        they are pulled or withdrawn, or until `seconds` have passed."""
        for array in arrays:
            assert array.size and len(array.devices()) == 1, (
                "a posted array must be non-empty and lie on one device"
            )
            if array.is_deleted():
                raise HandoffError("a block was deleted or donated after it had been offered")
        self._server.await_pull(pull_id, list(arrays), timeout=_in(seconds))

    def write(self, pull_id: int) -> None:
        """Does nothing: the leaves were posted."""

    def pulled(self, pull_id: int) -> None:
        """Does nothing: the engine has freed the leaves."""

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        self._withdrew = True
        self.refuse(pull_id, leaves, reason)

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Posts error arrays under the id. A request for more arrays fails with another text."""
        error = transfer.make_error_array(
            jax.ShapeDtypeStruct((1,), np.uint8, sharding=self._tick.sharding), reason
        )
        self._server.await_pull(pull_id, [error] * leaves, timeout=_in(self._error_seconds))

    def tick(self) -> None:
        self._server.await_pull(TICK_ID, [self._tick])

    def close(self, in_flight: bool) -> None:
        """Frees all postings, and fails waiting requests. The object cannot be used afterwards. The
        engine's threads end when the receiver has dropped its connection, too."""
        # There is no public way, and an open connection would keep the postings alive.
        self._server._reset_rendevous_table()  # pyright: ignore[reportAttributeAccessIssue]
        if in_flight or self._withdrew:
            _keep_for_ever(self._server)
        del self._server


class EngineInlet(Inlet):
    """A connection to the transfer server of one sender process."""

    backend = KvBackend.ENGINE
    has_server = True

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._server: transfer.TransferServer | None = None
        self._connection: transfer.TransferConnection | None = None
        self.address = ""

    def open(self, address: str) -> None:
        """Connects to the sender's server. If its address changed, the old connection is dropped,
        and its running pulls fail."""
        if address != self.address:
            self._drop()
            if self._server is None:
                self._server = self._options.start_server()
            self._connection, self.address = self._server.connect(address), address

    def pull(
        self,
        answer: Posted,
        avals: Sequence[jax.ShapeDtypeStruct],
        in_time: Callable[[], bool],
        unused: Callable[[], None],
    ) -> list[jax.Array]:
        """Pulls arrays that may be posted later."""
        self.open(answer.address)
        assert self._connection is not None
        return self._connection.pull(answer.pull_id, list(avals))

    def close(self, in_flight: bool) -> None:
        """Fails all running pulls. The object can be opened again."""
        self._drop()
        if in_flight and self._server is not None:
            _keep_for_ever(self._server)
        self._server = None

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection, self.address = self._connection, None, ""
            # There is no public way to cancel pulls.
            connection._poison_connection()  # pyright: ignore[reportAttributeAccessIssue]
            del connection  # the sender's server is blocked until the poisoned object is deleted


def is_dead_connection(error: str) -> bool:
    """Returns whether an array's error means that its connection is gone, rather than that the
    sender posted an error."""
    return "Connection closed" in error or "SocketServer" in error


def _in(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=min(seconds, 1e7))


def _keep_for_ever(server: transfer.TransferServer) -> None:
    """Leaks a server that may have bytes in transfer. Deleting it can block for ever with the
    interpreter's lock held. A module-level list would delete it at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
