"""The host-memory tier of a mesh: copies out blocks whose pages are given away, and brings them
back for prompts that would compute them again.

The bytes are the executor's (`ExtractBlock` and `PullBlock` with the peer `HOST`); here are the
commands, and what became of them. Copying out takes its place in the mesh's order at the moment
when the pages are given away, so before anything is written there; a bounded number of blocks is on
its way, and what is beyond it is computed again one day. What comes back goes into pages of its
own, is read back and summed, and is kept there like any block; one whose sum differs is forgotten,
a miss.

Nothing waits for a copy but the prompt that wants it, and that no longer than computing would
take."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace

import msgspec

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import Offer
from jdisagg.messages.step_commands import (
    HOST,
    DropBlocks,
    ExtractResult,
    InsertBlock,
    InsertResult,
    PullBlock,
    PullResult,
    ReleaseOffers,
    StepResult,
)
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import (
    MOST_WRITING,
    HostBlock,
    HostBlocks,
    HostPiece,
    RestorePrices,
)
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.outgoing_kv import extraction, offers_of_pages
from jdisagg.worker.step_loop import StepLoop

BLOCKS_AT_ONCE = 4  # on their way back, of one prompt
MOST_RESTORES = 4  # prompts
COPY_SECONDS = 10.0  # of a piece; then the host is not what it should be


class HostTier:
    """`kept`: what stays in the mesh's pages. `bytes_`: of host memory. `ids`: fresh random
    numbers."""

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        limits: MeshLimits,
        bytes_: int,
        ids: Callable[[], int],
        counters: Counters,
        always: bool = False,
    ) -> None:
        block_bytes = kept.block_tokens * limits.kv_spec.bytes_per_token
        self.blocks = HostBlocks(bytes_ // block_bytes if block_bytes else 0)
        self.prices = RestorePrices(always)
        self._kept = kept
        self._loop = loop
        self._limits = limits
        self._ids = ids
        self._counters = counters
        self._key = ids()  # of the sums: nobody else reads them
        self._last_owner = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._restores = 0
        if self.on:
            kept.on_evicted(self._copy_out)

    @property
    def on(self) -> bool:
        return self.blocks.capacity > 0

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        return not self._tasks

    def clear(self) -> int:
        """Nothing that lies here is used again; returns how many blocks there were. Before the
        pages are cleared, with which a new epoch begins."""
        gone = self.blocks.clear()
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)
        self._release(gone)
        return len(gone)

    def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    # ---- out

    def _copy_out(self, rank: int, name: bytes, index: int, pages: tuple[int, ...]) -> None:
        """The pages of the block that is the `index`-th of its chain are given away."""
        if self._loop.failure is not None or name in self.blocks:
            return
        if self.blocks.writing >= MOST_WRITING:
            self._counters.add("host_blocks_skipped")
            return
        size, tokens = self._limits.page_size, self._kept.block_tokens
        start = index * tokens
        offers = list(offers_of_pages(self._limits, rank, start, start + tokens, self._ids))
        pieces = tuple(map(HostPiece, offers))
        block, gone = self.blocks.begin(name, pieces)
        self._drop(gone, "room")
        if block is None:
            return
        before = (0,) * (start // size)  # pages of the chain's beginning, which are not read
        copies = [self._extract(offer, (*before, *pages)) for offer in offers]
        self._spawn(self._written(block, copies))

    def _extract(self, offer: Offer, pages: tuple[int, ...]) -> "asyncio.Future[StepResult]":
        command = extraction(
            self._loop.next_number(), offer, pages, self._limits.page_size, self._key
        )
        return self._loop.submit(msgspec.structs.replace(command, to_host=True))

    async def _written(self, block: HostBlock, copies: "list[asyncio.Future[StepResult]]") -> None:
        try:
            results = await asyncio.gather(*copies)
        except JdisaggError:
            if self.blocks.forget(block):
                self._counters.add("host_blocks_failed")
                self._release((block,))
            return
        sums = [one.checksum.checksum for one in results if isinstance(one, ExtractResult)]
        pieces = tuple(
            [replace(piece, checksum=sum_) for piece, sum_ in zip(block.pieces, sums, strict=True)]
        )
        if self.blocks.written(block, pieces):
            self._counters.add("host_blocks_written")
            self._kept.log.gained(block.name)

    # ---- back

    def worth(self, rank: int, chain: Chain, most_tokens: int) -> int:
        """How many tokens of a sequence would be known on a rank with what lies here; 0: nothing
        here is worth bringing back."""
        if not self.on or not chain or self._restores >= MOST_RESTORES:
            return 0
        size = self._kept.block_tokens
        chain = chain[: most_tokens // size]
        known = self._kept.match(rank, chain)
        found = self.blocks.match(chain, known)
        return (known + found) * size if found and self.prices.worth(found * size) else 0

    def bring_back(
        self,
        rank: int,
        chain: Chain,
        tokens: int,
        now: Callable[[], float],
        done: Callable[[], None],
    ) -> None:
        """Begins `restore`. `done` is called once: when it is over, or when computing would be."""
        told = False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                done()

        async def bring() -> None:
            known = self._kept.match(rank, chain) * self._kept.block_tokens
            patience = self.prices.patience_seconds(tokens - known)
            timer = None
            if patience is not None:
                timer = asyncio.get_running_loop().call_later(patience, late)
            try:
                await self.restore(rank, chain, tokens, now)
            except JdisaggError:
                self._counters.add("host_restores_failed")
            finally:
                if timer is not None:
                    timer.cancel()
                tell()

        def late() -> None:
            if not told:
                self._counters.add("host_restores_late")
            tell()

        self._spawn(bring())

    async def restore(self, rank: int, chain: Chain, tokens: int, now: Callable[[], float]) -> int:
        """Brings the first `tokens` tokens of a chain into pages, those that are not known there;
        returns how many are. `tokens` is what `worth` said, just now."""
        size, page_size = self._kept.block_tokens, self._limits.page_size
        chain = chain[: tokens // size]
        known = self._kept.match(rank, chain)
        chain = chain[: known + self.blocks.match(chain, known)]
        blocks = self.blocks.hold(chain[known:])
        self._last_owner -= 1  # sequences count upwards
        owner, back, count = self._last_owner, known, len(chain) * size // page_size
        pages = self._kept.reserve(rank, owner, chain, known * size, count)
        if pages is None:
            self.blocks.let_go(blocks)
            return known * size
        epoch, began = self._kept.epoch, now()
        self._restores += 1
        try:
            slots = asyncio.Semaphore(BLOCKS_AT_ONCE)
            came = await asyncio.gather(
                *(self._back(block, rank, pages, slots) for block in blocks)
            )
            back += next((at for at, one in enumerate(came) if not one), len(came))
        finally:
            self._restores -= 1
            self.blocks.let_go(blocks)
            fresh = epoch == self._kept.epoch
            self._kept.let_go(rank, owner, chain[:back] if fresh else ())
        self.prices.restored_in((back - known) * size, now() - began)
        self._counters.add("host_blocks_restored", back - known)
        self._counters.add("host_tokens_restored", (back - known) * size)
        return back * size if fresh else 0

    async def _back(
        self, block: HostBlock, rank: int, pages: tuple[int, ...], slots: asyncio.Semaphore
    ) -> bool:
        """Whether a block is in its pages, as it was when it was copied out."""
        async with slots:
            found = await asyncio.gather(
                *(self._piece_back(piece, rank, pages) for piece in block.pieces)
            )
        if all(found):
            return True
        if self.blocks.forget(block):
            self._counters.add("host_blocks_broken")
            self._drop((block,), "broken")
        return False

    async def _piece_back(self, piece: HostPiece, rank: int, pages: tuple[int, ...]) -> bool:
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
            pulling.add_done_callback(lambda _: self._drop_pulled(offer))
            raise
        assert isinstance(pulled, PullResult)
        if pulled.error:
            self._drop_pulled(offer)
            return False
        covered = pages_for(offer.start + offer.valid_tokens, self._limits.page_size)
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

    def _drop_pulled(self, offer: Offer) -> None:
        self._loop.fire(DropBlocks(self._loop.next_number(), (offer.offer_id,)))

    # ---- gone

    def _drop(self, gone: tuple[HostBlock, ...], cause: str) -> None:
        if gone:
            self._counters.add("host_blocks_dropped", len(gone), cause=cause)
            for block in gone:
                self._kept.log.lost(block.name)
            self._release(gone)

    def _release(self, gone: tuple[HostBlock, ...]) -> None:
        ids = tuple([offer_id for block in gone for offer_id in block.offer_ids])
        if ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), ids, from_host=True))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
