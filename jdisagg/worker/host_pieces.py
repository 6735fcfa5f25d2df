"""Copies pieces of KV between the pages of a mesh and host memory.

The executor owns the bytes (`ExtractBlock`, and `PullBlock` with the peer `HOST`); this module
issues the commands. A copy to host memory is queued on the mesh at the moment of the call, so later
commands may overwrite its pages. A restored piece is written into pages and read back. Its checksum
is compared with the checksum taken when the piece was copied to host memory. `worker/host_tier.py`
tracks which block a piece belongs to."""

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

COPY_SECONDS = 10.0  # deadline of one piece; a slower host is treated as failing


class HostPieces:
    def __init__(self, loop: StepLoop, page_size: int, key: int) -> None:
        self._loop = loop
        self._page_size = page_size
        self._key = key

    def copy_out(self, offer: Offer, pages: Sequence[int]) -> "asyncio.Future[StepResult]":
        """Copies the KV of an offer's positions to host memory. `pages` are the pages of the
        sequence from position 0 on. Pages before the offer's first position are not read."""
        number = self._loop.next_number()
        command = extraction(number, offer, pages, self._page_size, self._key)
        return self._loop.submit(msgspec.structs.replace(command, to_host=True))

    async def bring_back(
        self, pieces: Iterable[HostPiece], rank: int, pages: tuple[int, ...]
    ) -> bool:
        """Returns whether all pieces are written and all checksums match. After a cancellation
        nothing more is written, so the pages may be reused immediately."""
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
            kind=offer.kind,
        )
        pulling = self._loop.submit(pull)
        try:
            pulled = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            # drops the piece if it arrives later
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
            kind=offer.kind,
        )
        inserted = await asyncio.shield(self._loop.submit(insertion))
        assert isinstance(inserted, InsertResult)
        return inserted.checksum == piece.checksum and inserted.intact

    def _drop(self, offer: Offer) -> None:
        self._loop.fire(DropBlocks(self._loop.next_number(), (offer.offer_id,)))

    def release(self, offer_ids: tuple[int, ...]) -> None:
        """Drops pieces from host memory, including those that are still being copied there."""
        if offer_ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), offer_ids, from_host=True))
