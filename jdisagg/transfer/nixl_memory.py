"""The backend over NIXL: transfers KV between hosts.

On CPU, the received arrays are views of the receiver's region. Invariants:
- The sender writes a region before it answers. The sender reuses the region only after the receiver
  has read it or abandoned the pull, or after the pull's deadline, when the receiver discards what
  it reads. Therefore no receiver uses the data of a later pull.
- The receiver reuses a region when no array uses it and the read into it has ended.
- Registered memory is never unmapped (nixl_agent.py explains why). If unused regions exceed
  SPARE_BYTES, their pages are returned to the operating system, but their addresses stay mapped.
  Regions that a device may have pinned keep their pages."""

import collections
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import InRegistered, KvBackend
from jdisagg.transfer.backend import AnnouncedArrays, Backend, Inlet, Outlet, Reserved
from jdisagg.transfer.nixl_agent import (
    NixlAgent,
    NixlRead,
    is_loopback,
    nixl_bindings,
    rdma_devices,
)
from jdisagg.transfer.pieces import HostLeaves, RequestedPieces
from jdisagg.transfer.shared_memory import ALIGNMENT, SPARE_BYTES, LeafInMemory, offsets_of

_log = logging.getLogger(__name__)
_SMALLEST_BYTES = 1 << 16


def nixl_memory(channel: str, host: str) -> "NixlMemory | None":
    """Raises ConfigError if NIXL is configured by name and cannot be used."""
    if channel == "nixl":
        return NixlMemory(NixlAgent(host), first=True)
    if channel != "auto":
        return None
    try:
        # Not used: no other host can read from a loopback address, and over TCP the transfer engine
        # is faster.
        if is_loopback(host) or not rdma_devices():
            return None
        nixl_bindings()
    except ConfigError:
        return None
    try:
        return NixlMemory(NixlAgent(host))
    except ConfigError as error:
        _log.warning("KV is sent to other hosts by the transfer engine: %s", error.message)
        return None


class RegisteredRegion:
    """A range of `size` bytes of host memory at `address`, registered with NIXL. Other processes
    need `metadata` to read the region."""

    __slots__ = ("address", "memory", "metadata", "size")

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.metadata = agent.register(self.address, size)


class NixlMemory(Backend):
    """The host memory of this process that is registered with NIXL, in regions, and the NIXL agent.
    Thread-safe."""

    kind = KvBackend.NIXL

    def __init__(self, agent: NixlAgent, first: bool = False) -> None:
        self.agent, self.first = agent, first
        self._lock = threading.Lock()
        self._spare: dict[int, list[RegisteredRegion]] = {}
        self._spare_bytes = 0
        self._bare: dict[int, list[RegisteredRegion]] = {}
        self._parked: list[tuple[RegisteredRegion, Callable[[], bool]]] = []
        # A deque, because appending to it needs no lock: arrays may be deleted on any thread, at
        # any time.
        self._left: collections.deque[tuple[RegisteredRegion, Callable[[], bool]]]
        self._left = collections.deque()
        self._all: list[RegisteredRegion] = []

    def reaches(self, end: KvEnd) -> bool:
        return end.nixl

    def outlet(self) -> "NixlOutlet":
        return NixlOutlet(self)

    def inlet(self, end: KvEnd) -> "NixlInlet":
        return NixlInlet(self)

    def take(self, size: int) -> RegisteredRegion:
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
        with self._lock:
            self._give_back(region)

    def park(self, region: RegisteredRegion, seconds: float) -> None:
        """Keeps a region from reuse for `seconds`, because a receiver may still read it."""
        end = time.monotonic() + seconds
        self._left.append((region, lambda: time.monotonic() >= end))

    def leave(self, region: RegisteredRegion, read: NixlRead) -> None:
        """Marks a region for reuse after its read has ended. Called when no array uses the region
        any more. Takes no lock, because finalizers of arrays call this method."""
        self._left.append((region, read.is_over))

    def regions(self) -> tuple[int, int]:
        with self._lock:
            self._sweep()
            idle = [*self._spare.values(), *self._bare.values()]
            return len(self._all), len(self._all) - sum(map(len, idle))

    def close(self) -> None:
        """Arrays that were received before stay valid."""
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


class NixlOutlet(Outlet):
    def __init__(self, memory: NixlMemory) -> None:
        self._memory = memory
        self._posted: dict[int, tuple[RegisteredRegion, tuple[int, ...], float]] = {}
        self._unwritten: dict[int, HostLeaves] = {}

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        leaves = pieces.in_host()
        offsets, size = offsets_of(leaves.sizes)
        region = self._memory.take(size)
        self._posted[pull_id] = region, offsets, time.monotonic() + seconds
        self._unwritten[pull_id] = leaves
        lies = tuple(offsets[index] for index in leaves.order)
        memory = InRegistered(region.metadata, region.address, size, lies)
        return Reserved(len(lies), leaves.sources, memory)

    def write(self, pull_id: int) -> None:
        region, offsets, _ = self._posted[pull_id]
        arrays = self._unwritten.pop(pull_id).arrays()
        for array, offset in zip(arrays, offsets, strict=True):
            place = np.frombuffer(region.memory, array.dtype, array.size, offset)
            np.copyto(place.reshape(array.shape), array)

    def pulled(self, pull_id: int) -> None:
        self._unwritten.pop(pull_id, None)
        if posted := self._posted.pop(pull_id, None):
            self._memory.give_back(posted[0])

    def withdraw(self, pull_id: int, leaves: int, reason: str, given_up: bool = False) -> None:
        self._unwritten.pop(pull_id, None)
        if posted := self._posted.pop(pull_id, None):
            region, _, end = posted
            self._memory.park(region, 0.0 if given_up else end - time.monotonic())

    def close(self, in_flight: bool) -> None:
        for pull_id in list(self._posted):
            self.withdraw(pull_id, 0, "")


class NixlInlet(Inlet):
    backend = KvBackend.NIXL
    reads = True

    def __init__(self, memory: NixlMemory) -> None:
        self._memory = memory
        self._peers: set[str] = set()

    def pull(self, arrays: AnnouncedArrays) -> list[LeafInMemory]:
        """`in_time` is called once, when the read has ended."""
        lies, sizes = arrays.memory(InRegistered), arrays.sizes
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
                arrays.in_time,
            )
        except HandoffError:
            self._memory.give_back(region)
            raise
        # The views have this array as their base, so the region is in use as long as any view
        # exists.
        bytes_ = np.frombuffer(region.memory, np.uint8)
        weakref.finalize(bytes_, self._memory.leave, region, read).atexit = False
        return [
            LeafInMemory(bytes_, *leaf, read) for leaf in zip(places, arrays.avals, strict=True)
        ]

    def close(self, in_flight: bool) -> None:
        for peer in self._peers:
            self._memory.agent.lose(peer)
