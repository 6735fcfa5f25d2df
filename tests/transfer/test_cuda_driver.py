"""What is asked of cuda-bindings, in which order and with which context: its module is played here,
as it answers (a tuple, whose first is a CUresult)."""

import ctypes
import enum
import sys
import types
from collections.abc import Callable

import pytest

from jdisagg.errors import ConfigError, HandoffError
from jdisagg.transfer.cuda_driver import HANDLE_BYTES, Allocation, CudaDriver


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600


class Handle:
    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)

    def text(self) -> bytes:
        return self._bytes.raw.rstrip(b"\0")


def flags(**values: int) -> type[enum.IntEnum]:
    return enum.IntEnum("flags", values)


class PlayedCuda(types.ModuleType):
    """Refuses what needs a current context where there is none. `fails`: calls that fail."""

    CUipcMemHandle = Handle
    CUpointer_attribute = flags(CU_POINTER_ATTRIBUTE_BUFFER_ID=7)
    CUipcMem_flags = flags(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUevent_flags = flags(CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = flags(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.contexts: list[str] = []
        self.calls: list[tuple[str, str, tuple[object, ...]]] = []
        self.fails: set[str] = set()
        self.events: set[str] = set()
        self.polls = 2

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, *arguments: object) -> tuple[object, ...]:
        context = self.contexts[-1] if self.contexts else ""
        self.calls.append((name, context, arguments))
        if name in self.fails:
            return (Result.CUDA_ERROR_INVALID_VALUE, *((None,) if "Get" in name else ()))
        match name:
            case "cuInit":
                return (Result.CUDA_SUCCESS,)
            case "cuDeviceGet":
                return Result.CUDA_SUCCESS, f"device {arguments[0]}"
            case "cuDevicePrimaryCtxRetain":
                return Result.CUDA_SUCCESS, f"context of {arguments[0]}"
            case "cuCtxPushCurrent":
                self.contexts.append(str(arguments[0]))
                return (Result.CUDA_SUCCESS,)
            case "cuCtxPopCurrent":
                return Result.CUDA_SUCCESS, self.contexts.pop()
        if not context and not name.startswith("cuEvent"):
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        match name:
            case "cuStreamCreate":
                return Result.CUDA_SUCCESS, f"stream of {context}"
            case "cuMemGetAddressRange":
                return Result.CUDA_SUCCESS, 0x1000, 0x9000
            case "cuPointerGetAttribute":
                return Result.CUDA_SUCCESS, 42
            case "cuIpcGetMemHandle":
                handle = Handle()
                ctypes.memmove(handle.getPtr(), b"pool", 4)
                return Result.CUDA_SUCCESS, handle
            case "cuIpcOpenMemHandle":
                return Result.CUDA_SUCCESS, 0x70000
            case "cuEventCreate":
                self.events.add("event")
                return Result.CUDA_SUCCESS, "event"
            case "cuEventDestroy":
                self.events.remove(str(arguments[0]))
            case "cuEventQuery":
                self.polls -= 1
                if self.polls >= 0:
                    return (Result.CUDA_ERROR_NOT_READY,)
        return (Result.CUDA_SUCCESS,)

    def made(self, *names: str) -> list[tuple[str, str, tuple[object, ...]]]:
        return [call for call in self.calls if call[0] in names]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    played, bindings, package = PlayedCuda(), types.ModuleType("b"), types.ModuleType("cuda")
    bindings.driver, package.bindings = played, bindings  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", played)
    return played


def test_an_allocation_is_lent_and_read_in_the_context_of_its_device(cuda: PlayedCuda) -> None:
    driver = CudaDriver()
    assert driver.allocation(1, 0x2000) == Allocation(0x1000, 0x9000, 42)
    handle = driver.export(1, 0x1000)
    assert handle == b"pool".ljust(HANDLE_BYTES, b"\0")
    assert driver.open(0, handle) == 0x70000
    ((_, context, (opened, flag)),) = cuda.made("cuIpcOpenMemHandle")
    assert context == "context of device 0"
    assert isinstance(opened, Handle)
    assert (opened.text(), flag) == (b"pool", 1)
    driver.close(0, 0x70000)
    assert {
        context for _, context, _ in cuda.made("cuMemGetAddressRange", "cuIpcGetMemHandle")
    } == {"context of device 1"}
    assert len(cuda.made("cuDevicePrimaryCtxRetain")) == 2
    assert not cuda.contexts


def test_copies_run_on_a_stream_of_their_own_and_their_event_is_gone_when_they_are_over(
    cuda: PlayedCuda,
) -> None:
    copy = CudaDriver().copy(0, [(1, 2, 3), (4, 5, 6)])
    stream = "stream of context of device 0"
    copies = [arguments for _, _, arguments in cuda.made("cuMemcpyDtoDAsync")]
    assert copies == [(1, 2, 3, stream), (4, 5, 6, stream)]
    assert [copy.is_done() for _ in range(4)] == [False, False, True, True]
    assert not cuda.events
    copy.wait()
    assert not cuda.made("cuEventSynchronize")


def test_who_waits_for_a_copy_needs_no_polling(cuda: PlayedCuda) -> None:
    copy = CudaDriver().copy(0, [(1, 2, 3)])
    copy.wait()
    assert copy.is_done()
    assert not cuda.events


@pytest.mark.parametrize("name", ["cuMemcpyDtoDAsync", "cuEventRecord"])
def test_a_copy_that_cannot_begin_leaves_no_event_and_nothing_under_way(
    cuda: PlayedCuda, name: str
) -> None:
    driver = CudaDriver()
    cuda.fails.add(name)
    with pytest.raises(HandoffError, match=f"{name} says CUDA_ERROR_INVALID_VALUE"):
        driver.copy(0, [(1, 2, 3)])
    assert cuda.made("cuStreamSynchronize")
    assert not cuda.events
    assert not cuda.contexts


def test_a_copy_that_fails_says_so(cuda: PlayedCuda) -> None:
    copy = CudaDriver().copy(0, [(1, 2, 3)])
    cuda.fails |= {"cuEventQuery", "cuEventSynchronize"}
    with pytest.raises(HandoffError, match="cuEventQuery says CUDA_ERROR_INVALID_VALUE"):
        copy.is_done()
    copy.wait()
    assert not cuda.events


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda driver: driver.allocation(0, 1), "cuPointerGetAttribute"),
        (lambda driver: driver.export(0, 1), "cuIpcGetMemHandle"),
        (lambda driver: driver.open(0, b"x" * HANDLE_BYTES), "cuIpcOpenMemHandle"),
        (lambda driver: driver.close(0, 1), "cuIpcCloseMemHandle"),
        (lambda driver: driver.close(0, 1), "cuStreamCreate"),
    ],
)
def test_what_the_driver_refuses_is_typed_and_leaves_no_context_behind(
    cuda: PlayedCuda, call: Callable[[CudaDriver], object], name: str
) -> None:
    driver = CudaDriver()
    cuda.fails.add(name)
    with pytest.raises(HandoffError, match=f"CUDA's {name} says CUDA_ERROR_INVALID_VALUE"):
        call(driver)
    assert not cuda.contexts


@pytest.mark.parametrize("length", [0, 63, 65, 10_000])
def test_a_handle_of_another_length_never_reaches_the_driver(cuda: PlayedCuda, length: int) -> None:
    with pytest.raises(HandoffError, match="64 bytes"):
        CudaDriver().open(0, b"x" * length)
    assert not cuda.made("cuIpcOpenMemHandle")


def test_a_driver_that_does_not_begin_is_a_matter_of_configuration(cuda: PlayedCuda) -> None:
    cuda.fails.add("cuInit")
    with pytest.raises(ConfigError, match="cuInit says"):
        CudaDriver()
