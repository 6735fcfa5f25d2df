"""A pull as a future to poll. A pull is in progress until it ends: it has arrived, failed, been
cancelled or passed its deadline.

This module must not depend on a channel. A dispatch thread may deliver, cancel or revoke while the
completion thread polls. Every change is made under the lock, which is never held while blocking. An
ended pull keeps no array alive."""

import threading
from collections.abc import Callable, Sequence

import jax

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.transfer.backend import Leaf

Assemble = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
Explain = Callable[[str], JdisaggError | None]


class PolledPull:
    """Implements `Pull`. A pull has no arrays at first, then arrays in transfer, and then it
    ends."""

    def __init__(self, offer_id: int, clock: Clock, deadline_seconds: float) -> None:
        self._offer_id = offer_id
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._deadline = clock.now() + deadline_seconds
        self._lock = threading.Lock()
        self._coming: Sequence[jax.Array | Leaf] | None = None
        self._arrays: tuple[jax.Array, ...] | None = None
        self._assemble: Assemble | None = None
        self._explain: Explain = lambda error: None
        self._error: JdisaggError | None = None
        self._arrived = False
        self._bytes_moved = 0

    @property
    def bytes_moved(self) -> int:
        return self._bytes_moved

    def is_ready(self) -> bool:
        with self._lock:
            if self._error or self._arrived:
                return True
            if self._have_come():
                self._arrived = not self._error
            elif self._clock.now() >= self._deadline:
                state = (
                    "was not made (or its id is unknown)"
                    if self._coming is None
                    else "has not arrived"
                )
                self._end(
                    HandoffError(
                        f"offer {self._offer_id:#x} {state} within the deadline of"
                        f" {self._deadline_seconds} s; pull again"
                    )
                )
            return bool(self._error or self._arrived)

    def failed(self) -> JdisaggError | None:
        self.is_ready()
        return self._error

    def arrays(self) -> tuple[jax.Array, ...]:
        ready = self.is_ready()
        with self._lock:
            if self._error:
                raise self._error
            assert ready and self._arrays is not None, (
                "arrays() of a pull that is under way; poll is_ready() first"
            )
            return self._arrays

    def cancel(self) -> None:
        with self._lock:
            if not self._error:
                self._end(HandoffError(f"the pull of offer {self._offer_id:#x} was cancelled"))

    @property
    def deadline(self) -> float:
        """Time of the deadline on the channel's clock."""
        return self._deadline

    def extend(self, seconds: float) -> None:
        with self._lock:
            self._deadline = max(self._deadline, self._clock.now() + seconds)

    def deliver(
        self,
        arrays: Sequence[jax.Array | Leaf],
        bytes_moved: int,
        assemble: Assemble | None = None,
        explain: Explain = lambda error: None,
    ) -> None:
        """Sets the arrays of the pull, which may still be in transfer. Only the first call has an
        effect. If the pull has ended, the arrays are dropped.

        Args:
            assemble: Converts the arrived arrays to the result of `arrays()`. Runs under the lock,
                after all arrays have arrived.
            explain: Converts the error text of a failed array to the sender's error. Returns None
                if the text is not from the sender.
        """
        with self._lock:
            if self._coming is not None:
                return
            self._bytes_moved = bytes_moved
            if not self._error:
                self._coming, self._assemble, self._explain = arrays, assemble, explain

    def fail(self, error: JdisaggError) -> None:
        """Has no effect on an ended pull."""
        with self._lock:
            if not self._error and not self._arrived:
                self._end(error)

    def _have_come(self) -> bool:
        try:
            if self._coming is None or not all(map(is_ready, self._coming)):
                return False
            arrays = tuple(
                leaf.array() if isinstance(leaf, Leaf) else leaf for leaf in self._coming
            )
            self._coming = arrays
            if not all(map(is_ready, arrays)):
                return False  # being copied to the devices
            # All arrays are ready, so this call does not block. It raises an error if the
            # computation or the copy has failed.
            jax.block_until_ready(arrays)
            self._arrays = self._assemble(arrays) if self._assemble is not None else arrays
            self._coming, self._assemble = (), None
        except Exception as error:
            broken = HandoffError(
                f"offer {self._offer_id:#x}: its block could not be computed or moved: {error}"
            )
            self._end(self._explain(str(error)) or broken)
        return True

    def _end(self, error: JdisaggError) -> None:
        self._error, self._arrays, self._assemble, self._arrived = error, None, None, False
        self._coming = None
        self._explain = lambda error: None


def is_ready(array: jax.Array | Leaf) -> bool:
    # The method is public but missing in the type stub.
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
