"""Tracks the KV blocks that a mesh holds in host memory, and decides which blocks are evicted.

When the memory is full, blocks are evicted until a low watermark is reached, in the order of their
last use and retention (`scheduler/retention.py`). Blocks that are being copied are not evicted.

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
class HostBlock:
    """A block that is in host memory or being copied there.

    Attributes:
        held: Whether the block is being copied back to pages.
        tail: Whether it is a tail (`scheduler/tails.py`), of which routers do not know.
    """

    name: bytes
    pieces: tuple[HostPiece, ...]
    written: bool = False
    held: bool = False
    tail: bool = False

    @property
    def offer_ids(self) -> tuple[int, ...]:
        return tuple([piece.offer.offer_id for piece in self.pieces])


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


class HostBlocks:
    """The KV blocks of one mesh in host memory, at most `capacity` blocks.

    Args:
        bound: Whether a block can be restored only to the rank whose pages it was in.
        retained: Retention of the mesh's blocks; None if none is retained.
    """

    def __init__(
        self, capacity: int, bound: bool = False, retained: Retained | None = None
    ) -> None:
        self.capacity = capacity
        self._bound = bound
        self._blocks: dict[bytes, HostBlock] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(retained, bytes, capacity // 2)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def listed(self, block_tokens: int) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields (rank, name, index in sequence, in use) of blocks, in the order of eviction."""
        for name in self._order:
            block = self._blocks[name]
            offer, in_use = block.pieces[0].offer, block.held or not block.written
            yield offer.rank, block.name, offer.start // block_tokens, in_use

    @property
    def free(self) -> int:
        return self.capacity - len(self._blocks)

    @property
    def writing(self) -> int:
        return sum([not block.written for block in self._blocks.values()])

    @property
    def room(self) -> int:
        """Number of blocks that can be added, for which others that are not in use are evicted."""
        in_use = sum([block.held or not block.written for block in self._blocks.values()])
        return self.capacity - in_use

    def begin(
        self, name: bytes, pieces: tuple[HostPiece, ...], tail: bool = False
    ) -> tuple[HostBlock | None, tuple[HostBlock, ...]]:
        """Adds a block whose pieces are being copied to host memory.

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
        block = self._blocks[name] = HostBlock(name, pieces, tail=tail)
        self._order.add(name)
        return block, gone

    def written(self, block: HostBlock, pieces: tuple[HostPiece, ...]) -> bool:
        """Returns False if the block was dropped during the copy."""
        if self._blocks.get(block.name) is not block:
            return False
        block.pieces, block.written = pieces, True
        return True

    def arrived(self, name: bytes) -> HostBlock | None:
        block = self._blocks.get(name)
        return block if block is not None and block.written else None

    def match(self, chain: Chain, first: int, rank: int = 0) -> int:
        for count, name in enumerate(chain[first:]):
            block = self._blocks.get(name)
            if block is None or not block.written or block.held:
                return count
            if self._bound and block.pieces[0].offer.rank != rank:
                return count
        return max(0, len(chain) - first)

    def hold(self, names: Chain) -> tuple[HostBlock, ...]:
        blocks = tuple([self._blocks[name] for name in names])
        for block in blocks:
            block.held = True
        return blocks

    def let_go(self, blocks: Iterable[HostBlock]) -> None:
        for block in reversed(tuple(blocks)):
            block.held = False
            if self._blocks.get(block.name) is block:
                self._order.add(block.name)

    def forget(self, block: HostBlock) -> bool:
        """Drops a block whose contents are wrong. Returns False if the block was dropped before."""
        if self._blocks.get(block.name) is not block:
            return False
        self._remove(block)
        return True

    def clear(self) -> tuple[HostBlock, ...]:
        gone = tuple(map(self._blocks.__getitem__, self._order))
        self._blocks.clear()
        self._order.clear()
        return gone

    def _remove(self, block: HostBlock) -> None:
        del self._blocks[block.name]
        self._order.discard(block.name)

    def _make_room(self) -> tuple[HostBlock, ...]:
        """Evicts blocks that are not being copied."""
        low = min(self.capacity - 1, int(self.capacity * LOW_WATERMARK))
        gone: list[HostBlock] = []
        for name in tuple(self._order):
            if len(self._blocks) <= low:
                break
            block = self._blocks[name]
            if block.written and not block.held:
                self._remove(block)
                gone.append(block)
        return tuple(gone)
