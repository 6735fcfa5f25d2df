"""Moves KV blocks out of and into the pages of a mesh, to and from another worker or the mesh's own
host memory.

A block is pulled and written into pages, and read back. It counts as received only if its checksum
in the pages is the one that was computed at its source. Its states are those of `WORKFLOW`
(messages/kv_plane.py), whatever the source."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jdisagg.clock import within
from jdisagg.errors import HandoffError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.kv_plane import MOST_PATIENCE, BlockEvent, BlockState, after
from jdisagg.messages.ports import Offer
from jdisagg.messages.step_commands import (
    DropBlocks,
    ExtractBlock,
    InsertBlock,
    InsertResult,
    PullBlock,
    PullResult,
)
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.worker.peers import PeerLink
from jdisagg.worker.step_loop import StepLoop

# If a pull has no result after this many times its time limit, it is treated as lost.
PATIENCE = MOST_PATIENCE + 0.5


@dataclass(frozen=True, slots=True)
class Destination:
    """The pages and state slot to which blocks are written.

    Attributes:
        pages: Function that returns the pages of positions [0, n), or raises HandoffError if there
            are too few.
        cached_tokens: Number of leading positions whose KV is in the pages before the transfer.
        snapshot: Function that returns the pages of windows, or the slot of recurrent state, after
            n tokens. None if neither is received.
    """

    mesh: MeshLimits
    rank: int
    pages: Callable[[int], tuple[int, ...]]
    cached_tokens: int = 0
    snapshot: Callable[[KvKind, int], tuple[int, ...]] | None = None

    @property
    def windows(self) -> bool:
        """Whether the KV of sliding-window layers is received separately."""
        return self.snapshot is not None and self.mesh.windows_apart

    @property
    def state(self) -> bool:
        return self.snapshot is not None and self.mesh.kv_spec.has_state

    def place(self, offer: Offer, name: str) -> tuple[int, ...]:
        """Returns the pages of an offered block. Raises HandoffError if none are reserved."""
        end = offer.start + offer.valid_tokens
        if offer.kind is KvKind.POSITIONS:
            return self.pages(end)
        if self.snapshot is not None and (
            self.windows if offer.kind is KvKind.WINDOW else self.state
        ):
            return self.snapshot(offer.kind, end)
        raise HandoffError(
            f"{name}: KV of a sliding window, but no window pages are reserved"
            if offer.kind is KvKind.WINDOW
            else f"{name}: a state came, and this model keeps none"
        )


@dataclass(slots=True, eq=False, repr=False)
class ArrivingBlocks:
    """The blocks that one source offers for one destination, each with its state.

    Attributes:
        count: Number of blocks in each state.
        verified: The blocks that are intact in pages.
        last_insertion: Number of the newest command that inserts a block.
    """

    _loop: StepLoop
    _to: Destination
    _link: Callable[[], PeerLink]
    _seconds: float
    _name: str
    count: Counter[BlockState] = field(default_factory=Counter)
    verified: list[Offer] = field(default_factory=list)
    last_insertion: int = 0
    _states: dict[int, BlockState] = field(default_factory=dict)

    @property
    def arriving(self) -> bool:
        """Whether blocks are pulled or inserted now."""
        return self.count[BlockState.ASKED] + self.count[BlockState.ARRIVED] > 0

    def kept_tokens(self) -> int:
        """Returns the number of leading positions whose KV of every layer group is verified."""
        blocks = [one for one in self.verified if one.kind is KvKind.POSITIONS]
        return reach(blocks, self._to.mesh.layer_groups, self._to.cached_tokens)

    def codec(self, offer: Offer) -> str:
        """Recurrent state is never compressed, because errors in it would persist."""
        return "none" if offer.kind is KvKind.STATE else self._link().codec

    def offered(self, offer: Offer) -> None:
        self._states[offer.offer_id] = BlockState.OFFERED
        self.count[BlockState.OFFERED] += 1

    async def pull(self, offer: Offer) -> PullResult | None:
        """Returns None if the pull has no result within its time limit. A block that did not
        arrive, or is not awaited any more, is dropped. It may be pulled again."""
        self._advance(offer, BlockEvent.ASK)
        command = PullBlock(
            step=self._loop.next_number(),
            offer_id=offer.offer_id,
            rank=self._to.rank,
            group=offer.group,
            groups=offer.groups,
            block_tokens=offer.block_tokens,
            deadline_seconds=self._seconds,
            peer=self._link().peer,
            codec=self.codec(offer),
            kind=offer.kind,
        )
        pulling, result = self._loop.submit(command), None
        try:
            result = await within(pulling, PATIENCE * self._seconds)
        except TimeoutError:
            return None
        finally:
            if isinstance(result, PullResult) and not result.error:
                self._advance(offer, BlockEvent.ARRIVE)
            else:
                self.give_up(offer)
        assert isinstance(result, PullResult)
        return result

    async def insert(self, offer: Offer) -> InsertResult:
        """Raises HandoffError if no pages are reserved for the block."""
        try:
            pages = self._to.place(offer, self._name)
        except HandoffError:
            self.give_up(offer)
            raise
        command = InsertBlock(
            step=self._loop.next_number(),
            offer_id=offer.offer_id,
            rank=self._to.rank,
            group=offer.group,
            groups=offer.groups,
            block_tokens=offer.block_tokens,
            valid_tokens=offer.valid_tokens,
            start=offer.start,
            pages=pages,
            checksum_key=self._link().checksum_key,
            peer=self._link().peer,
            codec=self.codec(offer),
            kind=offer.kind,
        )
        self.last_insertion = command.step
        inserted = await self._loop.submit(command)
        assert isinstance(inserted, InsertResult)
        return inserted

    def verify(self, offer: Offer, inserted: InsertResult, expected: int | None) -> str:
        """Compares the block in pages with its source. `expected`: checksum at the source; None if
        only the codec has one. Returns what differs, or ""."""
        problem, found = "", inserted.checksum
        if self._link().verify and not inserted.intact:
            problem = "it is not what its codec had packed"
        elif expected not in (None, found):
            problem = (
                f"its checksum is {found:#x} after insertion, and was {expected:#x} where it was"
                " computed"
            )
        self._advance(offer, BlockEvent.GIVE_UP if problem else BlockEvent.VERIFY)
        if not problem:
            self.verified.append(offer)
        return problem

    def give_up(self, offer: Offer) -> None:
        """Drops what has arrived or will still arrive."""
        self._advance(offer, BlockEvent.GIVE_UP)
        self._loop.fire(DropBlocks(self._loop.next_number(), (offer.offer_id,)))

    def _advance(self, offer: Offer, event: BlockEvent) -> None:
        before = self._states[offer.offer_id]
        state = after(before, event)
        assert state is not None, (before, event)
        self._states[offer.offer_id] = state
        self.count[before] -= 1
        self.count[state] += 1


def reach(blocks: list[Offer], groups: int, start: int) -> int:
    return min([_contiguous(blocks, group, start) for group in range(groups)])


def _contiguous(blocks: list[Offer], group: int, at: int) -> int:
    mine = [block for block in blocks if block.group <= group < block.group + block.groups]
    for block in sorted(mine, key=lambda block: block.start):
        if block.start != at:
            break
        at += block.valid_tokens
    return at


def offers_of_pages(
    limits: MeshLimits,
    rank: int,
    start: int,
    end: int,
    new_id: Callable[[], int],
    kind: KvKind = KvKind.POSITIONS,
) -> Iterator[Offer]:
    """`kind` selects ordinary or separately sent sliding-window layers."""
    largest = limits.chunk_buckets[-1]
    bands = limits.window_bands if kind is KvKind.WINDOW else limits.bands
    for first in range(start, end, largest):
        for at, block_tokens, valid_tokens in split_blocks(
            min(largest, end - first), limits.granule_tokens, limits.whole_blocks
        ):
            for band in bands(block_tokens):
                yield Offer(
                    offer_id=new_id(),
                    group=band.start,
                    groups=len(band),
                    start=first + at,
                    valid_tokens=valid_tokens,
                    block_tokens=block_tokens,
                    rank=rank,
                    kind=kind,
                )


def snapshot_offers(
    limits: MeshLimits, rank: int, end: int, new_id: Callable[[], int]
) -> Iterator[Offer]:
    """Recurrent state and separately sent windows of a sequence of `end` tokens."""
    if limits.kv_spec.has_state:
        yield Offer(new_id(), 0, 0, 1, 1, rank, kind=KvKind.STATE)
    if limits.windows_apart:
        yield from offers_of_pages(limits, rank, limits.seen_from(end), end, new_id, KvKind.WINDOW)


def state_weight(limits: MeshLimits) -> int:
    """Returns the size of a recurrent state as an equivalent number of KV tokens times layer
    groups, comparable with the weights of other offers."""
    spec = limits.kv_spec
    return limits.layer_groups * -(-spec.state.bytes_per_token // spec.bytes_per_token)


def extraction(
    step: int, offer: Offer, pages: Sequence[int], page_size: int, checksum_key: int
) -> ExtractBlock:
    """For recurrent state, `pages` has only the state slot."""
    covered = pages_for(offer.start + offer.valid_tokens, page_size)
    return ExtractBlock(
        step=step,
        offer_id=offer.offer_id,
        rank=offer.rank,
        group=offer.group,
        groups=offer.groups,
        start=offer.start,
        valid_tokens=offer.valid_tokens,
        block_tokens=offer.block_tokens,
        pages=tuple(pages[:covered]),
        checksum_key=checksum_key,
        kind=offer.kind,
    )
