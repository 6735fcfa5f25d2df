"""Moves KV blocks into the pages of a mesh, from another worker or from the mesh's own host memory.

A block is pulled and written into pages, and read back. It counts as received only if its checksum
in the pages is the one that was computed at its source. Its states are those of `WORKFLOW`
(messages/kv_plane.py), whatever the source."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from jdisagg.clock import within
from jdisagg.errors import HandoffError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.kv_plane import BlockEvent, BlockState, after
from jdisagg.messages.ports import Offer
from jdisagg.messages.step_commands import (
    HOST,
    DropBlocks,
    InsertBlock,
    InsertResult,
    PullBlock,
    PullResult,
    ReleaseOffers,
    StepResult,
)
from jdisagg.scheduler.host_blocks import HostPiece
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.worker.outgoing_kv import extraction
from jdisagg.worker.peers import PeerLink
from jdisagg.worker.step_loop import StepLoop

COPY_SECONDS = 10.0  # deadline of one piece in host memory; a slower host is treated as failing
# A pull ends after its deadline, or later if bytes still arrive. If it has no result after this
# many times its deadline, it is treated as lost.
PATIENCE = 12.5


@dataclass(frozen=True, slots=True)
class Destination:
    """The pages and state slot to which blocks are written.

    Attributes:
        pages: Function that returns the pages of positions [0, n), or raises HandoffError if there
            are too few.
        cached_tokens: Number of leading positions whose KV is in the pages before the transfer.
        state: Function that returns the slot for recurrent state. None for models without recurrent
            state.
        windows: Destination of sliding-window layers that are sent separately; None if there are
            none.
    """

    rank: int
    pages: Callable[[int], tuple[int, ...]]
    layer_groups: int
    cached_tokens: int = 0
    state: Callable[[], int] | None = None
    windows: "WindowDestination | None" = None

    def place(self, offer: Offer, name: str) -> tuple[int, ...]:
        """Returns the pages of an offered block. Raises HandoffError if none are reserved."""
        end = offer.start + offer.valid_tokens
        if offer.kind is KvKind.POSITIONS:
            return self.pages(end)
        if offer.kind is KvKind.WINDOW and self.windows is not None:
            return self.windows.pages(end)
        if offer.kind is KvKind.STATE and self.state is not None:
            return (self.state(),)
        raise HandoffError(
            f"{name}: KV of a sliding window, but no window pages are reserved"
            if offer.kind is KvKind.WINDOW
            else f"{name}: a state came, and this model keeps none"
        )


@dataclass(frozen=True, slots=True)
class WindowDestination:
    """The pages to which the KV of separately sent sliding-window layers is written. `seen_from`:
    function that returns the first position inside the windows, given a sequence's end position."""

    pages: Callable[[int], tuple[int, ...]]
    layer_groups: int
    seen_from: Callable[[int], int]


class ArrivingBlocks:
    """The blocks that one source offers for one destination, each with its state.

    Attributes:
        count: Number of blocks in each state.
        last_insertion: Number of the newest command that inserts a block.
    """

    def __init__(
        self,
        loop: StepLoop,
        to: Destination,
        link: Callable[[], PeerLink],
        seconds: float,
        name: str,
    ) -> None:
        self.count: Counter[BlockState] = Counter()
        self.last_insertion = 0
        self._states: dict[int, BlockState] = {}
        self._loop = loop
        self._to = to
        self._link = link
        self._seconds = seconds
        self._name = name

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


class HostPieces:
    """Copies pieces of KV between the pages of a mesh and its host memory. The executor owns the
    bytes. `worker/host_tier.py` tracks which block a piece belongs to."""

    def __init__(self, loop: StepLoop, page_size: int, key: int) -> None:
        self._loop = loop
        self._page_size = page_size
        self._link = PeerLink(HOST, key, verify=True)

    def copy_out(self, offer: Offer, pages: Sequence[int]) -> "asyncio.Future[StepResult]":
        """Copies the KV of an offer's positions to host memory. `pages` are the pages of the
        sequence from position 0 on. Pages before the offer's first position are not read. The copy
        is queued on the mesh at once, so later commands may overwrite the pages."""
        number, key = self._loop.next_number(), self._link.checksum_key
        command = extraction(number, offer, pages, self._page_size, key)
        return self._loop.submit(msgspec.structs.replace(command, to_host=True))

    async def bring_back(
        self, pieces: Iterable[HostPiece], rank: int, pages: tuple[int, ...]
    ) -> bool:
        """Returns whether all pieces are written and all checksums match. After a cancellation
        nothing more is written, so the pages may be reused immediately."""

        def place(tokens: int) -> tuple[int, ...]:
            return pages[: pages_for(tokens, self._page_size)]

        windows = WindowDestination(place, 1, lambda end: 0)
        to = Destination(rank, place, 1, state=lambda: pages[0], windows=windows)
        blocks = ArrivingBlocks(self._loop, to, lambda: self._link, COPY_SECONDS, "host memory")

        async def back(piece: HostPiece) -> bool:
            offer = piece.offer
            blocks.offered(offer)
            pulled = await blocks.pull(offer)
            if pulled is None or pulled.error:
                return False
            return not blocks.verify(offer, await blocks.insert(offer), piece.checksum)

        return all(await asyncio.gather(*map(back, pieces)))

    def release(self, offer_ids: tuple[int, ...]) -> None:
        """Drops pieces from host memory, including those that are still being copied there."""
        if offer_ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), offer_ids, from_host=True))
