"""CUDA driver calls that export this process's GPU memory to other processes of the host (CUDA
IPC), and copy from memory that other processes export. No other module of jdisagg calls CUDA.
Machines without CUDA do not use this module.

`Driver` is the interface, which `CudaDriver` implements with cuda-bindings. A parameter `device` is
the index of a GPU in this process (`jax.Device.local_hardware_id`). All calls use the GPU's primary
context, which XLA uses too. Any thread may call these functions, so each call pushes the context
and pops it again."""

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jdisagg.errors import ConfigError, HandoffError

HANDLE_BYTES = 64
_SUCCESS, _NOT_READY = 0, 600  # of CUresult


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the driver: its base address, its size in bytes, and an id that is unique
    in this process."""

    base: int
    size: int
    number: int


class Copy(Protocol):
    """One or more copies in progress. Thread-safe."""

    def is_done(self) -> bool:
        """Returns whether the copies have ended. Never blocks. Raises HandoffError if they
        failed."""
        ...

    def wait(self) -> None:
        """Blocks until the copies have ended or failed."""
        ...


class Driver(Protocol):
    """The CUDA driver. Every method raises HandoffError with the driver's error if a call fails."""

    def allocation(self, device: int, pointer: int) -> Allocation:
        """Returns the driver's allocation that contains the address `pointer`."""
        ...

    def export(self, device: int, base: int) -> bytes:
        """Returns the CUDA IPC handle with which other processes open the allocation at address
        `base`."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Opens another process's allocation for `device` and returns its address in this
        process."""
        ...

    def close(self, device: int, base: int) -> None:
        """Closes an allocation that `open` returned. No copy may be reading from it."""
        ...

    def copy(self, device: int, parts: Sequence[tuple[int, int, int]]) -> Copy:
        """Starts to copy `parts`, each (destination address, source address, bytes). Uses a stream
        of `device` that runs concurrently with computation."""
        ...


class CudaDriver:
    """Implements `Driver` with the package cuda-bindings. The constructor raises ConfigError if
    cuda-bindings, the CUDA driver or a device is missing."""

    def __init__(self) -> None:
        try:
            self._cuda = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError(
                f"cuda-bindings cannot be imported ({error}); pip install jdisagg[cuda12], or"
                " cuda13"
            ) from error
        self._lock = threading.Lock()
        self._contexts: dict[int, tuple[Any, Any]] = {}
        try:
            self._call("cuInit", 0)
        except HandoffError as error:
            raise ConfigError(error.message) from error
        except Exception as error:  # the library is loaded at the first call
            raise ConfigError(f"there is no CUDA driver: {error}") from error

    def allocation(self, device: int, pointer: int) -> Allocation:
        cuda = self._cuda
        with self._current(device):
            base, size = self._call("cuMemGetAddressRange", pointer)
            number = self._call(
                "cuPointerGetAttribute",
                cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
                pointer,
            )[0]
        return Allocation(int(base), int(size), int(number))

    def export(self, device: int, base: int) -> bytes:
        with self._current(device):
            (handle,) = self._call("cuIpcGetMemHandle", base)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, device: int, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise HandoffError(
                f"a handle of CUDA memory has {HANDLE_BYTES} bytes, not {len(handle)}"
            )
        opened = self._cuda.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        lazily = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self._current(device):
            return int(self._call("cuIpcOpenMemHandle", opened, int(lazily))[0])

    def close(self, device: int, base: int) -> None:
        with self._current(device):
            self._call("cuIpcCloseMemHandle", base)

    def copy(self, device: int, parts: Sequence[tuple[int, int, int]]) -> "CudaCopy":
        with self._current(device) as stream:
            timeless = self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
            (event,) = self._call("cuEventCreate", int(timeless))
            try:
                for to, from_, size in parts:
                    self._call("cuMemcpyDtoDAsync", to, from_, size, stream)
                self._call("cuEventRecord", event, stream)
            except HandoffError:
                with contextlib.suppress(HandoffError):  # some copies may have begun
                    self._call("cuStreamSynchronize", stream)
                self._call("cuEventDestroy", event)
                raise
        return CudaCopy(self, event)

    def has_passed(self, event: object) -> bool:
        (status,) = self._cuda.cuEventQuery(event)
        if int(status) == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def await_event(self, event: object) -> None:
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: object) -> None:
        self._call("cuEventDestroy", event)

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[Any]:
        with self._lock:
            if device not in self._contexts:
                (place,) = self._call("cuDeviceGet", device)
                (context,) = self._call("cuDevicePrimaryCtxRetain", place)
                self._call("cuCtxPushCurrent", context)
                try:
                    unordered = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
                    self._contexts[device] = context, *self._call("cuStreamCreate", int(unordered))
                finally:
                    self._call("cuCtxPopCurrent")
            context, stream = self._contexts[device]
        self._call("cuCtxPushCurrent", context)
        try:
            yield stream
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: object) -> tuple[Any, ...]:
        status, *values = getattr(self._cuda, name)(*arguments)
        self._check(name, status)
        return tuple(values)

    def _check(self, name: str, status: Any) -> None:
        if int(status) != _SUCCESS:
            raise HandoffError(f"CUDA's {name} says {getattr(status, 'name', status)}")


class CudaCopy:
    """Copies that were queued on a CUDA stream, and an event that marks their end."""

    def __init__(self, driver: CudaDriver, event: object) -> None:
        self._driver, self._event = driver, event
        self._lock = threading.Lock()
        self._done = False

    def is_done(self) -> bool:
        with self._lock:
            if not self._done and self._driver.has_passed(self._event):
                self._end()
            return self._done

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                for end in (lambda: self._driver.await_event(self._event), self._end):
                    with contextlib.suppress(HandoffError):
                        end()

    def _end(self) -> None:
        self._done = True
        self._driver.destroy_event(self._event)
