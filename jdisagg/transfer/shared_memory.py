"""The backend over shared memory: transfers KV between processes of one host without the network
stack.

The sender writes the pieces of a pull into a `Region`, which is a memfd, and answers with the
region's file descriptor. The receiver opens the region through `/proc/PID/fd`, maps it read-only
and makes arrays from the mapping, on CPU without another copy. Invariants:
- The sender may answer before the pieces are computed, so that the receiver can map the region
  meanwhile. The sender sets the region's first byte when all pieces are written. Until then the
  receiver reads only this byte. So no message is needed after the computation.
- A region is reused only after the receiver has reported that it no longer uses the region. A
  region whose pull was withdrawn is closed. So received data never changes.
- No memory outlives the processes: the kernel frees a memfd when the last process that uses it has
  ended, also after `kill -9`.
- The kernel lets only the same user in the same PID namespace map a region. `SharedMemory.name`
  contains a PID, a descriptor and a secret that is stored in a probe region. A process that can
  read the secret from the probe region is on the same host. On another host the same PID and
  descriptor may exist, but not the secret, so another backend is used."""

import contextlib
import errno
import mmap
import os
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from jdisagg.errors import HandoffError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import InMemory, KvBackend
from jdisagg.ops.device_layout import ALIGNMENT
from jdisagg.transfer.backend import AnnouncedArrays, Backend, Inlet, Outlet, Reserved
from jdisagg.transfer.channel import Leaf
from jdisagg.transfer.pieces import HostLeaves, RequestedPieces

_WRITTEN = 1  # first byte of a region that is written
SPARE_BYTES = 256 << 20  # limit of the regions, or mappings, that wait for their next use
FEW_SIZES_BYTES = 1 << 20  # regions above this size have few sizes
_SECRET_BYTES = 16
_FILE = "jdisagg-kv"


class Region:
    """A memfd of `size` bytes, mapped for writing. `inode` distinguishes the region from a later
    region with the same descriptor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create(_FILE)
        try:
            os.ftruncate(self.descriptor, size)
            self.inode = os.fstat(self.descriptor).st_ino
            self._map = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> None:
        """Copies each array to its byte offset, which must be a multiple of ALIGNMENT."""
        for array, offset in zip(arrays, offsets, strict=True):
            place = np.frombuffer(self._map, array.dtype, array.size, offset)
            np.copyto(place.reshape(array.shape), array)

    def set_written(self, written: bool) -> None:
        """Sets the byte that reports to receivers whether the region is written. The byte must
        become visible after the data. The interpreter takes locks between the copy and this store,
        and between a reader's load and its reads, which ensures this order on every processor."""
        self._map[0] = _WRITTEN if written else 0

    def close(self) -> None:
        """Mappings in other processes stay valid."""
        self._map.close()
        os.close(self.descriptor)


def _rounded(size: int) -> int:
    """Large regions have a power of two as their size, so that few sizes serve blocks of all
    sizes."""
    if size > FEW_SIZES_BYTES:
        return 1 << (size - 1).bit_length()
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def offsets_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The region's first byte is reserved: it reports that the arrays are written."""
    offsets: list[int] = []
    end = ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end


class SharedMemory(Backend):
    """The shared memory regions that one process sends from. Only `reaches` and `inlet` are
    thread-safe."""

    kind = KvBackend.SHARED

    def __init__(self) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._probe = Region(_SECRET_BYTES)
        self._probe.write([np.frombuffer(secret, np.uint8)], [0])
        self.name = f"{os.getpid()}:{self._probe.descriptor}:{secret.hex()}"
        self._spare: dict[int, list[Region]] = {}
        self._spare_bytes = 0
        self._closed = False

    @staticmethod
    def of_host() -> "SharedMemory | None":
        """Returns None if the operating system has no memfd."""
        if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
            return None
        return SharedMemory()

    def reaches(self, end: KvEnd) -> bool:
        return bool(end.memory) and reachable(end.memory)

    def outlet(self) -> "SharedOutlet":
        return SharedOutlet(self)

    def inlet(self, end: KvEnd) -> "SharedInlet":
        return SharedInlet(end.memory)

    def take(self, size: int) -> Region:
        """Prefers regions that were used before, because their pages are already allocated."""
        size = _rounded(size)
        for fitting in (size, 2 * size):
            if spare := self._spare.get(fitting):
                self._spare_bytes -= fitting
                return spare.pop()
        try:
            return Region(size)
        except (OSError, ValueError) as error:
            raise HandoffError(
                f"no shared memory of {size} bytes for a block: {error}; raise the limit of memory"
                " or of open files"
            ) from error

    def give_back(self, region: Region) -> None:
        """No receiver may still map the region."""
        if self._spare_bytes + region.size > SPARE_BYTES:
            return region.close()
        self._spare.setdefault(region.size, []).append(region)
        self._spare_bytes += region.size

    def drop_spare(self) -> None:
        for regions in self._spare.values():
            for region in regions:
                region.close()
        self._spare.clear()
        self._spare_bytes = 0

    def close(self) -> None:
        self.drop_spare()
        if not self._closed:
            self._closed = True
            self._probe.close()


class SharedOutlet(Outlet):
    answers_early = True  # a region's first byte reports that it is written

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._posted: dict[int, tuple[Region, tuple[int, ...]]] = {}
        self._unwritten: dict[int, HostLeaves] = {}

    def reserve(self, pull_id: int, pieces: RequestedPieces, seconds: float) -> Reserved:
        leaves = pieces.in_host()
        offsets, size = offsets_of(leaves.sizes)
        region = self._memory.take(size)
        region.set_written(False)
        self._posted[pull_id] = region, offsets
        self._unwritten[pull_id] = leaves
        lies = tuple(offsets[index] for index in leaves.order)
        memory = InMemory(region.descriptor, region.inode, lies)
        return Reserved(len(lies), leaves.sources, memory)

    def write(self, pull_id: int) -> None:
        region, offsets = self._posted[pull_id]
        region.write(self._unwritten.pop(pull_id).arrays(), offsets)
        region.set_written(True)

    def pulled(self, pull_id: int) -> None:
        self._unwritten.pop(pull_id, None)
        if posted := self._posted.pop(pull_id, None):
            self._memory.give_back(posted[0])

    def withdraw(self, pull_id: int, leaves: int, reason: str, given_up: bool = False) -> None:
        """Closes the region rather than reusing it, because the receiver may still map it."""
        self._unwritten.pop(pull_id, None)
        if posted := self._posted.pop(pull_id, None):
            posted[0].close()

    def close(self, in_flight: bool) -> None:
        for pull_id in list(self._posted):
            self.withdraw(pull_id, 0, "")


def reachable(name: str) -> bool:
    pid, descriptor, secret = _parts(name)
    try:
        with open(_opened(pid, descriptor), "rb") as probe:
            return probe.read(_SECRET_BYTES) == secret != b""
    except OSError:
        return False


class LeafArrival(Protocol):
    """A read into a region of host memory, in progress or ended. The receiver polls it."""

    error: str | None

    def is_over(self) -> bool: ...


class LeafInMemory(Leaf):
    """A received array in a region of host memory. `arrival` is the read by which this process
    fills the region. It is None if the sender fills the region and then sets the region's first
    byte."""

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
        """Returns the array; on CPU it is a view of the region."""
        if self.error:
            raise HandoffError(self.error)
        first, end = self._bytes
        view = self._region[first:end].view(self._aval.dtype).reshape(self._aval.shape)
        return jax.device_put(view, self._aval.sharding)


class SharedInlet(Inlet):
    """Mappings are cached, up to SPARE_BYTES in total. A sender reuses its regions, and mapping a
    region takes longer than copying it."""

    backend = KvBackend.SHARED
    borrows = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._bytes = 0

    def pull(self, arrays: AnnouncedArrays) -> list[LeafInMemory]:
        """Maps the sender's region, which may not be written yet."""
        lies = arrays.memory(InMemory)
        # The views have this array as their base, so the array exists as long as any view.
        region = np.frombuffer(self._map(lies), np.uint8)
        places = [
            (offset, offset + size) for offset, size in zip(lies.offsets, arrays.sizes, strict=True)
        ]
        if not all(ALIGNMENT <= first <= end <= region.size for first, end in places):
            raise HandoffError(f"a sender announced bytes {places} of a region of {region.size}")
        weakref.finalize(region, arrays.unused).atexit = False
        return [LeafInMemory(region, *leaf) for leaf in zip(places, arrays.avals, strict=True)]

    def close(self, in_flight: bool) -> None:
        self._mapped.clear()
        self._bytes = 0

    def _map(self, lies: InMemory) -> mmap.mmap:
        if lies.inode in self._mapped:  # a mapped region's number is not given to another
            self._mapped.move_to_end(lies.inode)
            return self._mapped[lies.inode]
        pid, _, _ = _parts(self._name)
        try:
            opened = _opened(pid, lies.descriptor)
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


def _opened(pid: int, descriptor: int) -> int:
    """Opens a region of another process. Raises OSError if the file is no region. If the process is
    on another host, its numbers may be those of a pipe or terminal here, and reading from it would
    wait and take what others should read."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_FILE} "):
        raise OSError(errno.ENOENT, "not a region", path)
    return os.open(path, os.O_RDONLY)


def _parts(name: str) -> tuple[int, int, bytes]:
    with contextlib.suppress(ValueError):
        pid, descriptor, secret = name.split(":")
        return int(pid), int(descriptor), bytes.fromhex(secret)
    return 0, -1, b""
