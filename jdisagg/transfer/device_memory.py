"""The backend over CUDA IPC: KV from device to device between processes of one host.

For each piece, the sender answers with a CUDA IPC handle of the allocation that contains the piece,
and the offset of the piece in that allocation. The receiver opens each allocation once and copies
the pieces into its own arrays. The sender copies nothing. Invariants:
- The sender answers when the array is computed. It keeps the array until the receiver has copied it
  or abandoned the pull, or until the pull's deadline. After the deadline the receiver discards its
  copy. So an array never changes during a copy that the receiver uses.
- The copy writes into a JAX array of the receiver that no other code uses yet. The array is kept
  alive until the copy has ended, also if the pull was cancelled.
- The receiver keeps an allocation open while its sender is connected or a copy from it is running.
- The sender adds checksums to its answers until a pull of the receiver from each allocation has
  succeeded. If other bytes arrive, the pull fails, and the receiver uses another backend for this
  sender.
- Only memory of JAX's preallocated pool is exported. The sender never frees this pool, because
  freeing memory that another process reads causes a device fault. A process with the handle can
  read the whole pool. Therefore handles are sent over the control connection only. A handle is
  valid only on its own host."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend, LentAllocation, OnDevice
from jdisagg.model_api import Device
from jdisagg.ops.checksum import byte_sum
from jdisagg.transfer.backend import AnnouncedArrays, Backend, Inlet, Leaf, Outlet, Reserved
from jdisagg.transfer.cuda_driver import Allocation, Copy, CudaDriver, Driver
from jdisagg.transfer.pieces import RequestedPieces, blank
from jdisagg.transfer.polled_pull import is_ready

_log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOO_LATE = "what was copied from another process's device came after the pull's deadline"


def lent_memory(channel: str, devices: Sequence[Device]) -> "tuple[LentMemory | None, str]":
    """Returns a worker's exported device memory, or None with the reason.

    Args:
        channel: `ServiceConfig.kv_channel`.
        devices: Devices of the worker.

    Returns:
        The memory, or None. Also a text: the reason why CUDA IPC is unavailable although it is
            configured. The text is "" if there is memory, if `channel` names another backend, and
            for channel "auto" if the devices are not GPUs.
    """
    if channel not in ("auto", "cuda"):
        return None, ""
    if not devices or devices[0].platform != "gpu":
        return None, "its devices are no GPUs" if channel == "cuda" else ""
    try:
        memory = LentMemory(CudaDriver())
        own = jax.process_index()
        memory.check([device for device in devices if device.process_index == own])
    except (ConfigError, HandoffError) as error:
        _log.warning("KV is transferred through host memory, not by CUDA IPC: %s", error.message)
        return None, error.message
    return memory, ""


def this_host() -> str:
    """Returns the kernel's boot id, unique to this host and boot; "" if unavailable."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Mapping:
    """Another process's allocation, mapped for `device`. It is unmapped when its last user releases
    it."""

    device: int
    lent: LentAllocation
    base: int
    holders: int = 0


class LentMemory(Backend):
    """Exports this process's device memory over CUDA IPC, and opens the exports of other processes.
    Thread-safe."""

    kind = KvBackend.CUDA

    def __init__(self, driver: Driver, host: str | None = None) -> None:
        self.host = this_host() if host is None else host
        self.driver = driver
        if not self.host:
            raise ConfigError(f"this host has no name of its own: {_BOOT} cannot be read")
        self._lock = threading.Lock()
        self._lent: dict[tuple[int, int], tuple[Allocation, bytes]] = {}
        self._parked: dict[int, tuple[float, Sequence[jax.Array]]] = {}
        self._mappings: dict[tuple[int, LentAllocation], Mapping] = {}
        self._reads: set[DeviceRead] = set()

    def reaches(self, end: KvEnd) -> bool:
        return end.device == self.host

    def outlet(self) -> "DeviceOutlet":
        return DeviceOutlet(self)

    def inlet(self, end: KvEnd) -> "DeviceInlet":
        return DeviceInlet(self)

    def check(self, devices: Sequence[Device]) -> None:
        """Raises ConfigError or HandoffError if memory of these devices cannot be exported."""
        for device in devices:
            pair = [jax.device_put(np.zeros(1024, np.uint8), device) for _ in range(2)]
            lent = {self.lend(array)[0] for array in jax.block_until_ready(pair)}
            if len(lent) > 1:
                raise ConfigError(
                    f"JAX's arrays on {device} have allocations of their own, which end with them;"
                    " unset XLA_PYTHON_CLIENT_ALLOCATOR, so that they come from a pool"
                )

    def lend(self, array: jax.Array) -> tuple[LentAllocation, int]:
        """Returns the allocation that contains a computed single-device array, and the byte offset
        of the array in the allocation."""
        (device,) = array.devices()
        number, pointer = device.local_hardware_id or 0, array.unsafe_buffer_pointer()
        found = self.driver.allocation(number, pointer)
        with self._lock:
            known, handle = self._lent.get((number, found.base), (None, b""))
        if known != found:
            handle = self.driver.export(number, found.base)
            with self._lock:
                self._lent[number, found.base] = found, handle
        return LentAllocation(handle, found.number, found.size), pointer - found.base

    def park(self, pull_id: int, arrays: Sequence[jax.Array], seconds: float) -> None:
        """Keeps arrays alive that a receiver may still be copying. They are freed after `seconds`,
        or when `forget` is called."""
        if seconds > 0:
            with self._lock:
                self._parked[pull_id] = time.monotonic() + seconds, arrays

    def forget(self, pull_id: int) -> None:
        with self._lock:
            self._parked.pop(pull_id, None)

    def hold(self, device: int, lent: LentAllocation) -> Mapping:
        """Opens another process's allocation, or returns the existing mapping if it is open
        already. Raises HandoffError if the allocation cannot be read."""
        with self._lock:
            mapping = self._mappings.get((device, lent))
            if mapping is None:
                base = self.driver.open(device, lent.handle)
                mapping = self._mappings[device, lent] = Mapping(device, lent, base)
            mapping.holders += 1
            return mapping

    def let_go(self, mapping: Mapping) -> None:
        with self._lock:
            mapping.holders -= 1
            if mapping.holders:
                return
            del self._mappings[mapping.device, mapping.lent]
            try:
                self.driver.close(mapping.device, mapping.base)
            except HandoffError as error:  # its process may be gone, and the allocation with it
                _log.warning("another process's memory could not be closed: %s", error.message)

    def begun(self, read: "DeviceRead") -> None:
        with self._lock:
            self._reads.add(read)

    def over(self, read: "DeviceRead") -> None:
        with self._lock:
            self._reads.discard(read)

    def sweep(self) -> None:
        """Ends reads whose pulls are no longer polled. Frees the arrays of `park` whose time has
        passed."""
        now = time.monotonic()
        with self._lock:
            reads = list(self._reads)
            self._parked = {
                pull_id: (end, arrays)
                for pull_id, (end, arrays) in self._parked.items()
                if now < end
            }
        for read in reads:
            read.is_over()

    def kept(self) -> tuple[int, int, int]:
        """Returns the number of arrays that `park` keeps, the number of opened allocations, and the
        number of running reads."""
        with self._lock:
            parked = sum(len(arrays) for _, arrays in self._parked.values())
            return parked, len(self._mappings), len(self._reads)

    def close(self) -> None:
        """Blocks until running reads have ended, because JAX reuses the destination memory
        afterwards. Reads that have not started fail."""
        with self._lock:
            reads = list(self._reads)
            self._parked.clear()
        for read in reads:
            read.close()


class DeviceOutlet(Outlet):
    """Sends arrays on this process's devices to one receiver process, by CUDA IPC."""

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._reserved: dict[int, tuple[Sequence[jax.Array], float]] = {}
        self._written: dict[int, tuple[LentAllocation, ...]] = {}
        self._proven: set[LentAllocation] = set()

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        """Keeps the requested arrays alive. Their addresses are known only after they are
        computed."""
        arrays = pieces.on_devices()
        self._reserved[pull_id] = arrays, time.monotonic() + seconds
        return Reserved(len(arrays), arrays)

    def write(self, pull_id: int) -> OnDevice:
        """Exports the requested arrays without copying them, and computes checksums for the first
        pulls."""
        arrays = jax.block_until_ready(self._reserved[pull_id][0])
        lent, offsets = zip(*map(self._memory.lend, arrays), strict=True)
        allocations = tuple(dict.fromkeys(lent))
        checksums = () if self._proven.issuperset(allocations) else tuple(map(_sum_of, arrays))
        self._written[pull_id] = allocations
        return OnDevice(allocations, tuple(map(allocations.index, lent)), offsets, checksums)

    def pulled(self, pull_id: int) -> None:
        self._proven.update(self._written.get(pull_id, ()))
        self._free(pull_id)

    def given_up(self, pull_id: int) -> None:
        """Frees the arrays at once. The receiver may still be copying them, but discards the
        copy."""
        self._free(pull_id)

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        arrays, end = self._reserved.pop(pull_id, ((), 0.0))
        if self._written.pop(pull_id, None) is not None:
            self._memory.park(pull_id, arrays, end - time.monotonic())

    def close(self, in_flight: bool) -> None:
        for pull_id in list(self._reserved):
            self.withdraw(pull_id, 0, "")

    def _free(self, pull_id: int) -> None:
        self._reserved.pop(pull_id, None)
        self._written.pop(pull_id, None)
        self._memory.forget(pull_id)


class DeviceInlet(Inlet):
    """Pulls KV pieces from the device memory of one sender process, by CUDA IPC."""

    backend = KvBackend.CUDA
    reads = True

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._held: dict[tuple[int, LentAllocation], Mapping] = {}

    def pull(self, arrays: AnnouncedArrays) -> "list[DeviceLeaf]":
        """Starts to copy the sender's arrays into arrays of this process."""
        lies, avals = arrays.memory(OnDevice), arrays.avals
        if len(lies.places) != len(avals):
            raise HandoffError(f"a sender announced {len(lies.places)} places of {len(avals)}")
        checksums = lies.checksums or (None,) * len(avals)
        if len(checksums) != len(avals):
            raise HandoffError(f"a sender announced {len(checksums)} checksums of {len(avals)}")
        for place, offset, size in zip(lies.places, lies.offsets, arrays.sizes, strict=True):
            if not 0 <= place < len(lies.allocations):
                raise HandoffError(f"a sender announced bytes of allocation {place}, which is none")
            if not 0 <= offset <= offset + size <= lies.allocations[place].size:
                raise HandoffError(
                    f"a sender announced {size} bytes at {offset} of an allocation of"
                    f" {lies.allocations[place].size}"
                )
        used: dict[tuple[int, LentAllocation], Mapping] = {}
        parts: list[_Part] = []
        for aval, place, offset, checksum in zip(
            avals, lies.places, lies.offsets, checksums, strict=True
        ):
            (device,) = aval.sharding.device_set
            key = device.local_hardware_id or 0, lies.allocations[place]
            if key not in self._held:
                self._held[key] = self._memory.hold(*key)
            used[key] = self._held[key]
            parts.append(_Part(key[0], blank(aval), used[key].base + offset, checksum))
        for key in used:
            self._memory.hold(*key)  # by the read, which may outlive this connection
        read = DeviceRead(self._memory, parts, list(used.values()), arrays.in_time)
        return [DeviceLeaf(part.to, read) for part in parts]

    def close(self, in_flight: bool) -> None:
        """Closes the connection. Running copies continue."""
        for mapping in self._held.values():
            self._memory.let_go(mapping)
        self._held.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One copy on `device`, from the address `source` in another process's memory to the array `to`
    of this process. `checksum` is the expected checksum, or None if the sender gave none."""

    device: int
    to: jax.Array
    source: int
    checksum: bytes | None


def _sum_of(array: jax.Array) -> bytes:
    return byte_sum(np.asarray(array))


class DeviceRead:
    """The copies of one pull, to be polled. They begin when the destination arrays are allocated.
    Thread-safe."""

    def __init__(
        self,
        memory: LentMemory,
        parts: Sequence[_Part],
        held: Sequence[Mapping],
        in_time: Callable[[], bool],
    ) -> None:
        self._memory, self._parts, self._held, self._in_time = memory, parts, held, in_time
        self._lock = threading.Lock()
        self._copies: list[Copy] = []
        self._begun = self._over = False
        self.error: str | None = None
        memory.begun(self)

    def is_over(self) -> bool:
        """Returns whether all copies have ended or failed. Never blocks."""
        with self._lock:
            if not self._over:
                try:
                    self._advance()
                except Exception as error:
                    self._fail(error)
                if self._begun and not self._copies:
                    self._end()
            return self._over

    def close(self) -> None:
        """Ends the read; blocks until running copies have ended."""
        with self._lock:
            if not self._over:
                for copy in self._copies:
                    copy.wait()
                self.error = self.error or "the channel was closed"
                self._end()

    def _advance(self) -> None:
        if not self._begun:
            if not all(is_ready(part.to) for part in self._parts):
                return  # JAX would overwrite it later
            self._begin()
        while self._copies and self._copies[0].is_done():
            self._copies.pop(0)
        if not self._copies and not self.error:
            for part in self._parts:
                if part.checksum not in (None, _sum_of(part.to)):
                    raise HandoffError("other bytes arrived than those that the sender has")

    def _begin(self) -> None:
        self._begun = True
        if not self._in_time():
            self.error = _TOO_LATE
            return
        jax.block_until_ready([part.to for part in self._parts])  # raises if out of memory
        by_device: dict[int, list[tuple[int, int, int]]] = {}
        for part in self._parts:
            place = part.to.unsafe_buffer_pointer(), part.source, part.to.nbytes
            by_device.setdefault(part.device, []).append(place)
        for device, places in by_device.items():
            self._copies.append(self._memory.driver.copy(device, places))

    def _fail(self, error: Exception) -> None:
        self._begun = True
        self.error = self.error or (f"another process's device memory could not be copied: {error}")
        for copy in self._copies:
            copy.wait()  # no copy may write once the read is over
        self._copies.clear()

    def _end(self) -> None:
        if not self.error and not self._in_time():
            self.error = _TOO_LATE
        self._begun = self._over = True
        self._copies.clear()
        self._parts = ()
        for mapping in self._held:
            self._memory.let_go(mapping)
        self._memory.over(self)


class DeviceLeaf(Leaf):
    """An array that is copied from another process's device."""

    __slots__ = ("_read", "_to")

    def __init__(self, to: jax.Array, read: DeviceRead) -> None:
        self._to, self._read = to, read

    @property
    def nbytes(self) -> int:
        return self._to.nbytes

    def is_ready(self) -> bool:
        return self._read.is_over()

    @property
    def error(self) -> str | None:
        return self._read.error

    def array(self) -> jax.Array:
        if self.error:
            raise HandoffError(self.error)
        return self._to
