"""Decides which preempted sequences are swapped out to host memory, and which is swapped in next.

A sequence is swapped out only if host memory has room and copying back was measured to be faster
than recomputing.

If a model has recurrent state or ring buffers, steps in flight change these before they are copied.
The results of such steps are therefore accepted.

Does no I/O. Invariants (each is a test of the same name in tests/scheduler/test_spills.py):
- what_lies_there_never_exceeds_its_room
- the_oldest_comes_back_first
- what_ended_takes_no_room
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jdisagg.layout.kv_spec import KvKind
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import HostPiece
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import Sequence, Stage

# Number of sequences that are swapped out at the same time, and of those swapped in. Each needs
# memory outside the pages for one batch.
SPILLS_AT_ONCE = 2

Batch = tuple[HostPiece, ...]
Ranges = list[list[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class Spill:
    """One swapped-out sequence.

    Attributes:
        batches: Pieces of the KV of positions [0, tokens), in the order in which they are copied to
            host memory: last positions first.
        chain: Hashes of the sequence's first blocks. They are invalid if the prefix cache was
            cleared since, which starts a new `epoch`.
        until: Deadline by which the sequence must have pages again.
    """

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
    whole: Batch = ()

    @property
    def order(self) -> tuple[float, int]:
        return self.child.order

    @property
    def offer_ids(self) -> tuple[int, ...]:
        batches = (*self.batches, self.whole)
        return tuple([piece.offer.offer_id for batch in batches for piece in batch])


class Spills:
    """The swapped-out sequences of one mesh.

    Args:
        room_bytes: Bytes of host memory for swapped-out sequences; 0 disables swapping.
    """

    def __init__(self, limits: MeshLimits, room_bytes: int, prices: Prices) -> None:
        self.room_bytes = room_bytes
        self._prices = prices
        self._state_bytes = limits.kv_spec.state.bytes_per_token
        self._windowed_bytes = limits.kv_spec.windowed.bytes_per_token if limits.ring_pages else 0
        # whether the results of steps in flight are accepted (`Sequence.steps_count`)
        self.steps_count = limits.kv_spec.has_state or limits.ring_pages > 0
        self._token_bytes = limits.sent.bytes_per_token
        self._spills: dict[int, Spill] = {}  # by their child's key

    def __len__(self) -> int:
        return len(self._spills)

    def __iter__(self) -> Iterator[Spill]:
        return iter(tuple(self._spills.values()))

    @property
    def bytes(self) -> int:
        return sum([spill.bytes for spill in self._spills.values()])

    def bytes_of(self, batches: list[Batch]) -> int:
        each = {
            KvKind.POSITIONS: self._token_bytes,
            KvKind.WINDOW: self._windowed_bytes,
            KvKind.STATE: self._state_bytes,
        }
        offers = [piece.offer for batch in batches for piece in batch]
        return sum([one.block_tokens * each[one.kind] for one in offers if one.group == 0])

    def refusal(self, child: Sequence) -> str:
        """Returns the reason why a sequence should be recomputed instead of swapped out, or "" if
        it should be swapped out. Reasons: "off", "early" (not all its KV has arrived), "busy" (too
        many copies in flight), "price" (recomputing is faster)."""
        grammar = child.group.request.sampling.grammar is not None
        # with a grammar, or with drafts in flight, the number of tokens in flight is unknown
        if not self.room_bytes or (self.steps_count and (grammar or child.drafting)):
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
        waiting = [
            one
            for one in self._spills.values()
            if one.child.stage is Stage.SPILLED and one.child.group.suspended_until is None
        ]
        return min(waiting, key=lambda spill: spill.order, default=None)

    def ended(self) -> tuple[Spill, ...]:
        gone = [one for one in self._spills.values() if one.child.stage is Stage.ENDED]
        for spill in gone:
            del self._spills[spill.child.key]
        return tuple(gone)

    def waiting(self) -> int:
        suspended = [one.child.group.suspended_until is not None for one in self._spills.values()]
        return len(suspended) - sum(suspended)

    def returning(self) -> int:
        return sum([one.child.stage is Stage.RETURNING for one in self._spills.values()])

    def forget(self, spill: Spill) -> None:
        del self._spills[spill.child.key]


def batch_ranges(limits: MeshLimits, named_tokens: int, block_tokens: int, tokens: int) -> Ranges:
    """Splits positions [0, tokens) into ranges [start, end), grouped into the batches in which they
    are copied to host memory. The last positions come first, so that whole pages become free after
    each batch. The first `named_tokens` positions belong to cacheable blocks of `block_tokens`
    tokens, each of which is a separate range."""
    unit = block_tokens or math.lcm(limits.page_size, limits.granule_tokens)
    step = -(-limits.chunk_buckets[-1] // unit) * unit
    batches: Ranges = []
    for first in reversed(range(0, tokens, step)):
        last = min(tokens, first + step)
        named = max(first, min(named_tokens, last))
        blocks = [(start, start + unit) for start in range(first, named, unit)]
        batches.append(blocks + ([(named, last)] if named < last else []))
    return batches
