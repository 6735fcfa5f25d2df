"""Memory that is registered with NIXL: how KV moves between hosts by reads of the receiver's.

The sender writes the pieces of a pull into a region and says where they lie; the receiver reads
them into a region of its own, of which, on CPU, its arrays are made without another copy. It is the
host's memory on both sides, also where the KV lies on other devices. Invariants:
- a region is written before its receiver hears of it, and again only when nobody can take what is
  read there then for its own: its receiver has read it or given up, or the deadline of its pull has
  passed, after which a receiver counts nothing that it reads;
- a region into which something is read is used again when no array needs it and its read is over;
- nothing that was registered is ever unmapped (nixl_agent.py says why): what waits for its next use
  beyond SPARE_BYTES gives its pages back, not its addresses, where no device holds on to them."""

import collections
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.messages.kv_plane import InRegistered
from jdisagg.transfer.nixl_agent import (
    NixlAgent,
    NixlRead,
    is_loopback,
    nixl_bindings,
    rdma_devices,
)
from jdisagg.transfer.shared_memory import ALIGNMENT, SPARE_BYTES, LeafInMemory, offsets_of

_log = logging.getLogger(__name__)
_SMALLEST_BYTES = 1 << 16


def nixl_memory(channel: str, host: str) -> "NixlMemory | None":
    """What a worker on `host` has for `ServiceConfig.kv_channel`; None: its KV is not read over
    NIXL. Raises ConfigError where NIXL is asked for by name and cannot be used."""
    if channel == "nixl":
        return NixlMemory(NixlAgent(host), first=True)
    if channel not in ("auto", "cuda"):
        return None
    try:
        # From a loopback address nobody reads; and over TCP the transfer engine is faster.
        if is_loopback(host) or not rdma_devices():
            return None
        nixl_bindings()
    except ConfigError:
        return None
    try:
        return NixlMemory(NixlAgent(host))
    except ConfigError as error:
        _log.warning("KV goes to other hosts through the transfer engine: %s", error.message)
        return None


class RegisteredRegion:
    """`size` bytes at `address`; `metadata`: by which others read them."""

    __slots__ = ("address", "memory", "metadata", "size")

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.metadata = agent.register(self.address, size)


class NixlMemory:
    """The registered regions of one process, and its agent. From any thread. `first`: whether KV is
    read over NIXL also where it could be mapped."""

    def __init__(self, agent: NixlAgent, first: bool = False) -> None:
        self.agent, self.first = agent, first
        self._lock = threading.Lock()
        self._spare: dict[int, list[RegisteredRegion]] = {}
        self._spare_bytes = 0
        self._bare: dict[int, list[RegisteredRegion]] = {}
        self._parked: list[tuple[RegisteredRegion, Callable[[], bool]]] = []
        # A deque takes without a lock: arrays end on any thread, at any time.
        self._left: collections.deque[tuple[RegisteredRegion, Callable[[], bool]]]
        self._left = collections.deque()
        self._all: list[RegisteredRegion] = []

    def take(self, size: int) -> RegisteredRegion:
        """A region of at least `size` bytes; one that was used before where there is one."""
        size = max(_SMALLEST_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            self._sweep()
            if spare := self._spare.get(size):
                self._spare_bytes -= size
                return spare.pop()
            if bare := self._bare.get(size):
                return bare.pop()
        try:
            region = RegisteredRegion(self.agent, size)
        except (OSError, ValueError) as error:
            raise HandoffError(
                f"no memory of {size} bytes for a block: {error}; raise the limit of memory"
            ) from error
        with self._lock:
            self._all.append(region)
        return region

    def give_back(self, region: RegisteredRegion) -> None:
        """One that is used by nobody."""
        with self._lock:
            self._give_back(region)

    def park(self, region: RegisteredRegion, seconds: float) -> None:
        """One of which somebody may still read, for so long."""
        end = time.monotonic() + seconds
        self._left.append((region, lambda: time.monotonic() >= end))

    def leave(self, region: RegisteredRegion, read: NixlRead) -> None:
        """One of which no array is needed any more, though it may still be read into. Takes no
        lock, for it is called when arrays end."""
        self._left.append((region, read.is_over))

    def regions(self) -> tuple[int, int]:
        """How many there are, and how many of them are in use."""
        with self._lock:
            self._sweep()
            idle = [*self._spare.values(), *self._bare.values()]
            return len(self._all), len(self._all) - sum(map(len, idle))

    def close(self) -> None:
        """Nothing is read from here or into here any more; arrays keep what they need."""
        self.agent.close()

    def _sweep(self) -> None:
        while self._left:
            self._parked.append(self._left.popleft())
        parked, self._parked = self._parked, []
        for region, is_over in parked:
            if is_over():
                self._give_back(region)
            else:
                self._parked.append((region, is_over))

    def _give_back(self, region: RegisteredRegion) -> None:
        if self._spare_bytes + region.size > SPARE_BYTES and not self.agent.pins_memory:
            region.memory.madvise(mmap.MADV_DONTNEED)
            self._bare.setdefault(region.size, []).append(region)
            return
        self._spare.setdefault(region.size, []).append(region)
        self._spare_bytes += region.size


class NixlOutlet:
    """What of this process's registered memory one receiver process reads. One thread uses it."""

    address = ""  # nothing is pulled from here before it is posted

    def __init__(self, memory: NixlMemory) -> None:
        self._memory = memory
        self._posted: dict[int, tuple[RegisteredRegion, tuple[int, ...], float]] = {}
        self._written: set[int] = set()

    def reserve(
        self, pull_id: int, sizes: Sequence[int], places: Sequence[int], seconds: float
    ) -> InRegistered:
        """Where arrays of so many bytes will lie: leaf i is the `places[i]`-th of them. After
        `seconds` its receiver counts nothing that it reads there."""
        offsets, size = offsets_of(sizes)
        region = self._memory.take(size)
        self._posted[pull_id] = region, offsets, time.monotonic() + seconds
        leaves = tuple(offsets[place] for place in places)
        return InRegistered(region.metadata, region.address, size, leaves)

    def write(self, pull_id: int, arrays: Sequence[np.ndarray]) -> None:
        """What was reserved for."""
        region, offsets, _ = self._posted[pull_id]
        for array, offset in zip(arrays, offsets, strict=True):
            place = np.frombuffer(region.memory, array.dtype, array.size, offset)
            np.copyto(place.reshape(array.shape), array)
        self._written.add(pull_id)

    def has_written(self, pull_id: int) -> bool:
        """Whether its receiver may hear of it."""
        return pull_id in self._written

    def pulled(self, pull_id: int) -> None:
        """Its receiver has read it, or counts nothing of it."""
        if posted := self._posted.pop(pull_id, None):
            self._written.discard(pull_id)
            self._memory.give_back(posted[0])

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        """Its receiver may be reading it."""
        del leaves, reason
        if posted := self._posted.pop(pull_id, None):
            self._written.discard(pull_id)
            region, _, end = posted
            self._memory.park(region, end - time.monotonic())

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Nothing waits here before it is posted."""

    def tick(self) -> None:
        """Nothing is kept by time."""

    def close(self, in_flight: bool) -> None:
        del in_flight
        for pull_id in list(self._posted):
            self.withdraw(pull_id, 0, "")


class NixlSender:
    """The registered memory of another process. One thread uses it."""

    def __init__(self, memory: NixlMemory) -> None:
        self._memory = memory
        self._peers: set[str] = set()

    def leaves(
        self, lies: InRegistered, avals: Sequence[jax.ShapeDtypeStruct], in_time: Callable[[], bool]
    ) -> list[LeafInMemory]:
        """The arrays of a region, which are being read when this returns.

        Args:
          lies: where they lie.
          avals: shapes and places of the arrays.
          in_time: asked once, when they are there; what comes late counts as failed.

        Raises:
          HandoffError: where what is said of the region cannot be, or nothing can be read there.
        """
        sizes = [int(np.prod(aval.shape)) * aval.dtype.itemsize for aval in avals]
        if len(sizes) != len(lies.offsets):
            raise HandoffError(f"a sender announced {len(lies.offsets)} leaves of {len(avals)}")
        places = [(offset, offset + size) for offset, size in zip(lies.offsets, sizes, strict=True)]
        most = offsets_of(sizes)[1]
        if not all(ALIGNMENT <= first <= end <= lies.size <= most for first, end in places):
            raise HandoffError(f"a sender announced bytes {places} of a region of {lies.size}")
        agent = self._memory.agent
        peer = agent.know(lies.metadata)
        self._peers.add(peer)
        region = self._memory.take(lies.size)
        try:
            read = agent.read(
                peer,
                lies.address + ALIGNMENT,
                region.address + ALIGNMENT,
                lies.size - ALIGNMENT,
                in_time,
            )
        except HandoffError:
            self._memory.give_back(region)
            raise
        # Views have it as their base: the region is in use as long as any of them is.
        bytes_ = np.frombuffer(region.memory, np.uint8)
        weakref.finalize(bytes_, self._memory.leave, region, read).atexit = False
        return [LeafInMemory(bytes_, *leaf, read) for leaf in zip(places, avals, strict=True)]

    def close(self) -> None:
        """Arrays that live keep what they need."""
        for peer in self._peers:
            self._memory.agent.lose(peer)
