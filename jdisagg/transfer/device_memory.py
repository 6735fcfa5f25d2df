"""Memory of accelerators that processes of one host lend each other: how KV moves between them from
device to device, past the host.

The sender says in which allocation of its device a piece lies, by a handle that the driver lets
other processes open, and where in it; the receiver opens each allocation once and copies the pieces
into arrays of its own. The sender copies nothing. Invariants:
- a receiver hears of an array when it is computed, and the sender keeps the array until its
  receiver has copied it or gave up, or the deadline of its pull has passed, after which a receiver
  counts nothing that it copies. So what was copied does not change, whoever is late;
- a receiver's array is written behind JAX's back: once JAX is done with making it, before anybody
  has it, and it is kept until the copy is over, also where nobody wants it any more;
- an allocation stays open here while its sender is connected or anything is copied from it;
- only memory of a pool is lent, which the sender's process never gives back to the driver: an
  allocation that ends while another process reads it is a fault of that one's device. It is the
  whole pool that can be read then, by who has the handle: it travels on the control connection
  alone, and works within this host."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.messages.kv_plane import LentAllocation, OnDevice
from jdisagg.model_api import Device
from jdisagg.transfer.cuda_driver import Allocation, Copy, CudaDriver, Driver
from jdisagg.transfer.pieces import blank
from jdisagg.transfer.polled_pull import is_ready
from jdisagg.transfer.shared_memory import Leaf

_log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOO_LATE = "what was copied from another process's device came after the pull's deadline"


def lent_memory(channel: str, devices: Sequence[Device]) -> "tuple[LentMemory | None, str]":
    """What a worker on these devices has for `ServiceConfig.kv_channel`, and why it has none where
    that asks for it ("" where it does not). Only by name: no GPU has run it yet, and CUDA does not
    say what a lender's death does to who reads."""
    if channel != "cuda":
        return None, ""
    if not devices or devices[0].platform != "gpu":
        return None, "its devices are no GPUs"
    try:
        memory = LentMemory(CudaDriver())
        own = jax.process_index()
        memory.check([device for device in devices if device.process_index == own])
    except (ConfigError, HandoffError) as error:
        _log.warning("KV goes through the host's memory, not by CUDA: %s", error.message)
        return None, error.message
    return memory, ""


def this_host() -> str:
    """A name that no other host has, and this one until it starts again; "" where it has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class Mapping:
    """Another process's allocation, as `device` reads it. It is closed when nobody holds it."""

    device: int
    lent: LentAllocation
    base: int
    holders: int = 0


class LentMemory:
    """What this process lends and has been lent. From any thread."""

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

    def check(self, devices: Sequence[Device]) -> None:
        """Raises ConfigError, or what the driver says, where memory of these cannot be lent."""
        for device in devices:
            pair = [jax.device_put(np.zeros(1024, np.uint8), device) for _ in range(2)]
            lent = {self.lend(array)[0] for array in jax.block_until_ready(pair)}
            if len(lent) > 1:
                raise ConfigError(
                    f"JAX's arrays on {device} have allocations of their own, which end with them;"
                    " unset XLA_PYTHON_CLIENT_ALLOCATOR, so that they come from a pool"
                )

    def lend(self, array: jax.Array) -> tuple[LentAllocation, int]:
        """The allocation of an array that is there, on one device, and at which of its bytes it
        begins."""
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
        """Keeps what somebody may still copy, for so long, or until `forget`."""
        if seconds > 0:
            with self._lock:
                self._parked[pull_id] = time.monotonic() + seconds, arrays

    def forget(self, pull_id: int) -> None:
        with self._lock:
            self._parked.pop(pull_id, None)

    def hold(self, device: int, lent: LentAllocation) -> Mapping:
        """Opens it, once for all who hold it. Raises HandoffError where it cannot be read."""
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
            except HandoffError as error:  # of a process that is gone, nothing may be left
                _log.warning("another process's memory could not be closed: %s", error.message)

    def begun(self, read: "DeviceRead") -> None:
        with self._lock:
            self._reads.add(read)

    def over(self, read: "DeviceRead") -> None:
        with self._lock:
            self._reads.discard(read)

    def sweep(self) -> None:
        """To be called a few times a second: ends reads that nobody looks at any more, and drops
        what was kept for who is late."""
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
        """Arrays parked for others, allocations of others that are open, and reads under way."""
        with self._lock:
            parked = sum(len(arrays) for _, arrays in self._parked.values())
            return parked, len(self._mappings), len(self._reads)

    def close(self) -> None:
        """Reads under way are waited for, for JAX gives their memory to others then; those that
        have not begun fail. Idempotent."""
        with self._lock:
            reads = list(self._reads)
            self._parked.clear()
        for read in reads:
            read.close()


class DeviceOutlet:
    """What of this process's devices one receiver process copies. One thread uses it."""

    address = ""  # nothing is pulled from here before it is posted

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._ends: dict[int, float] = {}
        self._posted: dict[int, Sequence[jax.Array]] = {}

    def reserve(
        self, pull_id: int, sizes: Sequence[int], places: Sequence[int], seconds: float
    ) -> None:
        """After `seconds` its receiver counts nothing that it copies. Where the arrays lie is known
        when they are there."""
        del sizes, places
        self._ends[pull_id] = time.monotonic() + seconds

    def write(self, pull_id: int, arrays: Sequence[jax.Array]) -> OnDevice:
        """Where they lie, who are there: they are kept as they are, nothing is copied."""
        lent, offsets = zip(*map(self._memory.lend, arrays), strict=True)
        allocations = tuple(dict.fromkeys(lent))
        self._posted[pull_id] = arrays
        return OnDevice(allocations, tuple(map(allocations.index, lent)), offsets)

    def has_written(self, pull_id: int) -> bool:
        """Whether its receiver may hear of it."""
        return pull_id in self._posted

    def pulled(self, pull_id: int) -> None:
        """Its receiver has copied it, or counts nothing of it."""
        self._ends.pop(pull_id, None)
        self._posted.pop(pull_id, None)
        self._memory.forget(pull_id)

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        """Its receiver may be copying it."""
        del leaves, reason
        end = self._ends.pop(pull_id, 0.0)
        if arrays := self._posted.pop(pull_id, None):
            self._memory.park(pull_id, arrays, end - time.monotonic())

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Nothing waits here before it is posted."""

    def tick(self) -> None:
        """`LentMemory.sweep` is for all of them."""

    def close(self, in_flight: bool) -> None:
        del in_flight
        for pull_id in list(self._ends):
            self.withdraw(pull_id, 0, "")


class DeviceSender:
    """The devices' memory of another process. One thread uses it."""

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._held: dict[tuple[int, LentAllocation], Mapping] = {}

    def leaves(
        self, lies: OnDevice, avals: Sequence[jax.ShapeDtypeStruct], in_time: Callable[[], bool]
    ) -> "list[DeviceLeaf]":
        """Arrays into which is being copied, or will be, when this returns.

        Args:
          lies: where the pieces lie.
          avals: shapes and places of the arrays.
          in_time: asked when they are there; what comes late counts as failed.

        Raises:
          HandoffError: where what is said of them cannot be, or nothing can be read there.
        """
        if not len(avals) == len(lies.places) == len(lies.offsets):
            raise HandoffError(f"a sender announced {len(lies.offsets)} leaves of {len(avals)}")
        sizes = [int(np.prod(aval.shape)) * aval.dtype.itemsize for aval in avals]
        for place, offset, size in zip(lies.places, lies.offsets, sizes, strict=True):
            if not 0 <= place < len(lies.allocations):
                raise HandoffError(f"a sender announced bytes of allocation {place}, which is none")
            if not 0 <= offset <= offset + size <= lies.allocations[place].size:
                raise HandoffError(
                    f"a sender announced {size} bytes at {offset} of an allocation of"
                    f" {lies.allocations[place].size}"
                )
        used: dict[tuple[int, LentAllocation], Mapping] = {}
        parts: list[_Part] = []
        for aval, place, offset in zip(avals, lies.places, lies.offsets, strict=True):
            (device,) = aval.sharding.device_set
            key = device.local_hardware_id or 0, lies.allocations[place]
            if key not in self._held:
                self._held[key] = self._memory.hold(*key)
            used[key] = self._held[key]
            parts.append(_Part(key[0], blank(aval), used[key].base + offset))
        for key in used:
            self._memory.hold(*key)  # for the read, which may outlive the connection
        read = DeviceRead(self._memory, parts, list(used.values()), in_time)
        return [DeviceLeaf(part.to, read) for part in parts]

    def close(self) -> None:
        """What is being copied goes on."""
        for mapping in self._held.values():
            self._memory.let_go(mapping)
        self._held.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What `device` copies to an array of its own from an address of its own."""

    device: int
    to: jax.Array
    source: int


class DeviceRead:
    """Copies that are to be made, then under way, then over. To poll, from any thread."""

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
        """Whether all is there or never will be; never waits."""
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
        """Ends it, and waits for what is under way."""
        with self._lock:
            if not self._over:
                for copy in self._copies:
                    copy.wait()
                self.error = self.error or "the channel was closed"
                self._end()

    def _advance(self) -> None:
        if not self._begun:
            if not all(is_ready(part.to) for part in self._parts):
                return  # JAX would write into it after us
            self._begin()
        while self._copies and self._copies[0].is_done():
            self._copies.pop(0)

    def _begin(self) -> None:
        self._begun = True
        if not self._in_time():
            self.error = _TOO_LATE
            return
        jax.block_until_ready([part.to for part in self._parts])  # raises where it has no memory
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
            copy.wait()  # nothing may be written there once this is over
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
    """An array into which something is copied from another process's device."""

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
