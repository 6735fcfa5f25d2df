"""The interface between the two halves of a channel and the backends that move bytes.

Four backends implement it: the JAX transfer engine (transfer_engine.py), shared memory
(shared_memory.py), NIXL (nixl_memory.py) and CUDA IPC (device_memory.py). `KvSender` uses one
`Outlet` for each receiver process, `KvPuller` one `Inlet` for each sender process. The halves never
distinguish backends: every difference is an attribute or a method in this module, which must not
import an implementation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax

from jdisagg.errors import HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend, KvMemory, Posted
from jdisagg.transfer.pieces import RequestedPieces

Memory = TypeVar("Memory", bound=KvMemory)


class Leaf:
    """An array that is transferred by another backend than the transfer engine, to be polled."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Returns whether the array has arrived or has failed. Never blocks."""
        raise NotImplementedError

    @property
    def error(self) -> str | None:
        """The reason why the array failed. Valid once ready."""
        raise NotImplementedError

    def array(self) -> jax.Array:
        """Returns the array on its device. Valid once ready; raises HandoffError if it failed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """The result of `Outlet.reserve` for one pull.

    Attributes:
        leaves: Number of arrays that the receiver gets.
        sources: Device arrays that must be computed before `Outlet.write`; empty if nothing is
            written.
        memory: Location of the leaves; None if it is known only after `Outlet.write`, or if the
            transfer engine holds them.
    """

    leaves: int
    sources: Sequence[jax.Array] = ()
    memory: KvMemory | None = None


class Outlet(Protocol):
    """Serves the pieces that one receiver process pulls. One thread uses it.

    Attributes:
        address: Server from which the receiver may pull before anything is reserved; "" if none.
        answers_early: Whether the receiver is answered after `reserve`, because it detects by
            itself when the leaves are written. Otherwise it is answered after `write`.
    """

    address: str = ""
    answers_early: bool = False

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        """Reserves room for the pieces, which may still be computed. Does not block.

        Args:
            pull_id: Random id of the pull, used once.
            pieces: The pieces and their encoding.
            seconds: Time after which the receiver discards what it reads.
        """
        ...

    def write(self, pull_id: int) -> KvMemory | None:
        """Writes the reserved leaves, whose sources are computed, and returns their location."""
        ...

    def pulled(self, pull_id: int) -> None:
        """Frees a pull's leaves, which the receiver has received. Unknown ids are ignored."""
        ...

    def given_up(self, pull_id: int) -> None:
        """Called when the receiver gave up the pull; `withdraw` follows if it is still posted."""

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        """Withdraws a pull's leaves, which the receiver may be reading.

        Args:
            pull_id: Id of the pull.
            leaves: Number of arrays that were reserved.
            reason: Error text for a receiver that still waits for them.
        """
        ...

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Fails a pull that waits at `address` and for which nothing was reserved."""

    def tick(self) -> None:
        """Enforces time-outs. Called a few times a second."""

    def close(self, in_flight: bool) -> None:
        """Withdraws everything.

        Args:
            in_flight: Whether leaves may still be in transfer.
        """
        ...


class Inlet(Protocol):
    """Pulls pieces from one sender process. One thread uses it.

    Attributes:
        backend: Backend that the sender is asked to use.
        has_server: Whether pulls go to a server of the sender, possibly ahead of its answer. Such a
            pull can get stuck and then blocks its connection.
        borrows: Whether arrays are views of the sender's memory. `Pulled` is then sent when the
            last view is dropped, and the sender answers before the leaves are written.
        reads: Whether this process reads the sender's memory directly. If that fails between these
            two processes, the next pull uses another backend.
    """

    backend: KvBackend
    has_server: bool = False
    borrows: bool = False
    reads: bool = False

    def open(self, address: str) -> None:
        """Connects to the sender's server, if there is one."""

    def pull(
        self,
        answer: Posted,
        avals: Sequence[jax.ShapeDtypeStruct],
        in_time: Callable[[], bool],
        unused: Callable[[], None],
    ) -> Sequence[jax.Array | Leaf]:
        """Starts to pull the leaves and returns them to be polled.

        Args:
            answer: Answer of the sender, or the expected answer if it has not arrived.
            avals: Shapes, dtypes and devices of the leaves.
            in_time: Returns whether the pull's deadline has not passed; leaves that arrive later
                count as failed.
            unused: Called once, on any thread, when no array needs the sender's memory any more
                (`borrows`).

        Raises:
            HandoffError: The answer is invalid or its memory cannot be read.
        """
        ...

    def close(self, in_flight: bool) -> None:
        """Closes the connection. Memory that existing arrays use stays valid.

        Args:
            in_flight: Whether pulls are in progress.
        """
        ...


class Backend(Protocol):
    """One backend in this process, shared by its outlets and inlets.

    Attributes:
        kind: Name on the wire.
    """

    kind: KvBackend

    def reaches(self, end: KvEnd) -> bool:
        """Returns whether KV of the process `end` can be pulled by this backend."""
        ...

    def outlet(self) -> Outlet: ...

    def inlet(self, end: KvEnd) -> Inlet: ...

    def sweep(self) -> None:
        """Releases memory whose time-out has passed. Called a few times a second."""

    def drop_spare(self) -> None:
        """Frees unused memory that is kept for reuse."""

    def close(self) -> None:
        """Frees everything. Idempotent."""


def memory_of(answer: Posted, kind: type[Memory]) -> Memory:
    """Returns the answer's memory. Raises HandoffError if it is of another backend."""
    if not isinstance(answer.memory, kind):
        raise HandoffError("the sender answered with memory that was not asked for; pull again")
    return answer.memory
