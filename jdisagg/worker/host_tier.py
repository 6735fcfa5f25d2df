"""The host-memory tier of a mesh: copies cached blocks, and the snapshots that hits of some models
need, to host memory before their pages are reused, and restores them. Blocks of preempted sequences
are copied in any case, others only if enough blocks are requested again (`AskedAgain`).

The copy is queued on the mesh before the next command after the pages got another owner, so it runs
before any command that overwrites the pages. If a checksum differs, the block is dropped and counts
as a miss."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import msgspec

from jdisagg.clock import BackgroundTasks, together
from jdisagg.errors import JdisaggError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.ports import Offer
from jdisagg.messages.step_commands import HOST, ExtractResult, ReleaseOffers, StepResult
from jdisagg.messages.worker_status import KeptTier, WorkerRole
from jdisagg.scheduler.block_names import Tail
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import (
    MOST_WRITING,
    MOST_WRITING_OF_DECODE,
    AskedAgain,
    HostBlocks,
    HostPiece,
    TierBlock,
    TierBlocks,
    TierRoom,
)
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain, PagedBlock, Residency
from jdisagg.scheduler.snapshots import EvictedSnapshot
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import (
    ArrivingBlocks,
    Destination,
    extraction,
    offers_of_pages,
    snapshot_offers,
)
from jdisagg.worker.kv_sources import KvSource, Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.peers import PeerLink
from jdisagg.worker.step_loop import StepLoop

BLOCKS_AT_ONCE = 4  # number of blocks of one restore that are copied at the same time
COPY_SECONDS = 10.0  # deadline of one piece in host memory; a slower host is treated as failing
MOST_SNAPSHOTS_WRITING = 4  # most snapshots that are copied to host memory at the same time

B = TypeVar("B", bound=TierBlocks)


class Files(Protocol):
    """Where blocks lie that a restore reads by way of host memory."""

    async def read(
        self, file: TierBlock, index: int, offer_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Reads pieces under these offer ids. Returns their checksums, or () after a failure."""
        ...

    def broken(self, file: TierBlock) -> None: ...


class Shelf(HostBlocks):
    """The blocks in host memory, or the snapshots, which have the names of their blocks.

    Attributes:
        most_writing: Largest number that is copied out at the same time.
        copies: The copies under way, by name.
    """

    def __init__(
        self, room_bytes: int, block_bytes: int, most_writing: int, kept: Residency, room: TierRoom
    ) -> None:
        capacity = room_bytes // block_bytes if block_bytes else 0
        super().__init__(capacity, room.rank_bound, kept.retained, block_bytes)
        self.asked = AskedAgain(capacity, room.always)
        self.most_writing = most_writing
        self.copies: dict[bytes, asyncio.Task[None]] = {}

    def write_at_most(self, count: int) -> None:
        self.most_writing = count

    def copied(self, name: bytes, task: "asyncio.Task[None]") -> None:
        if self.copies.get(name) is task:
            del self.copies[name]


class Tier(KvSource, Generic[B]):
    """Host memory or disk: holds blocks of the mesh, and snapshots. It is off if it has no room."""

    most_restores = 4
    most_seconds = None

    def __init__(self, blocks: B, snapshots: B, room: TierRoom) -> None:
        self.blocks = blocks
        self.snapshots = snapshots
        self.prices = Prices(room.always)
        self._tasks = BackgroundTasks()

    @property
    def on(self) -> bool:
        return self.blocks.capacity > 0

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet

    def stats(self) -> tuple[KeptTier, ...]:
        both = self.blocks, self.snapshots
        used = sum([len(one) * one.block_bytes for one in both])
        total = sum([one.capacity * one.block_bytes for one in both])
        return (KeptTier(self.name, len(self.blocks), used, total),)

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        return self.blocks.listed()

    def stop(self) -> None:
        self._tasks.cancel()


class HostTier(Tier[Shelf]):
    """Host memory as a source of cached blocks (`KvSource`)."""

    name: Origin = "host"

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        limits: MeshLimits,
        room: TierRoom,
        ids: Callable[[], int],
        counters: Counters,
        role: WorkerRole,
    ) -> None:
        self.snapshot_bytes = limits.snapshot_bytes if kept.snapshots else 0
        self.snapshot_part = limits.snapshot_part if kept.snapshots else 0.0
        of_snapshots = self.bytes_of_snapshots(room.host_bytes)
        block_bytes = kept.block_tokens * limits.sent.bytes_per_token
        of_blocks = room.host_bytes - of_snapshots
        anywhere = replace(room, rank_bound=False)  # any rank can restore snapshots
        super().__init__(
            Shelf(of_blocks, block_bytes, MOST_WRITING, kept, room),
            Shelf(of_snapshots, self.snapshot_bytes, MOST_SNAPSHOTS_WRITING, kept, anywhere),
            room,
        )
        self._kept = kept
        self._loop = loop
        self._limits = limits
        self._ids = ids
        self._counters = counters
        key = 0
        if self.on:
            # The key is the same in the next run of the worker, which reads the blocks on disk.
            key = int.from_bytes(kept.digest(b"jdisagg sums")[:8], "little") >> 1
        self._link = PeerLink(HOST, key, verify=True)
        self.take_role(role)

    def take_role(self, role: WorkerRole) -> None:
        self._least_chunk = self._limits.computed_by(role.computes).chunk_buckets[0]
        self.blocks.write_at_most(MOST_WRITING_OF_DECODE if role.decodes else MOST_WRITING)

    def bytes_of_snapshots(self, room_bytes: int) -> int:
        """One snapshot always fits, unless it takes more than half of the tier."""
        if not self.snapshot_part:
            return 0
        least = min(self.snapshot_bytes + FILE_EXTRA_BYTES, room_bytes // 2)
        return max(least, int(room_bytes * self.snapshot_part))

    def clear(self, cause: str) -> int:
        gone = self.blocks.clear()
        self._drop(self.blocks, gone, cause)
        self._drop(self.snapshots, self.snapshots.clear(), cause)
        return len(gone)

    def drop(self, names: Collection[bytes]) -> None:
        for shelf in (self.blocks, self.snapshots):
            self._drop(shelf, shelf.drop(names), "session")

    def offers(self, shelf: TierBlocks, rank: int, end: int, tail: int = 0) -> Iterator[Offer]:
        """The pieces of a block, of a tail of `tail` tokens, or of a snapshot, which ends after
        `end` tokens of its sequence."""
        if shelf is self.snapshots:
            yield from snapshot_offers(self._limits, rank, end, self._ids)
        else:
            start = end - (tail or self._kept.block_tokens)
            yield from offers_of_pages(self._limits, rank, start, end, self._ids)

    def geometry(self) -> str:
        """Describes the pieces of blocks and snapshots, as all runs of a worker must cut them that
        read each other's files."""
        size, context = self._kept.block_tokens, self._limits.context_tokens
        snapshot = self.offers(self.snapshots, 0, context) if self.snapshot_part else ()
        cuts = [
            (one.kind.value, one.group, one.groups, one.start, one.valid_tokens, one.block_tokens)
            for one in (*self.offers(self.blocks, 0, size), *snapshot)
        ]
        return f"blocks of {size} tokens as {cuts}"

    # ---- copying out

    def copy_evicted(self) -> None:
        """Copies what was evicted from pages. Must be called before the next command is issued. If
        not all blocks can be copied, those are that are nearest to the start of their sequences,
        because a block is of use only after all blocks before it. They are copied last, so that
        they also stay longer."""
        evicted = self._kept.take_evicted()
        snapshots = [
            (rank, gone)
            for rank, of_rank in enumerate(self._kept.snapshots)
            for gone in of_rank.take_evicted()
        ]
        if not self.on:
            return
        for rank, gone in snapshots:
            self._snapshot_evicted(rank, gone)
        chosen: list[PagedBlock] = []
        places, writing = {True: MOST_WRITING, False: self.blocks.most_writing}, self.blocks.writing
        room = self.blocks.room if evicted else 0
        for one in sorted(evicted, key=lambda one: (not one.awaited, one.index)):
            if not one.tail:
                self.blocks.asked.evicted(one.name)
            if one.name in self.blocks:
                continue
            if not one.awaited and not self.blocks.asked.worth_copying:
                self._counters.add("host_blocks_declined")
            elif writing + len(chosen) < places[one.awaited] and len(chosen) < room:
                chosen.append(one)
            else:
                self._counters.add("host_blocks_skipped")
        for one in reversed(chosen):
            self._copy_block(one, places[one.awaited])

    def _snapshot_evicted(self, rank: int, gone: EvictedSnapshot) -> None:
        self.snapshots.asked.evicted(gone.name)
        if self.snapshots.asked.worth_copying:
            self._copy(self.snapshots, rank, gone.name, gone.tokens, gone.place)
        elif gone.name not in self.snapshots:
            self._counters.add("host_snapshots_declined")

    def _copy_block(self, one: PagedBlock, most_writing: int) -> None:
        start, size = one.index * self._kept.block_tokens, one.tail or self._kept.block_tokens
        # page 0 is a placeholder for the pages of the sequence's earlier blocks, which are not read
        pages = (0,) * (start // self._limits.page_size) + one.pages
        self._copy(self.blocks, one.rank, one.name, start + size, pages, most_writing, one.tail)

    def _copy(
        self,
        shelf: Shelf,
        rank: int,
        name: bytes,
        end: int,
        pages: tuple[int, ...],
        most_writing: int | None = None,
        tail: int = 0,
    ) -> None:
        """The copy is queued on the mesh, so the pages may be overwritten by later commands."""
        if self._loop.failure is not None or name in shelf or not shelf.capacity:
            return
        if shelf.writing >= (most_writing or shelf.most_writing):
            of_snapshots = shelf is self.snapshots
            self._counters.add("host_snapshots_skipped" if of_snapshots else "host_blocks_skipped")
            return
        block = self._begin(shelf, rank, name, end, tail)
        if block is not None:
            copies = [self._copy_piece(piece.offer, pages) for piece in block.pieces]
            task = shelf.copies[name] = self._tasks.spawn(self._write(shelf, block, copies))
            task.add_done_callback(lambda _: shelf.copied(name, task))

    def _copy_piece(self, offer: Offer, pages: tuple[int, ...]) -> "asyncio.Future[StepResult]":
        number, size = self._loop.next_number(), self._limits.page_size
        command = extraction(number, offer, pages, size, self._link.checksum_key)
        return self._loop.submit(msgspec.structs.replace(command, to_host=True))

    async def copied(
        self, rank: int, name: bytes, index: int, snapshot: bool = False
    ) -> TierBlock | None:
        """Returns a block, or the snapshot after it, in host memory. If it is only in pages of
        `rank`, copies it to host memory first. Returns None if it is in neither place."""
        shelf = self.snapshots if snapshot else self.blocks
        if not snapshot:
            if pages := self._kept.pages(rank, name):
                self._copy_block(PagedBlock(rank, name, index, pages), shelf.most_writing)
        elif name in (of_rank := self._kept.snapshots[rank]):
            self._copy(shelf, rank, name, of_rank.tokens(name), of_rank.place(name))
        if (task := shelf.copies.get(name)) is not None:
            await asyncio.wait({task})
        return shelf.arrived(name)

    def _begin(
        self, shelf: Shelf, rank: int, name: bytes, end: int, tail: int = 0
    ) -> TierBlock | None:
        pieces = tuple(map(HostPiece, self.offers(shelf, rank, end, tail)))
        index = (end - 1) // self._kept.block_tokens
        block, gone = shelf.begin(name, pieces, rank, index, tail > 0)
        self._drop(shelf, gone, "room")
        return block

    async def _write(
        self, shelf: Shelf, block: TierBlock, copies: "list[asyncio.Future[StepResult]]"
    ) -> None:
        sums = await _sums(copies)
        if sums is not None and self._complete(shelf, block, sums):
            of_snapshots = shelf is self.snapshots
            self._counters.add("host_snapshots_written" if of_snapshots else "host_blocks_written")
        elif sums is None and shelf.forget(block):
            self._counters.add("host_blocks_failed")
            self._release((block,))

    def _complete(self, shelf: Shelf, block: TierBlock, checksums: tuple[int, ...]) -> bool:
        pieces = [
            replace(piece, checksum=checksum)
            for piece, checksum in zip(block.pieces, checksums, strict=True)
        ]
        written = shelf.written(block, tuple(pieces))
        if written and shelf is self.blocks and not block.tail:
            self._kept.log.gained(block.name)
        return written

    async def _load(
        self, shelf: Shelf, rank: int, name: bytes, end: int, file: TierBlock, files: Files
    ) -> TierBlock | None:
        """Reads a block or snapshot from disk into host memory and prevents its eviction. Returns
        None if host memory has no room or reading failed."""
        block = self._begin(shelf, rank, name, end)
        if block is None:
            return None
        arrived = False
        try:
            index = block.index if shelf is self.blocks else 0
            checksums = await files.read(file, index, block.offer_ids)
            arrived = bool(checksums) and self._complete(shelf, block, checksums)
        finally:
            if not arrived and shelf.forget(block):
                self._release((block,))
        return shelf.hold((name,))[0] if arrived else None

    # ---- restoring

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        for name in query.chain[max(query.known) :]:
            if name not in self.blocks.asked and name not in self.blocks:
                break
            self.blocks.asked.asked(name)
        chain, tokens = query.chain, self.snapshot_tokens
        runs = {
            rank: (1,) * self.blocks.match(chain, query.known[rank], rank) for rank in query.ranks
        }
        if self._kept.snapshots:
            most = max([query.known[rank] + len(run) for rank, run in runs.items()])
            self._snapshot_asked(chain[:most])

        def snapshot(end: int) -> int | None:
            return tokens if self.has_snapshot(chain[end - 1]) else None

        return self.plan(self._kept, query, runs, snapshot, tail=self.tail_behind)

    def tail_behind(self, query: RestoreQuery, end: int, rank: int) -> tuple[Tail, int] | None:
        """Returns the tail that a query asks for, if it is here and comes after `end` blocks, and
        the number of tokens that it saves."""
        tail = query.tail
        if tail is None or end < len(query.chain) or not self.blocks.match((tail.name,), 0, rank):
            return None
        # with the tail nothing is left to compute, not even a small chunk
        return tail, max(tail.tokens, self._least_chunk)

    def _snapshot_asked(self, chain: Chain) -> None:
        for name in reversed(chain):
            if name in self.snapshots.asked:
                return self.snapshots.asked.asked(name)
            if self.has_snapshot(name) or any(name in one for one in self._kept.snapshots):
                return

    def has_snapshot(self, name: bytes) -> bool:
        return self.snapshots.match((name,), 0) > 0

    @property
    def snapshot_tokens(self) -> int:
        """Size of a snapshot, as the number of tokens whose KV has as many bytes."""
        return -(-self.snapshot_bytes // self._limits.sent.bytes_per_token)

    @contextmanager
    def holding(self, restore: Restore) -> Iterator[None]:
        chain, rank = restore.plan.chain, restore.plan.rank
        here = {
            index: chain[index]
            for index in range(restore.first, len(chain))
            if self.blocks.match((chain[index],), 0, rank)
        }
        held = self.blocks.hold(here.values())
        restore.held.update(zip(here, held, strict=True))
        wanted = restore.plan.snapshot and self.has_snapshot(chain[-1])
        snapshots = self.snapshots.hold(chain[-1:]) if wanted else ()
        restore.snapshot = next(iter(snapshots), None)
        tail = restore.plan.tail
        there = tail is not None and self.blocks.match((tail.name,), 0, rank)
        tails = self.blocks.hold((tail.name,)) if tail is not None and there else ()
        restore.tail = next(iter(tails), None)
        try:
            yield
        finally:
            self.blocks.let_go((*held, *tails))
            self.snapshots.let_go(snapshots)

    async def bring(self, restore: Restore, files: Files | None = None) -> str:
        """Copies the blocks of a restore to its reserved pages, a few at a time. `files`: where
        those lie that are not in host memory."""
        slots, gap, chain = asyncio.Semaphore(BLOCKS_AT_ONCE), False, restore.plan.chain

        async def bring(index: int) -> None:
            nonlocal gap
            async with slots:
                block = restore.held.get(index)
                if block is None or chain[index] in restore.dropped or (gap and not block.pieces):
                    return  # blocks on disk after a missing one are useless
                if await self._bring(self.blocks, restore, block, index, restore.pages, files):
                    restore.origins[index] = "host" if block.pieces else "disk"
                gap = gap or (index not in restore.origins and not block.pieces)

        missing = range(restore.first, len(chain))
        others = self._bring_snapshot(restore, files), self._bring_tail(restore)
        await together((*map(bring, missing), *others))
        restore.moved_tokens = len(restore.origins) * self._kept.block_tokens
        if restore.tail_came and restore.plan.tail is not None:
            restore.moved_tokens += restore.plan.tail.tokens
        if restore.plan.snapshot:
            restore.moved_tokens += self.snapshot_tokens
        return ""

    async def _bring_snapshot(self, restore: Restore, files: Files | None) -> None:
        snapshot, last = restore.snapshot, len(restore.plan.chain) - 1
        if snapshot is None:
            return
        place = restore.place(self._kept, (last + 1) * self._kept.block_tokens)
        if place is not None and await self._bring(
            self.snapshots, restore, snapshot, last, place, files
        ):
            restore.restored = True
            self._counters.add("host_snapshots_restored")
            if not snapshot.pieces:
                self._counters.add("disk_snapshots_restored")

    async def _bring_tail(self, restore: Restore) -> None:
        """The copy is of no use after the sequence has gone on."""
        tail, rank, plan = restore.tail, restore.plan.rank, restore.plan.tail
        room = len(restore.pages) * self._limits.page_size
        if tail is None or plan is None or plan.end > room:
            return
        if await self._copy_in(self.blocks, tail, rank, restore.pages):
            restore.tail_came = True
            if self.blocks.forget(tail):
                self._release((tail,))

    async def _bring(
        self,
        shelf: Shelf,
        restore: Restore,
        block: TierBlock,
        index: int,
        pages: tuple[int, ...],
        files: Files | None,
    ) -> bool:
        rank = restore.plan.rank
        if block.pieces or files is None:
            return await self._copy_in(shelf, block, rank, pages)
        name, end = restore.plan.chain[index], (index + 1) * self._kept.block_tokens
        loaded = await self._load(shelf, rank, name, end, block, files)
        if loaded is None:
            return False
        try:
            intact = await self._copy_in(shelf, loaded, rank, pages)
            if not intact:
                files.broken(block)
            return intact
        finally:
            shelf.let_go((loaded,))

    async def _copy_in(
        self, shelf: Shelf, block: TierBlock, rank: int, pages: tuple[int, ...]
    ) -> bool:
        if await self._insert(block.pieces, rank, pages):
            return True
        if shelf.forget(block):
            of_snapshots = shelf is self.snapshots
            self._counters.add("host_snapshots_broken" if of_snapshots else "host_blocks_broken")
            self._drop(shelf, (block,), "broken")
        return False

    async def _insert(
        self, pieces: tuple[HostPiece, ...], rank: int, pages: tuple[int, ...]
    ) -> bool:
        """Returns whether all pieces are written and all checksums match. After a cancellation or
        an error nothing more is written, so the pages may be reused immediately."""

        def place(tokens: int) -> tuple[int, ...]:
            return pages[: pages_for(tokens, self._limits.page_size)]

        def snapshot(kind: KvKind, tokens: int) -> tuple[int, ...]:
            return pages[:1] if kind is KvKind.STATE else place(tokens)

        to = Destination(self._limits, rank, place, snapshot=snapshot)
        blocks = ArrivingBlocks(self._loop, to, lambda: self._link, COPY_SECONDS, "host memory")

        async def insert(piece: HostPiece) -> bool:
            blocks.offered(piece.offer)
            pulled = await blocks.pull(piece.offer)
            if pulled is None or pulled.error:
                return False
            return not blocks.verify(piece.offer, await blocks.insert(piece.offer), piece.checksum)

        return all(await together(map(insert, pieces)))

    def failed(self, cause: str) -> None:
        if cause == "late":
            self._counters.add("host_restores_late")
        elif cause == "failed":
            self._counters.add("host_restores_failed")

    # ---- dropped blocks

    def _drop(self, shelf: Shelf, gone: tuple[TierBlock, ...], cause: str) -> None:
        if gone and shelf is self.blocks:
            self._counters.add("host_blocks_dropped", len(gone), cause=cause)
            for block in [one for one in gone if not one.tail]:
                if block.written:
                    self._kept.log.lost(block.name)
                self._kept.promote(block.name)
        self._release(gone)

    def _release(self, gone: tuple[TierBlock, ...]) -> None:
        """Also those that are still being copied to host memory."""
        if ids := tuple([offer_id for block in gone for offer_id in block.offer_ids]):
            self._loop.fire(ReleaseOffers(self._loop.next_number(), ids, from_host=True))


async def _sums(copies: "list[asyncio.Future[StepResult]]") -> tuple[int, ...] | None:
    try:
        results = await asyncio.gather(*copies)
    except JdisaggError:
        return None
    return tuple([one.checksum.checksum for one in results if isinstance(one, ExtractResult)])
