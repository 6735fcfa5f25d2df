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

import itertools
from collections import OrderedDict
from collections.abc import Mapping

from jdisagg.scheduler.host_blocks import HostBlocks, HostPiece, TierBlock, TierBlocks
from jdisagg.scheduler.prices import PROBE
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.retention import Retained

MOST_SAVING = 8
MOST_WANTED = 1 << 12
FILE_EXTRA_BYTES = 4096  # bytes of a file besides the block: header and file-system overhead


class DiskBlocks(TierBlocks):
    """What is on disk, and what is to be written there."""

    def __init__(
        self, capacity: int, retained: Retained | None = None, block_bytes: int = 0
    ) -> None:
        super().__init__(capacity, capacity - 1, retained, block_bytes)
        self._by_age: OrderedDict[bytes, TierBlock] = OrderedDict()  # oldest first
        self._wanted: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # rank and index
        self._failing = False
        self._passed_over = 0

    @property
    def wanted(self) -> int:
        return len(self._wanted)

    def found(
        self, written_at: Mapping[bytes, float]
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Adds the blocks that earlier runs of the worker left on disk. Returns the names of the
        blocks that fit into `capacity`, and the names of the others, which the caller should
        delete."""
        new = [name for name in written_at if name not in self]
        over = max(0, len(new) - self.free)
        for name in reversed(new[over:]):
            self._blocks[name] = TierBlock(name, written=True, written_at=written_at[name])
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
            if name in self or name in self._wanted:
                continue
            if len(self._wanted) >= MOST_WANTED:
                skipped += 1
                continue
            self._wanted[name] = rank, index
        for name in reversed(chain):
            if name in self:
                self._order.add(name)
        return skipped

    def take(self) -> tuple[TierBlock | None, tuple[TierBlock, ...]]:
        """Removes the next block to write from the queue.

        Returns:
            The block, or None if no block can be written now, and the blocks that were evicted to
                make room for it.
        """
        while self._wanted and self.writing < min(MOST_SAVING, self.capacity):
            name, (rank, index) = self._wanted.popitem(last=False)
            if name in self:
                continue
            if self._failing:
                self._passed_over += 1
                if self._passed_over % PROBE:
                    continue
            block, gone = self.begin(name, (), rank, index)
            if block is not None:
                return block, gone
        return None, ()

    def written(
        self, block: TierBlock, pieces: tuple[HostPiece, ...] = (), now: float = 0.0
    ) -> bool:
        if not super().written(block, pieces, now):
            return False
        self._failing = False
        self._by_age[block.name] = block
        return True

    def expire(self, before: float) -> tuple[TierBlock, ...]:
        gone = itertools.takewhile(lambda one: one.written_at < before, self._by_age.values())
        return tuple(filter(self.forget, tuple(gone)))

    def not_written(self, block: TierBlock, failed: bool) -> bool:
        """`failed` means that the disk failed. Returns False if the block was dropped during the
        write."""
        known = self.forget(block)
        self._failing = self._failing or (known and failed)
        return known

    def clear(self) -> tuple[TierBlock, ...]:
        self._by_age.clear()
        self._wanted.clear()
        return super().clear()

    def _remove(self, block: TierBlock) -> None:
        super()._remove(block)
        self._by_age.pop(block.name, None)


def restorable(chain: Chain, host: HostBlocks, disk: DiskBlocks) -> tuple[bool, ...]:
    """Finds out which leading blocks of a prompt can be restored. Returns one entry for each block
    up to the first one that cannot. An entry is True if the block must be read from disk, and False
    if it is in host memory."""
    found: list[bool] = []
    for name in chain:
        in_host = name in host
        if not (host.match((name,), 0) if in_host else disk.arrived(name)):
            break
        found.append(not in_host)
    return tuple(found)
