"""Stores blocks of KV in host memory. Each block is one dp rank's shards and is immutable.

On an accelerator, blocks are stored in pinned host memory if JAX's backend supports it, so that
copies use DMA. A shard that several devices replicate is stored once and restored to each device.
The insert program (executor/insert_program.py) checks restored data by checksums.

`put`, `pull` and `forget` are called on the dispatch thread and do not block."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.errors import HandoffError
from jdisagg.layout.reshard_plan import Box
from jdisagg.transfer.channel import Pull, PullTarget, rank_placement

PINNED = "pinned_host"

HostArray = np.ndarray | jax.Array
Shards = dict[Box, HostArray]  # each by its part of the rank's block


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A future of a copy from devices to host memory."""

    done: "Future[None]"

    def is_ready(self) -> bool:
        return self.done.done()


class HostStore:
    def __init__(self, name: str) -> None:
        self._clock = MonotonicClock()
        self._name = name
        self._thread: ThreadPoolExecutor | None = None  # made at first use
        self._lock = threading.Lock()  # never held while copying
        self._blocks: dict[int, Shards | None] = {}  # None while a block is being copied

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def bytes(self) -> int:
        """Number of bytes of the blocks whose copies are complete."""
        with self._lock:
            shards = [shards for shards in self._blocks.values() if shards]
        return sum([array.nbytes for arrays in shards for array in arrays.values()])

    def put(self, offer_id: int, block: jax.Array, rank: int) -> HostCopy:
        """The block may not be computed yet."""
        boxes = rank_placement(block.sharding, block.shape, rank)
        shards = {
            boxes[shard.device.id]: shard.data
            for shard in block.addressable_shards
            if shard.device.id in boxes
        }
        with self._lock:
            self._blocks[offer_id] = None

        def copy() -> None:
            copied = {box: _to_host(shard) for box, shard in shards.items()}
            with self._lock:
                if offer_id in self._blocks:  # otherwise it was forgotten meanwhile
                    self._blocks[offer_id] = copied

        return HostCopy(self._submit(copy))

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        """Starts to copy a stored block back to the mesh, as one array of all heads (see
        `Channel.pull`). The returned pull fails with HandoffError if the block is not stored."""
        pull = Pull(offer_id, self._clock, deadline_seconds)

        def copy() -> None:
            # Looked up on the store's thread, which first completes an earlier copy of the block.
            # Other processes of the instance may be ahead of this one.
            shards = self.shards(offer_id)
            if shards is None:
                pull.fail(HandoffError(f"block {offer_id:#x} is not in host memory"))
                return
            try:
                array = _to_mesh(shards, target)
                pull.deliver((array,), sum([one.nbytes for one in shards.values()]))
            except Exception as error:
                pull.fail(HandoffError(f"block {offer_id:#x} could not be copied: {error}"))

        self._submit(copy)
        return pull

    def expect(self, offer_id: int) -> None:
        """Registers a block that `deliver` will add later, such as a block that is being read from
        disk."""
        with self._lock:
            self._blocks[offer_id] = None

    def deliver(self, offer_id: int, shards: Shards) -> None:
        """Stores a block that `expect` has registered. Does nothing if `forget` was called in
        between. Thread-safe."""
        with self._lock:
            if offer_id in self._blocks:
                self._blocks[offer_id] = shards

    def shards(self, offer_id: int) -> Shards | None:
        with self._lock:
            return self._blocks.get(offer_id)

    def forget(self, offer_id: int) -> None:
        """Drops a block. Copies of the block in progress continue. Idempotent."""
        with self._lock:
            self._blocks.pop(offer_id, None)

    def close(self) -> None:
        """Drops all blocks and waits until the store's thread has ended. Idempotent."""
        with self._lock:
            self._blocks.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _submit(self, work: Callable[[], None]) -> "Future[None]":
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"{self._name}-host")
        return self._thread.submit(work)


def _to_host(shard: jax.Array) -> HostArray:
    (device,) = shard.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or PINNED not in kinds:
        with jax.transfer_guard_device_to_host("allow"):
            return np.array(shard)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    return jax.block_until_ready(jax.device_put(shard, pinned))


def _to_mesh(shards: Shards, target: PullTarget) -> jax.Array:
    zeros = target.zeros
    boxes = rank_placement(zeros.sharding, zeros.shape, target.rank)
    arrays: list[jax.Array] = []
    for shard in zeros.addressable_shards:
        box = boxes.get(shard.device.id)
        if box is None:
            arrays.append(shard.data)
            continue
        with jax.transfer_guard_host_to_device("allow"):
            arrays.append(jax.device_put(shards[box], shard.device))
    return jax.make_array_from_single_device_arrays(zeros.shape, zeros.sharding, arrays)
