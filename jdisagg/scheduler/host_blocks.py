"""The blocks of KV that a mesh keeps in host memory: which, how many, which goes when there is no
room, and whether one is worth bringing back.

A block is written once, under a name that says all that lies in it and before it
(`scheduler/residency.py`), in pieces that never change; it has the sum of each from the moment when
the piece was read from its pages. Above the high watermark (all of the capacity) the least recently
used go, until the low one is reached: so room is made for many at a time. Blocks on their way in or
back are not given up for others.

Pure. Invariants (each is a test of the same name in tests/scheduler/test_host_blocks.py):
- kept_written_and_free_blocks_are_all
- a_block_on_its_way_back_is_not_given_up
- a_block_is_there_once
- what_was_cleared_does_not_come_back"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jdisagg.messages.ports import Offer
from jdisagg.plain import plain
from jdisagg.scheduler.residency import Chain

LOW_WATERMARK = 0.9
MOST_WRITING = 32  # blocks on their way out


@plain
class TierRoom:
    """Bytes of host memory and of disk behind the pages of a mesh; on disk lies only what went
    through host memory, and for `disk_ttl_seconds` (0: while there is room). `always`: what lies
    there comes back whatever that costs."""

    host_bytes: int = 0
    disk_bytes: int = 0
    always: bool = False
    disk_ttl_seconds: float = 0.0


@plain
class HostPiece:
    """A piece of a block, as it was offered on the rank that it came from. `checksum`: of what was
    read from the pages."""

    offer: Offer
    checksum: int = 0


@dataclass(slots=True, eq=False)
class HostBlock:
    """`written`: its pieces have arrived, with their sums. `held`: it is on its way back."""

    name: bytes
    pieces: tuple[HostPiece, ...]
    written: bool = False
    held: bool = False

    @property
    def offer_ids(self) -> tuple[int, ...]:
        return tuple([piece.offer.offer_id for piece in self.pieces])


class HostBlocks:
    """At most `capacity` blocks; 0: none is kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Those on their way in among them."""
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def listed(self, block_tokens: int) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields rank, name, index in the chain and whether it is in use of each block, least
        recently used first."""
        for block in self._blocks.values():
            offer, in_use = block.pieces[0].offer, block.held or not block.written
            yield offer.rank, block.name, offer.start // block_tokens, in_use

    @property
    def free(self) -> int:
        return self.capacity - len(self._blocks)

    @property
    def writing(self) -> int:
        return sum([not block.written for block in self._blocks.values()])

    def begin(
        self, name: bytes, pieces: tuple[HostPiece, ...]
    ) -> tuple[HostBlock | None, tuple[HostBlock, ...]]:
        """A new block, whose pieces are on their way, and those that had to go for it. None: it is
        here already, or there is no room and nothing may go."""
        if name in self._blocks:
            self._blocks.move_to_end(name)
            return None, ()
        gone = self._make_room() if self.free < 1 else ()
        if self.free < 1:
            return None, gone
        block = self._blocks[name] = HostBlock(name, pieces)
        return block, gone

    def written(self, block: HostBlock, pieces: tuple[HostPiece, ...]) -> bool:
        """All pieces have arrived. False: it was given up meanwhile."""
        if self._blocks.get(block.name) is not block:
            return False
        block.pieces, block.written = pieces, True
        return True

    def arrived(self, name: bytes) -> HostBlock | None:
        """The block of this name, if it lies here whole."""
        block = self._blocks.get(name)
        return block if block is not None and block.written else None

    def match(self, chain: Chain, first: int) -> int:
        """How many blocks of the chain can be brought back, from its `first` on."""
        for count, name in enumerate(chain[first:]):
            block = self._blocks.get(name)
            if block is None or not block.written or block.held:
                return count
        return max(0, len(chain) - first)

    def hold(self, names: Chain) -> tuple[HostBlock, ...]:
        """Blocks that `match` found, on their way back from now on."""
        blocks = tuple([self._blocks[name] for name in names])
        for block in blocks:
            block.held = True
        return blocks

    def let_go(self, blocks: Iterable[HostBlock]) -> None:
        """Back or not, they may go; the beginning of a chain after its end."""
        for block in reversed(tuple(blocks)):
            block.held = False
            if self._blocks.get(block.name) is block:
                self._blocks.move_to_end(block.name)

    def forget(self, block: HostBlock) -> bool:
        """It is not what it should be. Whether it was here still."""
        if self._blocks.get(block.name) is not block:
            return False
        del self._blocks[block.name]
        return True

    def clear(self) -> tuple[HostBlock, ...]:
        """All of them are gone."""
        gone = tuple(self._blocks.values())
        self._blocks.clear()
        return gone

    def _make_room(self) -> tuple[HostBlock, ...]:
        low = min(self.capacity - 1, int(self.capacity * LOW_WATERMARK))
        gone: list[HostBlock] = []
        for block in list(self._blocks.values()):
            if len(self._blocks) <= low:
                break
            if block.written and not block.held:
                del self._blocks[block.name]
                gone.append(block)
        return tuple(gone)
