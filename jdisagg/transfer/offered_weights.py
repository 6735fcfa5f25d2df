"""Named arrays that a trainer or a worker offers to workers: describes the arrays, and reads parts
of them from their devices. On accelerators, only the requested parts are copied to the host."""

import contextlib
import functools
import hashlib
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.reshard_plan import Box, box_of, plan_reshard
from jdisagg.messages.weights import OfferedPart, OfferedTensor
from jdisagg.ops.checksum import byte_sum
from jdisagg.ops.device_layout import aligned_empty

LEASE_SECONDS = 600.0
_READER = -1  # place of the reader in a plan; devices have numbers from 0
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class OfferedWeights:
    """Named arrays that workers may read until `close`, or until the lease ends. The arrays must
    not be donated or changed until then. The class has the methods of `CheckpointTensors`, so that
    code that reads a checkpoint can read an offer instead.

    Attributes:
        name: Name by which an update refers to the offer, instead of a folder.
        parameters: Whether the arrays are a worker's parameters in their served form, rather than
            the tensors of a checkpoint.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, Any], lease_seconds: float, content: str = ""
    ) -> None:
        self.name, self.bytes_read, self.parameters = name, 0, bool(content)
        self._tensors, self._names = dict(tensors), tuple(tensors)
        self._content = content
        self._sums: dict[str, bytes] = {}
        self._until = time.monotonic() + lease_seconds
        self._closing: list[Callable[[], object]] = []
        self._buffers = _Buffers()
        self._lock = threading.Lock()
        self._hashing = threading.Lock()  # workers that ask at once wait for one hash

    def when_closed(self, call: Callable[[], object]) -> None:
        self._closing.append(call)

    def close(self) -> None:
        """Ends the offer. Idempotent."""
        while self._closing:
            self._closing.pop()()
        self._tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        self.check()
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return {
            _FLOATS.get(str(tensor.dtype), str(tensor.dtype))
            for name, tensor in self._tensors.items()
            if not name.endswith(but)
        }

    def unreadable(self) -> list[str]:
        return unreadable({name: str(one.dtype) for name, one in self._tensors.items()})

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        self.check()
        tensor = self._tensors[name]
        wanted = whole_box(index, tensor.shape)
        values = self._gathered(tensor, wanted)
        self.count(values.nbytes)
        return stepped(values, index)

    def content(self, *, again: bool = False) -> str:
        """The hash does not depend on the sharding if this process holds all parts. JAX arrays are
        hashed once. numpy arrays are hashed at each call, because they can change. `again` is a
        parameter of the interface and has no effect here."""
        self.check()
        if self._content:
            return self._content
        digest = hashlib.blake2b(digest_size=16)
        with self._hashing:
            for name in sorted(self._tensors):
                tensor = self._tensors[name]
                if name not in self._sums or not isinstance(tensor, jax.Array):
                    self._sums[name] = self._sum_of(tensor)
                digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(self._sums[name])
        return digest.hexdigest()

    def described(self) -> tuple[OfferedTensor, ...]:
        self.check()
        return tuple(
            OfferedTensor(
                name,
                str(tensor.dtype),
                tuple(tensor.shape),
                tuple((device, box) for device, (box, _) in _held(tensor).items()),
            )
            for name, tensor in self._tensors.items()
        )

    def block(self, parts: Sequence[OfferedPart]) -> tuple[jax.Array, bytes]:
        """Returns the bytes of `parts`, concatenated, as an array [1, 1, 1, 1, n] on one device,
        and their checksum. On CPU a single contiguous part is not copied. Raises
        InvalidRequestError if a device does not hold a part."""
        self.check()
        cuts = [self._part(part) for part in parts]
        if len(cuts) == 1 and isinstance(cuts[0], jax.Array):
            return cuts[0], byte_sum(np.asarray(cuts[0]))
        flat = [np.asarray(cut).reshape(-1).view(np.uint8) for cut in cuts]
        joined = flat[0]
        if len(flat) > 1:
            joined = self._buffers.take(sum(part.size for part in flat))
            np.concatenate(flat, out=joined)
        block = joined.reshape(1, 1, 1, 1, -1)
        return jax.device_put(block, jax.local_devices()[0]), byte_sum(joined)

    def seconds_left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        if not self._tensors or time.monotonic() > self._until:
            raise InvalidRequestError(
                f"weights {self.name!r}: the offer is closed, or its lease has ended; offer the"
                " arrays again"
            )

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def _part(self, part: OfferedPart) -> Any:
        try:
            tensor = self._tensors[self._names[part.tensor]]
            box, shard = _held(tensor)[part.device]
            inside = all(
                first <= low <= high <= end
                for (low, high), (first, end) in zip(part.box, box, strict=True)
            )
        except (IndexError, KeyError, ValueError):
            inside = False
        if not inside:
            raise InvalidRequestError(
                f"weights {self.name!r}: device {part.device} of this process does not hold the"
                f" part {part.box} of tensor {part.tensor}; describe the offer again"
            )
        local = tuple(
            (low - first, high - first)
            for (low, high), (first, _) in zip(part.box, box, strict=True)
        )
        if _on_host(shard) or "int4" in str(shard.dtype):  # whose values have half a byte there
            return np.ascontiguousarray(_cut(shard, local))
        starts = tuple(low for low, _ in local)
        return _bytes_of(shard, starts, tuple(high - low for low, high in local))

    def _sum_of(self, tensor: Any) -> bytes:
        if getattr(tensor, "is_fully_addressable", True):
            return byte_sum(self._gathered(tensor, whole_box((), tensor.shape)))
        digest = hashlib.blake2b(digest_size=16)
        for box, shard in sorted({box: shard for box, shard in _held(tensor).values()}.items()):
            digest.update(f"{box}".encode() + byte_sum(_cut(shard, _whole(shard))))
        return digest.digest()

    def _gathered(self, tensor: Any, wanted: Box) -> np.ndarray:
        held = _held(tensor)
        pieces = plan_reshard({device: box for device, (box, _) in held.items()}, {_READER: wanted})
        if len(pieces) == 1:
            return _cut(held[pieces[0].source][1], pieces[0].source_slice)
        values = aligned_empty([stop - start for start, stop in wanted], tensor.dtype)
        for piece in pieces:
            _, shard = held[piece.source]
            values[_slices(piece.destination_slice)] = _cut(shard, piece.source_slice)
        return values


class _Buffers:
    """Memory of unused blocks is reused, because the first writes to new memory take longer than
    all further copies of a block."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> np.ndarray:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or len(memory) < nbytes:
            memory = mmap.mmap(-1, max(nbytes, 1))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return whole[:nbytes]


def unreadable(dtypes: Mapping[str, str]) -> list[str]:
    return [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _FLOATS]


def whole_box(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """The index may be shorter than the shape. Its steps are ignored (see `stepped`)."""
    return box_of((*index, *(slice(None),) * (len(shape) - len(index))), shape)


def stepped(values: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    if all(part.step in (None, 1) for part in index):
        return values
    return values[tuple(slice(None, None, part.step) for part in index)]


def _held(tensor: Any) -> dict[int, tuple[Box, Any]]:
    if not isinstance(tensor, jax.Array):
        return {0: (whole_box((), tensor.shape), tensor)}
    return {
        shard.device.id: (box_of(shard.index, tensor.shape), shard.data)
        for shard in tensor.addressable_shards
    }


def _on_host(shard: Any) -> bool:
    return not isinstance(shard, jax.Array) or next(iter(shard.devices())).platform == "cpu"


def _cut(shard: Any, box: Box) -> np.ndarray:
    if _on_host(shard):
        view = np.asarray(shard)[(*_slices(box), ...)]
        view.flags.writeable = False
        return view
    sizes = tuple(stop - start for start, stop in box)
    # A program returns a new array, because JAX would keep the host copy of the old array as long
    # as that array exists.
    return np.asarray(_part_of(shard, tuple(start for start, _ in box), sizes))


@functools.partial(jax.jit, static_argnames="sizes")
def _part_of(shard: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)


@functools.partial(jax.jit, static_argnames="sizes")
def _bytes_of(shard: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    part = jax.lax.dynamic_slice(shard, starts, sizes)
    return jax.lax.bitcast_convert_type(part, np.uint8).reshape(1, 1, 1, 1, -1)


def _whole(shard: Any) -> Box:
    return whole_box((), shard.shape)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
