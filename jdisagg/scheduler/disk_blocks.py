"""The blocks of KV that a mesh keeps on disk: which, how many, which goes when there is no room.

A block is written at its second use, by then in host memory or in pages. Of the blocks of a
conversation trace three quarters are used once: to write those too, now or when they are pushed
out, would be mostly waste; and what waited for being pushed out would be lost with the process.
Few are on their way at a time; what is wanted meanwhile waits in a bounded queue. After a write
that failed only one block in `PROBE` is tried, until one is written.

Above capacity the least recently used goes. A block that is being read stays. What was written too
long ago goes whether or not there is room, also while it is read. Pure. Invariants
(each is a test of the same name in tests/scheduler/test_disk_blocks.py):
- no_more_lie_there_than_there_is_room_for
- a_block_that_is_read_is_not_given_up
- a_block_is_written_once
- what_was_cleared_is_not_known_again
- what_was_written_too_long_ago_is_not_known_any_more"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jdisagg.plain import plain
from jdisagg.scheduler.host_blocks import HostBlocks
from jdisagg.scheduler.prices import PROBE
from jdisagg.scheduler.residency import Chain

MOST_SAVING = 8
MOST_WANTED = 1 << 12
FILE_EXTRA_BYTES = 4096  # of a file, beside the block: its header, and what a file system adds


@dataclass(slots=True, eq=False)
class DiskBlock:
    """The `index`-th of its chain. `rank`: which is known to have had it in pages. `written`: it
    lies there whole, since `written_at`. `readers`: of it now."""

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
    """At most `capacity` blocks; 0: none is kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, DiskBlock] = OrderedDict()  # least recently used first
        self._by_age: OrderedDict[bytes, DiskBlock] = OrderedDict()  # written longest ago first
        self._wanted: OrderedDict[bytes, WantedBlock] = OrderedDict()
        self._writing = 0
        self._failing = False
        self._passed_over = 0

    def __len__(self) -> int:
        """Those on their way among them."""
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields rank, name, index in the chain and whether it is in use of each block, least
        recently used first."""
        for block in self._blocks.values():
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
        """When the blocks were written that lay there at the start, used longest ago first. Gives
        those that stay, and those that there is no room for: the oldest."""
        new = [name for name in written_at if name not in self._blocks]
        over = max(0, len(self._blocks) + len(new) - self.capacity)
        for name in reversed(new[over:]):
            self._blocks[name] = DiskBlock(name, written=True, written_at=written_at[name])
            self._blocks.move_to_end(name, last=False)
        for name in sorted(new[over:], key=written_at.__getitem__, reverse=True):
            # before all that was written since
            self._by_age[name] = self._blocks[name]
            self._by_age.move_to_end(name, last=False)
        return tuple(new[over:]), tuple(new[:over])

    def use(self, rank: int, chain: Chain) -> int:
        """A prompt begins with these blocks, which were known on a rank: those that are not here
        are wanted. Returns for how many the queue has no room."""
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
        """The next block to write, on its way from now on, and those that had to go for it. None:
        nothing is to be written now."""
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
            self._writing += 1
            return block, tuple(gone)
        return None, tuple(gone)

    def written(self, block: DiskBlock, now: float) -> bool:
        """It lies there from `now` on. False: it was given up meanwhile."""
        if not self.knows(block):
            return False
        self._writing -= 1
        self._failing, block.written, block.written_at = False, True, now
        self._by_age[block.name] = block
        return True

    def expire(self, before: float) -> tuple[bytes, ...]:
        """Those that were written before an instant are known no longer."""
        gone: list[bytes] = []
        for name, block in self._by_age.items():
            if block.written_at >= before:
                break
            gone.append(name)
        for name in gone:
            self._forget(name)
        return tuple(gone)

    def not_written(self, block: DiskBlock, failed: bool) -> bool:
        """It does not: the disk `failed`, or there was nothing to write."""
        if not self.knows(block):
            return False
        self._failing = self._failing or failed
        del self._blocks[block.name]
        self._writing -= 1
        return True

    def knows(self, block: DiskBlock) -> bool:
        return self._blocks.get(block.name) is block

    def readable(self, name: bytes) -> bool:
        block = self._blocks.get(name)
        return block is not None and block.written

    def hold(self, name: bytes) -> DiskBlock:
        """A readable block is being read from now on."""
        block = self._blocks[name]
        block.readers += 1
        return block

    def let_go(self, blocks: Iterable[DiskBlock]) -> None:
        """They were read; the beginning of a chain after its end."""
        for block in reversed(tuple(blocks)):
            block.readers -= 1
            if self.knows(block):
                self._blocks.move_to_end(block.name)

    def forget(self, block: DiskBlock) -> bool:
        """It is not what it should be, or not there. Whether it was known still."""
        if not self.knows(block):
            return False
        self._forget(block.name)
        return True

    def _forget(self, name: bytes) -> None:
        del self._blocks[name]
        self._by_age.pop(name, None)

    def clear(self) -> tuple[DiskBlock, ...]:
        """All of them are gone."""
        gone = tuple(self._blocks.values())
        self._blocks.clear()
        self._by_age.clear()
        self._wanted.clear()
        self._writing = 0
        return gone

    def _touch(self, chain: Chain) -> None:
        for name in reversed(chain):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def _make_room(self, gone: list[bytes]) -> bool:
        for name, block in self._blocks.items():
            if block.written and not block.readers:
                self._forget(name)
                gone.append(name)
                return True
        return False


def restorable(chain: Chain, host: HostBlocks, disk: DiskBlocks) -> tuple[bool, ...]:
    """Returns, for each leading block of a chain that can be restored, whether it must be read from
    disk because host memory lacks it."""
    found: list[bool] = []
    for name in chain:
        in_host = name in host
        if not (host.match((name,), 0) if in_host else disk.readable(name)):
            break
        found.append(not in_host)
    return tuple(found)
