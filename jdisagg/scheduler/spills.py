"""Sequences whose pages were taken and whose KV lies in host memory: who may go there, and who is
the next to come back. Those of suspended requests go there, too, and wait until they are wanted.

A spilled sequence lives on: it has no slot and no pages, and goes on from where it was when it has
both again. It goes to host memory only where that is better than to be computed anew on another
attempt: where there is room, where bringing KV back has been measured to be faster than computing
it, and where its KV is all there is to it. State and rings of pages have run ahead with the steps
in flight, so models that have some compute. Who is there comes back in the order of age, with the
reservations that wait for pages (`scheduler/reservations.py`): nobody overtakes.

Pure. Invariants (each is a test of the same name in tests/scheduler/test_spills.py):
- what_lies_there_never_exceeds_its_room
- the_oldest_comes_back_first
- what_ended_takes_no_room"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import HostPiece
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import Sequence, Stage

# on their way out, and as many on their way back; of each one batch at a time lies beside the pages
SPILLS_AT_ONCE = 2

Batch = tuple[HostPiece, ...]
Ranges = list[list[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class Spill:
    """One sequence. `batches`: of positions [0, tokens), the last ones first, as they go out;
    `chain`: the names of its first blocks, as of `epoch` of what is kept. It waits for pages until
    `until`. `written`: all of it has arrived, with its sums. Until then the `guest` holds the pages
    on `rank` of what is still to go out; 0: there is none."""

    child: Sequence
    rank: int
    batches: list[Batch]
    tokens: int
    bytes: int
    chain: Chain
    epoch: int
    until: float
    written: bool = False
    guest: int = 0

    @property
    def order(self) -> tuple[float, int]:
        """Smaller is older; as of waiting reservations."""
        return (self.child.group.arrival, self.child.group.key)

    @property
    def offer_ids(self) -> tuple[int, ...]:
        return tuple([piece.offer.offer_id for batch in self.batches for piece in batch])


class Spills:
    """Of one mesh. `room_bytes`: of host memory for them; 0: nobody goes there."""

    def __init__(self, limits: MeshLimits, room_bytes: int, prices: Prices) -> None:
        spec = limits.kv_spec
        whole = not (spec.has_state or limits.windows_apart or limits.ring_pages)
        self.room_bytes = room_bytes if whole else 0
        self._prices = prices
        self._token_bytes = limits.sent.bytes_per_token
        self._spills: dict[int, Spill] = {}  # by their child's key

    def __len__(self) -> int:
        return len(self._spills)

    def __iter__(self) -> Iterator[Spill]:
        return iter(tuple(self._spills.values()))

    @property
    def bytes(self) -> int:
        """That they take."""
        return sum([spill.bytes for spill in self._spills.values()])

    def bytes_of(self, batches: list[Batch]) -> int:
        """What these, of all layer groups, take in host memory."""
        offers = [piece.offer for batch in batches for piece in batch]
        tokens = sum([offer.block_tokens for offer in offers if offer.group == 0])
        return tokens * self._token_bytes

    def refusal(self, child: Sequence) -> str:
        """Why a sequence is better computed anew, if it is: "off", "early" (its KV has not all
        come, or has not all come back), "busy" (others are on their way), "price"."""
        if not self.room_bytes:
            return "off"
        if child.stage not in (Stage.READY, Stage.RUNNING):
            return "early"
        if sum([not spill.written for spill in self._spills.values()]) >= SPILLS_AT_ONCE:
            return "busy"
        return "" if self._prices.worth(child.position, child.position) else "price"

    def has_room(self, nbytes: int) -> bool:
        return self.bytes + nbytes <= self.room_bytes

    def add(self, spill: Spill) -> None:
        self._spills[spill.child.key] = spill

    def next(self) -> Spill | None:
        """The oldest of those that wait for pages, whether it is there already or still on its
        way."""
        waiting = [
            one
            for one in self._spills.values()
            if one.child.stage is Stage.SPILLED and one.child.group.suspended_until is None
        ]
        return min(waiting, key=lambda spill: spill.order, default=None)

    def ended(self) -> tuple[Spill, ...]:
        """Those whose sequences have ended, which are here no longer."""
        gone = [one for one in self._spills.values() if one.child.stage is Stage.ENDED]
        for spill in gone:
            del self._spills[spill.child.key]
        return tuple(gone)

    def waiting(self) -> int:
        """How many wait for pages."""
        suspended = [one.child.group.suspended_until is not None for one in self._spills.values()]
        return len(suspended) - sum(suspended)

    def returning(self) -> int:
        """How many are on their way back."""
        return sum([one.child.stage is Stage.RETURNING for one in self._spills.values()])

    def forget(self, spill: Spill) -> None:
        """It is back."""
        del self._spills[spill.child.key]


def batch_ranges(limits: MeshLimits, named_tokens: int, block_tokens: int, tokens: int) -> Ranges:
    """The parts [start, end) that positions [0, tokens) go out as: batch by batch, the last
    positions first, so that whole pages are free behind each. Blocks of `block_tokens` that have a
    name, of which the first `named_tokens` are, are parts by themselves."""
    unit = block_tokens or math.lcm(limits.page_size, limits.granule_tokens)
    step = -(-limits.chunk_buckets[-1] // unit) * unit
    batches: Ranges = []
    for first in reversed(range(0, tokens, step)):
        last = min(tokens, first + step)
        named = max(first, min(named_tokens, last))
        blocks = [(start, start + unit) for start in range(first, named, unit)]
        batches.append(blocks + ([(named, last)] if named < last else []))
    return batches
