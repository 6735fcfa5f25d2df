"""Pieces of KV between the pages of a mesh and its host memory: copied out, brought back, dropped.

The bytes are the executor's (`ExtractBlock` and `PullBlock` with the peer `HOST`); here are the
commands. A copy out takes its place in the mesh's order at the moment of the call, so whatever is
written to its pages by later commands comes behind it. What comes back is written into pages, read
back, summed, and compared with the sum from when it left. Knows no names and no sequences: what the
pieces are of is the caller's (`worker/host_tier.py`, `worker/spilled_kv.py`)."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

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
from jdisagg.worker.step_loop import StepLoop

COPY_SECONDS = 10.0  # of a piece; then the host is not what it should be


class HostPieces:
    """Of one mesh, whose pages have `page_size` positions. `key`: of the sums."""

    def __init__(self, loop: StepLoop, page_size: int, key: int) -> None:
        self._loop = loop
        self._page_size = page_size
        self._key = key

    def copy_out(self, offer: Offer, pages: Sequence[int]) -> "asyncio.Future[StepResult]":
        """Of a sequence that lies in `pages`, or in those behind others that are not read."""
        number = self._loop.next_number()
        command = extraction(number, offer, pages, self._page_size, self._key)
        return self._loop.submit(msgspec.structs.replace(command, to_host=True))

    async def bring_back(
        self, pieces: Iterable[HostPiece], rank: int, pages: tuple[int, ...]
    ) -> bool:
        """Whether all are in these pages of a rank as they were when they left. Whoever cancels
        this may give the pages away at once: nothing more is written there."""
        return all(await asyncio.gather(*(self._back(piece, rank, pages) for piece in pieces)))

    async def _back(self, piece: HostPiece, rank: int, pages: tuple[int, ...]) -> bool:
        offer = piece.offer
        pull = PullBlock(
            self._loop.next_number(),
            offer.offer_id,
            rank,
            offer.group,
            offer.block_tokens,
            COPY_SECONDS,
            HOST,
            groups=offer.groups,
        )
        pulling = self._loop.submit(pull)
        try:
            pulled = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            # what comes all the same is dropped
            pulling.add_done_callback(lambda _: self._drop(offer))
            raise
        assert isinstance(pulled, PullResult)
        if pulled.error:
            self._drop(offer)
            return False
        covered = pages_for(offer.start + offer.valid_tokens, self._page_size)
        insertion = InsertBlock(
            self._loop.next_number(),
            offer.offer_id,
            rank,
            offer.group,
            offer.block_tokens,
            offer.valid_tokens,
            offer.start,
            pages[:covered],
            self._key,
            groups=offer.groups,
        )
        inserted = await asyncio.shield(self._loop.submit(insertion))
        assert isinstance(inserted, InsertResult)
        return inserted.checksum == piece.checksum and inserted.intact

    def _drop(self, offer: Offer) -> None:
        self._loop.fire(DropBlocks(self._loop.next_number(), (offer.offer_id,)))

    def release(self, offer_ids: tuple[int, ...]) -> None:
        """They are gone from host memory; those on their way are as soon as they come."""
        if offer_ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), offer_ids, from_host=True))
