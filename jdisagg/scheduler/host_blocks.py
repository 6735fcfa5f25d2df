"""Tracks the KV blocks that a mesh holds in a tier, host memory or disk, and decides which blocks
are evicted.

When the tier is full, blocks are evicted until a low watermark is reached, in the order of their
last use and retention (`scheduler/retention.py`). Blocks that are written or read are not evicted.

Does no I/O. Invariants (each is a test of the same name in tests/scheduler/test_host_blocks.py):
- kept_written_and_free_blocks_are_all
- a_block_on_its_way_back_is_not_given_up
- a_block_is_there_once
- what_was_cleared_does_not_come_back
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jdisagg.messages.ports import Offer
from jdisagg.plain import plain
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.retention import EvictionOrder, Retained

LOW_WATERMARK = 0.9
# Blocks that are evicted from pages are copied to host memory if prompts later request at least
# this share of them. A copy takes 3 to 20 % of the time that a restored block saves.
LEAST_ASKED = 0.1
ASKED_WINDOW = 128  # number of evictions over which the share is averaged
# Largest numbers of blocks that are copied to host memory at the same time. The number is smaller
# on a mesh that decodes, because the copies run between its steps, unless they are blocks of a
# preempted sequence.
MOST_WRITING, MOST_WRITING_OF_DECODE = 32, 8


@plain
class TierRoom:
    """Capacity of a mesh's host-memory and disk tiers.

    Attributes:
        disk_bytes: Bytes of disk. Blocks are written to disk from host memory only.
        rank_bound: Whether KV in host memory can be restored only to the dp rank that computed it,
            because the ranks are in different processes.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    always: bool = False
    disk_ttl_seconds: float = 0.0
    rank_bound: bool = False


@plain
class HostPiece:
    """One piece of a block: its id and positions (`offer`), and the checksum of its KV, taken in
    pages."""

    offer: Offer
    checksum: int = 0


@dataclass(slots=True, eq=False)
class TierBlock:
    """A block or snapshot in one tier, or on its way there.

    Attributes:
        pieces: The parts of it in host memory; empty if it is on disk.
        readers: Number of restores that read it now.
        tail: Whether it is a tail (`scheduler/block_names.py`), of which routers do not know.
    """

    name: bytes
    rank: int = 0
    index: int = 0
    pieces: tuple[HostPiece, ...] = ()
    written: bool = False
    written_at: float = 0.0
    readers: int = 0
    tail: bool = False

    @property
    def offer_ids(self) -> tuple[int, ...]:
        return tuple([piece.offer.offer_id for piece in self.pieces])

    @property
    def in_use(self) -> bool:
        return self.readers > 0 or not self.written


class TierBlocks:
    """The KV blocks, or the snapshots, of one mesh in one tier.

    Args:
        capacity: Largest number of blocks.
        low: Number of blocks down to which blocks are evicted if the tier is full.
        retained: Retention of the mesh's blocks; None if none is retained.
        block_bytes: Size of a block.
    """

    def __init__(
        self, capacity: int, low: int, retained: Retained | None = None, block_bytes: int = 0
    ) -> None:
        self.capacity = capacity
        self.block_bytes = block_bytes
        self.writing = 0
        self._low = min(capacity - 1, low)
        self._blocks: dict[bytes, TierBlock] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(retained, bytes, capacity // 2)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields (rank, name, index in sequence, in use) of blocks, in the order of eviction."""
        for block in map(self._blocks.__getitem__, self._order):
            yield block.rank, block.name, block.index, block.in_use

    @property
    def free(self) -> int:
        return self.capacity - len(self._blocks)

    @property
    def room(self) -> int:
        """Number of blocks that can be added, for which others that are not in use are evicted."""
        return self.capacity - sum([block.in_use for block in self._blocks.values()])

    def begin(
        self,
        name: bytes,
        pieces: tuple[HostPiece, ...] = (),
        rank: int = 0,
        index: int = 0,
        tail: bool = False,
    ) -> tuple[TierBlock | None, tuple[TierBlock, ...]]:
        """Adds a block that is being written.

        Returns:
            The block, or None if it exists already or if there is no room, and the blocks that were
                evicted for it.
        """
        if name in self._blocks:
            self._order.add(name)
            return None, ()
        gone = self._make_room() if self.free < 1 else ()
        if self.free < 1:
            return None, gone
        block = self._blocks[name] = TierBlock(name, rank, index, pieces, tail=tail)
        self._order.add(name)
        self.writing += 1
        return block, gone

    def written(
        self, block: TierBlock, pieces: tuple[HostPiece, ...] = (), now: float = 0.0
    ) -> bool:
        """Returns False if the block was dropped while it was written."""
        if not self.knows(block):
            return False
        self.writing -= not block.written
        block.pieces, block.written, block.written_at = pieces, True, now
        return True

    def knows(self, block: TierBlock) -> bool:
        return self._blocks.get(block.name) is block

    def arrived(self, name: bytes) -> TierBlock | None:
        block = self._blocks.get(name)
        return block if block is not None and block.written else None

    def hold(self, names: Iterable[bytes]) -> tuple[TierBlock, ...]:
        """Keeps blocks from eviction until `let_go`."""
        blocks = tuple(map(self._blocks.__getitem__, names))
        for block in blocks:
            block.readers += 1
        return blocks

    def let_go(self, blocks: Iterable[TierBlock]) -> None:
        for block in reversed(tuple(blocks)):
            block.readers -= 1
            if self.knows(block):
                self._order.add(block.name)

    def forget(self, block: TierBlock) -> bool:
        """Drops a block, even while it is read. Returns False if it was dropped before."""
        if not self.knows(block):
            return False
        self._remove(block)
        return True

    def drop(self, names: Iterable[bytes]) -> tuple[TierBlock, ...]:
        gone = [block for name in names if (block := self._blocks.get(name)) is not None]
        return tuple(filter(self.forget, gone))

    def clear(self) -> tuple[TierBlock, ...]:
        gone = tuple(map(self._blocks.__getitem__, self._order))
        self._blocks.clear()
        self._order.clear()
        self.writing = 0
        return gone

    def _remove(self, block: TierBlock) -> None:
        del self._blocks[block.name]
        self._order.discard(block.name)
        self.writing -= not block.written

    def _make_room(self) -> tuple[TierBlock, ...]:
        gone: list[TierBlock] = []
        for block in map(self._blocks.__getitem__, self._order):
            if len(self._blocks) - len(gone) <= self._low:
                break
            if not block.in_use:
                gone.append(block)
        return tuple(filter(self.forget, gone))


class HostBlocks(TierBlocks):
    """What is in host memory. One restore at a time reads a block.

    Args:
        bound: Whether a block can be restored only to the rank whose pages it was in.
    """

    def __init__(
        self,
        capacity: int,
        bound: bool = False,
        retained: Retained | None = None,
        block_bytes: int = 0,
    ) -> None:
        super().__init__(capacity, int(capacity * LOW_WATERMARK), retained, block_bytes)
        self._bound = bound

    def match(self, chain: Chain, first: int, rank: int = 0) -> int:
        for count, name in enumerate(chain[first:]):
            block = self.arrived(name)
            if block is None or block.in_use or (self._bound and block.rank != rank):
                return count
        return max(0, len(chain) - first)


class AskedAgain:
    """Estimates which share of the blocks (or snapshots) evicted from pages is requested by later
    prompts. Decides by this share whether copies of evicted blocks are worth their time.

    At first all blocks are assumed to be requested again. Copies end after about 300 evicted blocks
    that no prompt requests. They begin again after about 15 requested ones.

    Args:
        always: Whether every copy counts as worth its time.
    """

    def __init__(self, most: int, always: bool = False) -> None:
        self._most, self._always = most, always
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._share = 1.0

    @property
    def worth_copying(self) -> bool:
        return self._always or self._share >= LEAST_ASKED

    def evicted(self, name: bytes) -> None:
        self._share -= self._share / ASKED_WINDOW
        self._evicted[name] = None
        self._evicted.move_to_end(name)
        if len(self._evicted) > self._most:
            self._evicted.popitem(last=False)

    def __contains__(self, name: bytes) -> bool:
        """Returns whether a block was evicted, and no prompt has requested it since."""
        return name in self._evicted

    def asked(self, name: bytes) -> None:
        if name in self._evicted:
            del self._evicted[name]
            self._share = min(1.0, self._share + 1 / ASKED_WINDOW)
