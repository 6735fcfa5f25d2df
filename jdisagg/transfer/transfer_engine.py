"""`jax.experimental.transfer`, called only in the ways that were measured to be safe. Nothing else
in jdisagg calls the engine.

What goes wrong otherwise (each is a test in tests/transfer/test_engine_dangers.py), and what is
done about it here:
- one stalled puller stalls a whole server: an `Outlet` (server) serves one connection of one
  receiver process, an `Inlet` one sender;
- no transport addresses, or fewer than the other side: hang or abort. Both sides give `transports`
  of them; compare before pulling;
- garbage on a port can abort the process: servers bind one named interface, never all;
- time-outs have no timer: `Outlet.tick()` must be called a few times a second, it makes them real;
- an unpulled posting holds its arrays for ever: postings carry a time-out, and `withdraw` puts
  error arrays in their place;
- zero-size leaves never arrive, deleted arrays crash: neither is posted;
- an id used twice meets the dead request of its first use: ids are random and used once (error
  arrays excepted, they flush it);
- a broken connection never heals, and a poisoned one wedges its server until the object is gone:
  `Inlet.close` poisons, then drops;
- deleting a server while bytes are on their way may stop the whole process: such servers are kept,
  with their few threads;
- big default chunks take gigabytes and are slower: `transfer_size` is small;
- a server lives on while a connection to it is open, with all that is posted: `Outlet.close`
  empties it first;
- bytes are reinterpreted without a word: callers compare geometry before. Whether a pull arrived is
  for `is_ready()`; nothing waits here."""

import ctypes
import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import transfer

from jdisagg.address import host_port
from jdisagg.errors import ConfigError, HandoffError
from jdisagg.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts

TICK_ID = 2**64 - 1
ID_BITS = 63  # of a pull's id: never the tick's
_EVERY_INTERFACE = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """host: the one interface that servers bind. transports: parallel connections, equal on both
    sides. transfer_size: bytes of a chunk."""

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


class Outlet:
    """A server from which one receiver process pulls. Not thread-safe: one thread posts."""

    def __init__(self, options: EngineOptions) -> None:
        self._error_seconds = options.timeouts.error_seconds
        self._server = options.start_server()
        self._withdrew = False
        self._tick = jax.device_put(np.zeros(1, np.uint8), jax.local_devices()[0])
        self.address = self._server.address()

    def post(self, pull_id: int, arrays: Sequence[jax.Array], seconds: float) -> None:
        """Single-device arrays, in the puller's order, perhaps still being computed; kept until
        pulled, withdrawn or `seconds` passed."""
        for array in arrays:
            assert array.size and len(array.devices()) == 1, (
                "a posted array must be non-empty and lie on one device"
            )
            if array.is_deleted():
                raise HandoffError("a block was deleted or donated after it had been offered")
        self._server.await_pull(pull_id, list(arrays), timeout=_in(seconds))

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        """Frees what was posted; a request for so many arrays that comes for it, or waits for it,
        fails with the reason."""
        self._withdrew = True
        self.refuse(pull_id, leaves, reason)

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Of an id under which nothing was posted. (A request for more arrays fails too, with
        another text.)"""
        error = transfer.make_error_array(
            jax.ShapeDtypeStruct((1,), np.uint8, sharding=self._tick.sharding), reason
        )
        self._server.await_pull(pull_id, [error] * leaves, timeout=_in(self._error_seconds))

    def tick(self) -> None:
        """Lets the engine look at its time-outs."""
        self._server.await_pull(TICK_ID, [self._tick])

    def close(self, in_flight: bool) -> None:
        """Frees what is posted; requests that wait fail. `in_flight`: whether bytes may be on their
        way. The object is of no use afterwards. (The engine's threads end when the receiver, too,
        has dropped its connection.)"""
        # It is private; an open connection holds the postings.
        self._server._reset_rendevous_table()  # pyright: ignore[reportAttributeAccessIssue]
        if in_flight or self._withdrew:
            _keep_for_ever(self._server)
        del self._server


class Inlet:
    """A connection to one sender process. Not thread-safe: one thread pulls."""

    def __init__(self, options: EngineOptions) -> None:
        self._server = options.start_server()
        self._connection: transfer.TransferConnection | None = None
        self.address = ""

    def open(self, address: str) -> None:
        """Connects to the sender's outlet; when it has a new one, the old connection is dropped,
        and what is being pulled on it fails."""
        if address != self.address:
            self._drop()
            self._connection, self.address = self._server.connect(address), address

    def pull(
        self, address: str, pull_id: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Arrays to poll, from the sender's outlet at `address`; they may be posted there later."""
        self.open(address)
        assert self._connection is not None
        return self._connection.pull(pull_id, list(avals))

    def close(self, in_flight: bool) -> None:
        """All pulls under way fail at once. `in_flight`: whether there are any. The object is of no
        use afterwards."""
        self._drop()
        if in_flight:
            _keep_for_ever(self._server)
        del self._server

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection, self.address = self._connection, None, ""
            # It is private, and there is no other way.
            connection._poison_connection()  # pyright: ignore[reportAttributeAccessIssue]
            del connection  # only this un-wedges the sender's server


def is_dead_connection(error: str) -> bool:
    """Whether an array's error says that its connection is gone (and not that the sender sent an
    error)."""
    return "Connection closed" in error or "SocketServer" in error


def _in(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=min(seconds, 1e7))


def _keep_for_ever(server: transfer.TransferServer) -> None:
    """For one that is given up while bytes are on their way: to delete it can block for ever with
    the interpreter's lock held, at the interpreter's end too, where a list would be emptied."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
