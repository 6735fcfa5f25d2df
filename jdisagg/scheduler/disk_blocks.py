"""Tracks the KV blocks that a mesh holds on disk, and decides which blocks are written and evicted.

A block in host memory or pages is written to disk when it is used a second time.

If there are more blocks than `capacity`, one is evicted by its last use and its retention
(`scheduler/retention.py`), unless it is being read. Blocks older than their lifetime
are dropped even while they are read.

Invariants (each is a test of the same name in tests/scheduler/test_disk_blocks.py):
- no_more_lie_there_than_there_is_room_for
- a_block_that_is_read_is_not_given_up
- a_block_is_written_once
- what_was_cleared_is_not_known_again
- what_was_written_too_long_ago_is_not_known_any_more
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jdisagg.plain import plain
from jdisagg.scheduler.host_blocks import HostBlocks
from jdisagg.scheduler.prices import PROBE
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.retention import EvictionOrder, Retained

MOST_SAVING = 8
MOST_WANTED = 1 << 12
FILE_EXTRA_BYTES = 4096  # bytes of a file besides the block: header and file-system overhead


@dataclass(slots=True, eq=False)
class DiskBlock:
    """A block that is on disk or being written.

    Attributes:
        written: Whether the file is complete. `written_at` is the time at which it was completed.
    """

    name: bytes
    index: int = 0
    rank: int = 0
    written: bool = False
    written_at: float = 0.0
    readers: int = 0


@plain
class WantedBlock:
    rank: int
    index: int


class DiskBlocks:
    """The KV blocks of one mesh on disk, at most `capacity` blocks.

    Args:
        retained: Retention of the mesh's blocks; None if none is retained.
    """

    def __init__(self, capacity: int, retained: Retained | None = None) -> None:
        self.capacity = capacity
        self._blocks: dict[bytes, DiskBlock] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(retained, bytes, capacity // 2)
        self._by_age: OrderedDict[bytes, DiskBlock] = OrderedDict()  # oldest first
        self._wanted: OrderedDict[bytes, WantedBlock] = OrderedDict()
        self._writing = 0
        self._failing = False
        self._passed_over = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields (rank, name, index in sequence, in use) of blocks, in the order of
        eviction."""
        for block in map(self._blocks.__getitem__, self._order):
            in_use = block.readers > 0 or not block.written
            yield block.rank, block.name, block.index, in_use

    @property
    def writing(self) -> int:
        return self._writing

    @property
    def wanted(self) -> int:
        return len(self._wanted)

    def found(
        self, written_at: Mapping[bytes, float]
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Adds the blocks that earlier runs of the worker left on disk. Returns the names of the
        blocks that fit into `capacity`, and the names of the others, which the caller should
        delete."""
        new = [name for name in written_at if name not in self._blocks]
        over = max(0, len(self._blocks) + len(new) - self.capacity)
        for name in reversed(new[over:]):
            self._blocks[name] = DiskBlock(name, written=True, written_at=written_at[name])
            self._order.add_first(name)
        for name in sorted(new[over:], key=written_at.__getitem__, reverse=True):
            # blocks found at the start are older than all blocks written since
            self._by_age[name] = self._blocks[name]
            self._by_age.move_to_end(name, last=False)
        return tuple(new[over:]), tuple(new[:over])

    def use(self, rank: int, chain: Chain) -> int:
        """Records that a prompt used these blocks of a rank. Queues those that are not on disk for
        writing. Returns the number of blocks that are not written because the queue was full."""
        skipped = 0
        for index, name in enumerate(chain):
            if name in self._blocks or name in self._wanted:
                continue
            if len(self._wanted) >= MOST_WANTED:
                skipped += 1
                continue
            self._wanted[name] = WantedBlock(rank, index)
        self._touch(chain)
        return skipped

    def take(self) -> tuple[DiskBlock | None, tuple[bytes, ...]]:
        """Removes the next block to write from the queue.

        Returns:
            The block, or None if no block can be written now, and the names of the blocks that were
                evicted to make room for it.
        """
        gone: list[bytes] = []
        while self._wanted and self._writing < min(MOST_SAVING, self.capacity):
            name, wanted = self._wanted.popitem(last=False)
            if name in self._blocks:
                continue
            if self._failing:
                self._passed_over += 1
                if self._passed_over % PROBE:
                    continue
            if len(self._blocks) >= self.capacity and not self._make_room(gone):
                continue
            block = self._blocks[name] = DiskBlock(name, wanted.index, wanted.rank)
            self._order.add(name)
            self._writing += 1
            return block, tuple(gone)
        return None, tuple(gone)

    def written(self, block: DiskBlock, now: float) -> bool:
        """Returns False if the block was dropped during the write."""
        if not self.knows(block):
            return False
        self._writing -= 1
        self._failing, block.written, block.written_at = False, True, now
        self._by_age[block.name] = block
        return True

    def expire(self, before: float) -> tuple[bytes, ...]:
        gone: list[bytes] = []
        for name, block in self._by_age.items():
            if block.written_at >= before:
                break
            gone.append(name)
        for name in gone:
            self._forget(name)
        return tuple(gone)

    def not_written(self, block: DiskBlock, failed: bool) -> bool:
        """`failed` means that the disk failed. Returns False if the block was dropped during the
        write."""
        if not self.knows(block):
            return False
        self._failing = self._failing or failed
        self._forget(block.name)
        self._writing -= 1
        return True

    def knows(self, block: DiskBlock) -> bool:
        return self._blocks.get(block.name) is block

    def readable(self, name: bytes) -> bool:
        block = self._blocks.get(name)
        return block is not None and block.written

    def hold(self, name: bytes) -> DiskBlock:
        block = self._blocks[name]
        block.readers += 1
        return block

    def let_go(self, blocks: Iterable[DiskBlock]) -> None:
        for block in reversed(tuple(blocks)):
            block.readers -= 1
            if self.knows(block):
                self._order.add(block.name)

    def forget(self, block: DiskBlock) -> bool:
        if not self.knows(block):
            return False
        self._forget(block.name)
        return True

    def _forget(self, name: bytes) -> None:
        del self._blocks[name]
        self._order.discard(name)
        self._by_age.pop(name, None)

    def clear(self) -> tuple[DiskBlock, ...]:
        gone = tuple(map(self._blocks.__getitem__, self._order))
        self._blocks.clear()
        self._order.clear()
        self._by_age.clear()
        self._wanted.clear()
        self._writing = 0
        return gone

    def _touch(self, chain: Chain) -> None:
        for name in reversed(chain):
            if name in self._blocks:
                self._order.add(name)

    def _make_room(self, gone: list[bytes]) -> bool:
        for name in self._order:
            block = self._blocks[name]
            if block.written and not block.readers:
                self._forget(name)
                gone.append(name)
                return True
        return False


def restorable(chain: Chain, host: HostBlocks, disk: DiskBlocks) -> tuple[bool, ...]:
    """Finds out which leading blocks of a prompt can be restored. Returns one entry for each block
    up to the first one that cannot. An entry is True if the block must be read from disk, and False
    if it is in host memory."""
    found: list[bool] = []
    for name in chain:
        in_host = name in host
        if not (host.match((name,), 0) if in_host else disk.readable(name)):
            break
        found.append(not in_host)
    return tuple(found)
