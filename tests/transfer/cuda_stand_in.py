"""The CUDA driver's part (`jdisagg.transfer.cuda_driver.Driver`), played by Linux on the memory of
JAX's CPU devices: a handle names a process and a part of its address space, and a copy reads that
process's very memory (process_vm_readv), so that nothing stands between the arrays of two
processes, as on a GPU.

What is open has an address that no memory has: to read there without `copy` is a fault. A copy
begins when it is looked at, and not before `gate` is open. `refuses`: calls that fail, by name."""

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Sequence

from jdisagg.errors import HandoffError
from jdisagg.transfer.cuda_driver import HANDLE_BYTES, Allocation

_MAGIC = b"lent"
_FORM = struct.Struct("<4sQQ")
_PART_BYTES = 1 << 40  # an allocation: a part of the address space, aligned to this
_NUMBER = 7
_OPENED_AT = 1 << 60
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_ulong) * 2,
    ctypes.c_ulong,
]


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class StandIn:
    def __init__(self, refuses: Sequence[str] = ()) -> None:
        # where Yama guards processes, they must say that others may read them
        _libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = set(refuses)
        self.opened: dict[int, tuple[int, int]] = {}
        self.exports = self.openings = self.copied_bytes = 0
        self._places = itertools.count(1)

    def allocation(self, device: int, pointer: int) -> Allocation:
        self._may("allocation")
        return Allocation(pointer // _PART_BYTES * _PART_BYTES, _PART_BYTES, _NUMBER)

    def export(self, device: int, base: int) -> bytes:
        self._may("export")
        self.exports += 1
        return _FORM.pack(_MAGIC, os.getpid(), base).ljust(HANDLE_BYTES, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        self._may("open")
        if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
            raise HandoffError("the stand-in's open says: no handle")
        _, pid, base = _FORM.unpack_from(handle)
        if not os.path.exists(f"/proc/{pid}"):
            raise HandoffError("the stand-in's open says: no such process")
        self.openings += 1
        place = _OPENED_AT + next(self._places) * _PART_BYTES
        self.opened[place] = pid, base
        return place

    def close(self, device: int, base: int) -> None:
        del self.opened[base]
        self._may("close")

    def copy(self, device: int, parts: Sequence[tuple[int, int, int]]) -> "StandInCopy":
        self._may("copy")
        return StandInCopy(self, tuple(parts))

    def read(self, to: int, from_: int, size: int) -> None:
        self._may("read")
        place = from_ // _PART_BYTES * _PART_BYTES
        pid, base = self.opened[place]  # KeyError: it was closed, which on a GPU would be a fault
        own, other = _Span(to, size), _Span(base + from_ - place, size)
        done = _libc.process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
        if done != size:
            said = os.strerror(ctypes.get_errno())
            raise HandoffError(f"the stand-in's copy of {size} bytes says: {said}")
        self.copied_bytes += size

    def _may(self, name: str) -> None:
        if name in self.refuses:
            raise HandoffError(f"the stand-in's {name} says: refused")


class StandInCopy:
    def __init__(self, driver: StandIn, parts: Sequence[tuple[int, int, int]]) -> None:
        self._driver, self._parts = driver, parts
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        if not self._driver.gate.is_set():
            return False
        with self._lock:
            parts, self._parts = self._parts, ()
            for part in parts:
                self._driver.read(*part)
        return True

    def wait(self) -> None:
        """What was not looked at is not copied: nobody may count on it."""
        self._parts = ()
