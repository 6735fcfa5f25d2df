"""The interface between the two halves of a channel and the backends that move bytes.

Three backends implement the interface: the JAX transfer engine (transfer_engine.py), shared memory
(shared_memory.py) and NIXL (nixl_memory.py). `KvSender` uses one `Outlet` for each receiver
process, `KvPuller` one `Inlet` for each sender process. `KvSender` and `KvPuller` never check which
backend they use: every difference between backends is an attribute or a method here. This module
must not import an implementation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax

from jdisagg.errors import HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend, KvMemory, Posted
from jdisagg.transfer.channel import Leaf
from jdisagg.transfer.pieces import RequestedPieces

Memory = TypeVar("Memory", bound=KvMemory)


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """The result of `Outlet.reserve` for one pull.

    Attributes:
        leaves: Number of arrays that the receiver will read.
        sources: Device arrays that must be computed before `Outlet.write` is called. Empty if the
            backend itself waits for the computation.
        memory: Location of the arrays. None if the JAX transfer engine holds them.
    """

    leaves: int
    sources: Sequence[jax.Array] = ()
    memory: KvMemory | None = None


class Outlet(Protocol):
    """The sending side of a backend: serves KV pieces to one receiver process. Not thread-safe.

    Attributes:
        address: Address of the server from which the receiver pulls. "" if the backend has none.
        answers_early: When the sender answers the receiver. True: after `reserve`, because the
            receiver can detect when the arrays are written. False: after `write`.
    """

    address: str = ""
    answers_early: bool = False

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        """Reserves memory for the requested pieces, which may not be computed yet. Does not block.
        `seconds`: seconds until the receiver's deadline, after which it discards all data of this
        pull."""
        ...

    def write(self, pull_id: int) -> None:
        """Writes the reserved arrays. Called after their source arrays are computed."""
        ...

    def pulled(self, pull_id: int) -> None:
        """Frees the arrays of a pull after the receiver has read them. Ignores unknown ids."""
        ...

    def withdraw(self, pull_id: int, leaves: int, reason: str, given_up: bool = False) -> None:
        """Withdraws the arrays of a pull. The receiver may be reading them. `reason`: error text
        for a receiver that still waits for the arrays. `given_up`: whether the receiver discards
        what it reads."""
        ...

    def tick(self) -> None:
        """Ends the pulls whose deadline has passed. The sender calls this method a few times a
        second."""

    def close(self, in_flight: bool) -> None:
        """Withdraws the arrays of all pulls. `in_flight`: whether a receiver may still be reading
        arrays."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AnnouncedArrays:
    """The arrays that a sender has announced for one request.

    Attributes:
        answer: The sender's answer, or a predicted answer if the pull starts before the sender
            answers.
        in_time: Returns whether the pull's deadline has not passed yet. An array that arrives after
            the deadline counts as failed.
        unused: Called once, on any thread, when no received array uses the sender's memory any
            more. Called only if the inlet `borrows`.
    """

    answer: Posted
    avals: Sequence[jax.ShapeDtypeStruct]
    in_time: Callable[[], bool] = lambda: True
    unused: Callable[[], None] = lambda: None

    @property
    def sizes(self) -> list[int]:
        return [math.prod(aval.shape) * aval.dtype.itemsize for aval in self.avals]

    def memory(self, kind: type[Memory]) -> Memory:
        """Returns the location of the arrays. Raises HandoffError if the location is of another
        backend than `kind`, or does not match the number of arrays."""
        memory = self.answer.memory
        if not isinstance(memory, kind):
            raise HandoffError("the sender answered with other memory than requested; pull again")
        if len(memory.offsets) != len(self.avals):
            raise HandoffError(
                f"a sender announced {len(memory.offsets)} leaves of {len(self.avals)}"
            )
        return memory


class Inlet(Protocol):
    """The receiving side of a backend: pulls KV pieces from one sender process. Not thread-safe.

    Attributes:
        backend: Name of the backend that the sender is asked to use.
        borrows: Whether received arrays are views of the sender's memory. The message `Pulled` is
            then sent when the last view is deleted, and the sender answers before it has written
            the arrays.
        reads: Whether this process reads the sender's memory directly. If a direct read fails, the
            next pull from that sender uses another backend.
    """

    backend: KvBackend
    borrows: bool = False
    reads: bool = False

    def pull(self, arrays: AnnouncedArrays) -> Sequence[jax.Array | Leaf]:
        """Starts to pull the arrays of one request. Returns one object to poll for each array.
        Raises HandoffError if the sender's answer is invalid, or its memory cannot be read."""
        ...

    def close(self, in_flight: bool) -> None:
        """Closes the connection. Arrays that were received before stay valid. `in_flight`: whether
        pulls over this connection are in progress."""
        ...

    def flows(self, now: float, seconds: float) -> bool:
        """Returns whether bytes of the sender have arrived within the last `seconds`."""
        return False

    def arrived(self, now: float) -> None:
        """Records that a pull has arrived."""

    def failed(self, address: str, now: float) -> bool:
        """Records that a pull from this address failed without a message of the sender. Returns
        whether the connection must be closed."""
        return False

    def abandon(self, arrays: Sequence[jax.Array | Leaf], until: float) -> None:
        """Records arrays of a pull that was given up. They should end by `until`."""

    def abandoned(self) -> int:
        """Returns the number of pulls that were given up and whose arrays have not ended."""
        return 0

    def is_stuck(self, now: float) -> bool:
        """Returns whether the connection must be closed, because abandoned arrays hang in it."""
        return False


class Backend(Protocol):
    """One backend of this process. All its outlets and inlets share it."""

    kind: KvBackend

    def reaches(self, end: KvEnd) -> bool:
        """Returns whether this process can pull KV from the process `end` by this backend."""
        ...

    def outlet(self) -> Outlet: ...

    def inlet(self, end: KvEnd) -> Inlet: ...

    def drop_spare(self) -> None:
        """Frees unused memory that the backend keeps for later pulls."""

    def close(self) -> None:
        """Frees all memory of the backend. Idempotent."""
