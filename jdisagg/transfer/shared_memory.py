"""Memory that one process fills and others of the same host map: how KV moves between them without
a copy through the network stack.

The sender writes the pieces of a pull into a `Region` (a memfd, which has no name and no owner but
the processes that hold it) and says which one; the receiver opens it through `/proc/PID/fd`, maps
it read-only and makes arrays of the mapping, on CPU without another copy. Invariants:
- a receiver hears of a region when its pull is accepted, which may be before the pieces are
  computed, and maps it meanwhile. Its first byte says whether they are written, and nothing else
  of it is looked at before: what follows the computation is one copy and one byte, no message;
- a region is written once, and again only after its receiver said that it keeps nothing of it; one
  that was taken back is closed, never filled anew. So what was read does not change, whoever is
  late;
- nothing outlives its processes: the kernel frees a memfd with its last holder, `kill -9` included;
- who can map is whom the kernel lets look into the sender: the same user, in the same PID
  namespace. `SharedMemory.name` holds a secret that lies in a probe region: who reads it there is
  on the same host, and who does not (another host with equal numbers) uses another way."""

import contextlib
import mmap
import os
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from jdisagg.errors import HandoffError
from jdisagg.messages.kv_plane import InMemory

ALIGNMENT = 64  # bytes: XLA:CPU takes a buffer as it is where it begins at a multiple of it
_WRITTEN = 1  # a region's first byte, once all that follows it is there
SPARE_BYTES = 256 << 20  # of regions, or mappings, that wait for their next use
_SECRET_BYTES = 16


class Region:
    """A piece of shared memory of `size` bytes, mapped for writing. `inode` tells it from another
    that has the same descriptor later."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("jdisagg-kv")
        try:
            os.ftruncate(self.descriptor, size)
            self.inode = os.fstat(self.descriptor).st_ino
            self._map = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> None:
        """Copies each array to its offset (bytes, a multiple of ALIGNMENT)."""
        for array, offset in zip(arrays, offsets, strict=True):
            place = np.frombuffer(self._map, array.dtype, array.size, offset)
            np.copyto(place.reshape(array.shape), array)

    def say(self, written: bool) -> None:
        """To who maps it. The locks that the interpreter takes between a copy and this, and a
        reader between seeing this and reading, keep them in order on every processor."""
        self._map[0] = _WRITTEN if written else 0

    def close(self) -> None:
        """This process's hold on it; who has mapped it keeps what it has."""
        self._map.close()
        os.close(self.descriptor)


def offsets_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where arrays of so many bytes lie in a region, one after another behind the byte that says
    that they are there, and its size in bytes."""
    offsets: list[int] = []
    end = ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end


class SharedMemory:
    """The regions of one sending process. One thread uses it."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._probe = Region(_SECRET_BYTES)
        self._probe.write([np.frombuffer(secret, np.uint8)], [0])
        self.name = f"{os.getpid()}:{self._probe.descriptor}:{secret.hex()}"
        self._spare: dict[int, list[Region]] = {}
        self._spare_bytes = 0

    @staticmethod
    def of_host() -> "SharedMemory | None":
        """None where the system has no such memory."""
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            return None
        return SharedMemory()

    def take(self, size: int) -> Region:
        """A region of at least `size` bytes; one that was used before where there is one, whose
        pages need not be found anew."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if spare := self._spare.get(size):
            self._spare_bytes -= size
            return spare.pop()
        try:
            return Region(size)
        except (OSError, ValueError) as error:
            raise HandoffError(
                f"no shared memory of {size} bytes for a block: {error}; raise the limit of memory"
                " or of open files"
            ) from error

    def give_back(self, region: Region) -> None:
        """One of which nobody keeps anything."""
        if self._spare_bytes + region.size > SPARE_BYTES:
            return region.close()
        self._spare.setdefault(region.size, []).append(region)
        self._spare_bytes += region.size

    def drop_spare(self) -> None:
        """Frees what waits for its next use."""
        for regions in self._spare.values():
            for region in regions:
                region.close()
        self._spare.clear()
        self._spare_bytes = 0

    def close(self) -> None:
        self.drop_spare()
        self._probe.close()


class MemoryOutlet:
    """What of this process's shared memory one receiver process pulls. One thread uses it."""

    address = ""  # nothing is pulled from here before it is posted

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._posted: dict[int, tuple[Region, tuple[int, ...]]] = {}

    def reserve(
        self, pull_id: int, sizes: Sequence[int], places: Sequence[int], seconds: float = 0.0
    ) -> InMemory:
        """Where arrays of so many bytes will lie: leaf i is the `places[i]`-th of them."""
        del seconds  # a mapping keeps what it has for as long as it likes
        offsets, size = offsets_of(sizes)
        region = self._memory.take(size)
        region.say(written=False)
        self._posted[pull_id] = region, offsets
        return InMemory(region.descriptor, region.inode, tuple(offsets[place] for place in places))

    def write(self, pull_id: int, arrays: Sequence[np.ndarray]) -> None:
        """What was reserved for."""
        region, offsets = self._posted[pull_id]
        region.write(arrays, offsets)
        region.say(written=True)

    def pulled(self, pull_id: int) -> None:
        """Its receiver keeps nothing of it."""
        if posted := self._posted.pop(pull_id, None):
            self._memory.give_back(posted[0])

    def withdraw(self, pull_id: int, leaves: int, reason: str) -> None:
        """Its receiver may keep it: the region is not used again."""
        del leaves, reason
        if posted := self._posted.pop(pull_id, None):
            posted[0].close()

    def refuse(self, pull_id: int, leaves: int, reason: str) -> None:
        """Nothing waits here before it is posted."""

    def tick(self) -> None:
        """Nothing is kept by time."""

    def close(self, in_flight: bool) -> None:
        del in_flight
        for region, _ in self._posted.values():
            region.close()
        self._posted.clear()


def reachable(name: str) -> bool:
    """Whether the memory of the process that has this name can be mapped here."""
    pid, descriptor, secret = _parts(name)
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as probe:
            return probe.read(_SECRET_BYTES) == secret != b""
    except OSError:
        return False


class LeafArrival(Protocol):
    """What is to happen before a region's bytes are there."""

    error: str | None

    def is_over(self) -> bool:
        """Whether it has happened or has failed; never waits."""
        ...


class Leaf:
    """An array that comes past the transfer engine, to poll."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it is there or will never be; never waits."""
        raise NotImplementedError

    @property
    def error(self) -> str | None:
        """Why it will never be there. Only once it is ready."""
        raise NotImplementedError

    def array(self) -> jax.Array:
        """It, where it was asked for. Only once it is ready; raises HandoffError where it will
        never be."""
        raise NotImplementedError


class LeafInMemory(Leaf):
    """An array in a region of memory, which may still have to come there. `arrival`: how, where its
    first byte does not say so."""

    __slots__ = ("_arrival", "_aval", "_bytes", "_region")

    def __init__(
        self,
        region: np.ndarray,
        bytes_: tuple[int, int],
        aval: jax.ShapeDtypeStruct,
        arrival: LeafArrival | None = None,
    ) -> None:
        self._region, self._bytes, self._aval, self._arrival = region, bytes_, aval, arrival

    @property
    def nbytes(self) -> int:
        return self._bytes[1] - self._bytes[0]

    def is_ready(self) -> bool:
        if self._arrival is not None:
            return self._arrival.is_over()
        return bool(self._region[0] == _WRITTEN)

    @property
    def error(self) -> str | None:
        return self._arrival.error if self._arrival is not None else None

    def array(self) -> jax.Array:
        """On CPU it is the region's own memory."""
        if self.error:
            raise HandoffError(self.error)
        first, end = self._bytes
        view = self._region[first:end].view(self._aval.dtype).reshape(self._aval.shape)
        return jax.device_put(view, self._aval.sharding)


class SenderMemory:
    """The shared memory of another process, by its name. One thread uses it.

    Mappings are kept (SPARE_BYTES in all), since a sender uses its regions again and the kernel
    takes longer to map one than to copy it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._bytes = 0

    def leaves(
        self, lies: InMemory, avals: Sequence[jax.ShapeDtypeStruct], unused: Callable[[], None]
    ) -> list[LeafInMemory]:
        """The arrays of a region, which may still have to be written.

        Args:
          lies: where they lie.
          avals: shapes and places of the arrays.
          unused: called once, from any thread, when no array needs the region any more.

        Raises:
          HandoffError: where the region was taken back meanwhile or is smaller than that.
        """
        if len(avals) != len(lies.offsets):
            raise HandoffError(f"a sender announced {len(lies.offsets)} leaves of {len(avals)}")
        # Views have it as their base: it lives as long as any of them.
        region = np.frombuffer(self._map(lies), np.uint8)
        places = [
            (offset, offset + int(np.prod(aval.shape)) * aval.dtype.itemsize)
            for aval, offset in zip(avals, lies.offsets, strict=True)
        ]
        if not all(ALIGNMENT <= first <= end <= region.size for first, end in places):
            raise HandoffError(f"a sender announced bytes {places} of a region of {region.size}")
        weakref.finalize(region, unused).atexit = False
        return [LeafInMemory(region, *leaf) for leaf in zip(places, avals, strict=True)]

    def close(self) -> None:
        """Arrays that live keep what they need."""
        self._mapped.clear()
        self._bytes = 0

    def _map(self, lies: InMemory) -> mmap.mmap:
        if lies.inode in self._mapped:  # as long as it is mapped no other region gets its number
            self._mapped.move_to_end(lies.inode)
            return self._mapped[lies.inode]
        pid, _, _ = _parts(self._name)
        try:
            opened = os.open(f"/proc/{pid}/fd/{lies.descriptor}", os.O_RDONLY)
        except OSError as error:
            raise HandoffError(f"the sender's shared memory is gone: {error}; pull again") from None
        try:
            found = os.fstat(opened)
            if found.st_ino != lies.inode or not found.st_size:
                raise HandoffError("the sender's shared memory was taken back; pull again")
            mapped = mmap.mmap(opened, found.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._mapped[lies.inode] = mapped
        self._bytes += len(mapped)
        while self._bytes > SPARE_BYTES and len(self._mapped) > 1:
            _, oldest = self._mapped.popitem(last=False)
            self._bytes -= len(oldest)
        return mapped


def _parts(name: str) -> tuple[int, int, bytes]:
    """PID, descriptor and secret; numbers that no process has where the name is none."""
    with contextlib.suppress(ValueError):
        pid, descriptor, secret = name.split(":")
        return int(pid), int(descriptor), bytes.fromhex(secret)
    return 0, -1, b""
