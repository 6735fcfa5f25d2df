"""Weights that a trainer offers to a cluster in the same process, as named arrays.

    with jdisagg.weights.offer(tensors) as offered:
        await cluster.weights.update(offered.name, version="step-100")

`tensors` has the names and shapes of the served checkpoint, with arrays in any sharding on any
devices of this process. Workers read what their shards need: each read is planned by
`layout.reshard_plan` over the boxes that the arrays' devices hold, so that a byte is copied once
for each distinct shard that needs it. Conversion and quantization are those of a checkpoint."""

import hashlib
import itertools
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.reshard_plan import Box, box_of, plan_reshard

PREFIX = "offer:"
LEASE_SECONDS = 600.0
_READER = -1  # place of the reader in a plan; devices have numbers from 0
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_numbers = itertools.count(1)
_offers: "dict[str, OfferedWeights]" = {}
_lock = threading.Lock()


class OfferedWeights:
    """Named arrays that workers of this process may read until `close`, or until the lease ends.
    The arrays must not be donated or changed before. Has the methods of a checkpoint's tensors.

    Attributes:
        name: Name that an update gives in place of a folder.
        bytes_read: Bytes that workers have read.
    """

    def __init__(self, tensors: Mapping[str, Any], lease_seconds: float) -> None:
        self.name = f"{PREFIX}{next(_numbers)}"
        self.bytes_read = 0
        self._tensors = dict(tensors)
        self._until = time.monotonic() + lease_seconds

    def close(self) -> None:
        """Ends the offer. Idempotent."""
        with _lock:
            _offers.pop(self.name, None)
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
        self._check()
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return {
            _FLOATS.get(str(tensor.dtype), str(tensor.dtype))
            for name, tensor in self._tensors.items()
            if not name.endswith(but)
        }

    def unreadable(self) -> list[str]:
        return [
            f"{name} ({tensor.dtype})"
            for name, tensor in self._tensors.items()
            if str(tensor.dtype) not in _FLOATS
        ]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a copy of a slice of a tensor, from the devices that hold its parts."""
        values = self._slice(name, index)
        with _lock:
            self.bytes_read += values.nbytes
        return values

    def content(self) -> str:
        """Returns a hash of all tensors, which does not depend on their shardings."""
        self._check()
        digest = hashlib.sha256()
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(self._slice(name, (slice(None),) * tensor.ndim).tobytes())
        return digest.hexdigest()[:32]

    def _slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        self._check()
        tensor = self._tensors[name]
        whole = (*index, *(slice(None),) * (tensor.ndim - len(index)))
        wanted = box_of(whole, tensor.shape)
        held = _held(tensor)
        source = {device: box for device, (box, _) in held.items()}
        values = np.empty([stop - start for start, stop in wanted], tensor.dtype)
        for piece in plan_reshard(source, {_READER: wanted}).pieces:
            _, part = held[piece.source]
            values[_slices(piece.destination_slice)] = part[_slices(piece.source_slice)]
        return values

    def _check(self) -> None:
        if not self._tensors or time.monotonic() > self._until:
            raise InvalidRequestError(
                f"weights {self.name!r}: the offer is closed, or its lease has ended; offer the"
                " arrays again"
            )


def offer(tree: Mapping[str, Any], lease_seconds: float = LEASE_SECONDS) -> OfferedWeights:
    """Offers arrays to the workers of this process.

    Args:
        tree: Arrays of JAX or numpy by the names of the checkpoint's tensors. Nested mappings are
            joined with dots.
        lease_seconds: Seconds after which workers may not read any more.

    Raises:
        InvalidRequestError: There are no arrays, or devices of other processes hold a part.
    """
    tensors = dict(_flat(tree))
    if not tensors:
        raise InvalidRequestError("weights: an offer needs arrays by name, and got none")
    for name, tensor in tensors.items():
        if isinstance(tensor, jax.Array) and not tensor.is_fully_addressable:
            raise InvalidRequestError(
                f"weights: devices of other processes hold parts of {name!r}; write a checkpoint"
                " and update from its folder"
            )
    made = OfferedWeights(tensors, lease_seconds)
    with _lock:
        _offers[made.name] = made
    return made


def offered(name: str) -> OfferedWeights | None:
    """Returns the offer of this process that an update names, or None for a folder. Raises
    InvalidRequestError for an unknown offer."""
    if not name.startswith(PREFIX):
        return None
    with _lock:
        found = _offers.get(name)
    if found is None:
        raise InvalidRequestError(
            f"weights {name!r}: this process has no such offer; only a cluster in the process of"
            " the trainer takes offers, others a checkpoint folder"
        )
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found += _flat(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return found


def _held(tensor: Any) -> dict[int, tuple[Box, np.ndarray]]:
    """Returns the box that each device holds, and a view of its values."""
    if not isinstance(tensor, jax.Array):
        return {0: (box_of((slice(None),) * tensor.ndim, tensor.shape), tensor)}
    return {
        shard.device.id: (box_of(shard.index, tensor.shape), np.asarray(shard.data))
        for shard in tensor.addressable_shards
        if not shard.replica_id
    }


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
