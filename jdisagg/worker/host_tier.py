"""The host-memory tier of a mesh: copies cached blocks to host memory before their pages are
reused, and restores them. Blocks of preempted sequences are copied in any case, others only if
enough blocks are requested again (`AskedAgain`).

The copy is queued on the mesh before the next command after the pages got another owner, so it runs
before any command that overwrites the pages. If a checksum differs, the block is dropped and counts
as a miss."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import Offer
from jdisagg.messages.step_commands import ExtractResult, StepResult
from jdisagg.messages.worker_status import KeptTier, WorkerRole
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import (
    MOST_WRITING,
    MOST_WRITING_OF_DECODE,
    AskedAgain,
    HostBlock,
    HostBlocks,
    HostPiece,
    TierRoom,
)
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain, Evicted, Residency
from jdisagg.scheduler.snapshots import EvictedSnapshot
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.block_moves import HostPieces
from jdisagg.worker.kv_sources import KvSource, Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.outgoing_kv import offers_of_pages, snapshot_offers
from jdisagg.worker.step_loop import StepLoop

BLOCKS_AT_ONCE = 4  # number of blocks of one restore that are copied at the same time
MOST_SNAPSHOTS_WRITING = 4  # most snapshots that are copied to host memory at the same time


# function that reads pieces under these offer ids and returns their checksums, or () after a
# failure
Read = Callable[[tuple[int, ...]], Awaitable[tuple[int, ...]]]


class HostTier(KvSource):
    """Host memory as a source of cached blocks (`KvSource`)."""

    name: Origin = "host"
    most_restores = 4
    most_seconds = None

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
        self.block_bytes = kept.block_tokens * limits.sent.bytes_per_token
        self.snapshot_bytes = limits.snapshot_bytes if kept.snapshots else 0
        self.snapshot_part = limits.snapshot_part if kept.snapshots else 0.0
        of_snapshots = self.bytes_of_snapshots(room.host_bytes)
        of_blocks = room.host_bytes - of_snapshots
        capacity = of_blocks // self.block_bytes if self.block_bytes else 0
        self.blocks = HostBlocks(capacity, room.rank_bound, kept.retained)
        # by the names of their blocks
        self.snapshots = HostBlocks(of_snapshots // self.snapshot_bytes if of_snapshots else 0)
        self._asked = AskedAgain(capacity, room.always)
        self._snapshots_asked = AskedAgain(self.snapshots.capacity, room.always)
        self.on = self.blocks.capacity > 0
        self.prices = Prices(room.always)
        self._kept = kept
        self._loop = loop
        self._limits = limits
        self._ids = ids
        self._counters = counters
        self._tasks = BackgroundTasks()
        self._copies: dict[bytes, asyncio.Task[None]] = {}  # blocks being copied out
        self._snapshot_copies: dict[bytes, asyncio.Task[None]] = {}
        key = 0
        if self.on:
            # The key is the same in the next run of the worker, which reads the blocks on disk.
            key = int.from_bytes(kept.digest(b"jdisagg sums")[:8], "little") >> 1
        self._pieces = HostPieces(loop, limits.page_size, key)
        self.take_role(role)

    def take_role(self, role: WorkerRole) -> None:
        self._most_writing = MOST_WRITING_OF_DECODE if role.decodes else MOST_WRITING

    def bytes_of_snapshots(self, room_bytes: int) -> int:
        """One snapshot always fits, unless it takes more than half of the tier."""
        if not self.snapshot_part:
            return 0
        least = min(self.snapshot_bytes + FILE_EXTRA_BYTES, room_bytes // 2)
        return max(least, int(room_bytes * self.snapshot_part))

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet

    def stats(self) -> tuple[KeptTier, ...]:
        found = ((self.blocks, self.block_bytes), (self.snapshots, self.snapshot_bytes))
        used = sum([len(blocks) * size for blocks, size in found])
        room = sum([blocks.capacity * size for blocks, size in found])
        return (KeptTier(self.name, len(self.blocks), used, room),)

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        return self.blocks.listed(self._kept.block_tokens)

    def clear(self, cause: str) -> int:
        gone = self.blocks.clear()
        if gone:
            self._counters.add("host_blocks_dropped", len(gone), cause=cause)
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)
        self._release((*gone, *self.snapshots.clear()))
        return len(gone)

    def drop(self, names: Collection[bytes]) -> None:
        """Drops these blocks and snapshots, also those that are being copied."""

        def dropped(blocks: HostBlocks) -> tuple[HostBlock, ...]:
            known = blocks.hold(tuple([name for name in names if name in blocks]))
            return tuple(filter(blocks.forget, known))

        gone = dropped(self.blocks)
        self._drop(tuple([block for block in gone if block.written]), "session")
        unwritten = [block for block in gone if not block.written]
        self._release((*unwritten, *dropped(self.snapshots)))

    def stop(self) -> None:
        self._tasks.cancel()

    def offers(self, rank: int, index: int) -> tuple[Offer, ...]:
        tokens = self._kept.block_tokens
        start = index * tokens
        return tuple(offers_of_pages(self._limits, rank, start, start + tokens, self._ids))

    def snapshot_offers(self) -> tuple[Offer, ...]:
        """Empty if cache hits need no snapshots."""
        if not self.snapshot_part:
            return ()
        return snapshot_offers(self._limits, 0, self._limits.context_tokens, self._ids)

    # ---- copying out

    def copy_evicted(self) -> None:
        """Copies what was evicted from pages. Must be called before the next command is issued. If
        not all blocks can be copied, those are that are nearest to the start of their sequences,
        because a block is of use only after all blocks before it. They are copied last, so that
        they also stay longer."""
        evicted = self._kept.take_evicted()
        if not (evicted or self._kept.snapshots):
            return
        snapshots = [
            (rank, gone)
            for rank, of_rank in enumerate(self._kept.snapshots)
            for gone in of_rank.take_evicted()
        ]
        if not self.on:
            return
        for rank, gone in snapshots:
            self._snapshot_evicted(rank, gone)
        chosen: list[tuple[Evicted, int]] = []
        places, writing = {True: MOST_WRITING, False: self._most_writing}, self.blocks.writing
        for one in sorted(evicted, key=lambda one: (not one.awaited, one.index)):
            self._asked.evicted(one.name)
            if one.name in self.blocks:
                continue
            if not one.awaited and not self._asked.worth_copying:
                self._counters.add("host_blocks_declined")
            elif writing + len(chosen) < places[one.awaited]:
                chosen.append((one, places[one.awaited]))
            else:
                self._counters.add("host_blocks_skipped")
        for one, most_writing in reversed(chosen):
            self._copy_out(one.rank, one.name, one.index, one.pages, most_writing)

    def _snapshot_evicted(self, rank: int, gone: EvictedSnapshot) -> None:
        self._snapshots_asked.evicted(gone.name)
        if self._snapshots_asked.worth_copying:
            self._copy_snapshot(rank, gone)
        elif gone.name not in self.snapshots:
            self._counters.add("host_snapshots_declined")

    def _copy_out(
        self, rank: int, name: bytes, index: int, pages: tuple[int, ...], most_writing: int
    ) -> None:
        if self._loop.failure is not None or name in self.blocks:
            return
        if self.blocks.writing >= most_writing:
            self._counters.add("host_blocks_skipped")
            return
        offers = self.offers(rank, index)
        block = self._add(name, offers)
        if block is None:
            return
        # page 0 is a placeholder for the pages of the sequence's earlier blocks, which are not read
        before = (0,) * (index * self._kept.block_tokens // self._limits.page_size)
        copies = [self._pieces.copy_out(offer, (*before, *pages)) for offer in offers]
        task = self._copies[name] = self._tasks.spawn(self._write(block, copies))
        task.add_done_callback(lambda _: self._copied_out(name, task))

    def _copy_snapshot(self, rank: int, gone: EvictedSnapshot) -> None:
        """The copy is queued on the mesh, so the snapshot may be overwritten by later commands."""
        snapshots, name = self.snapshots, gone.name
        if self._loop.failure is not None or name in snapshots or not snapshots.capacity:
            return
        if snapshots.writing >= MOST_SNAPSHOTS_WRITING:
            self._counters.add("host_snapshots_skipped")
            return
        offers = snapshot_offers(self._limits, rank, gone.tokens, self._ids)
        snapshot, dropped = snapshots.begin(name, tuple(map(HostPiece, offers)))
        self._release(dropped)
        if snapshot is not None:
            copies = [self._pieces.copy_out(offer, gone.place) for offer in offers]
            task = self._tasks.spawn(self._write_snapshot(snapshot, copies))
            self._snapshot_copies[name] = task
            task.add_done_callback(lambda _: self._snapshot_copies.pop(name, None))

    def _copied_out(self, name: bytes, task: "asyncio.Task[None]") -> None:
        if self._copies.get(name) is task:
            del self._copies[name]

    async def copied(self, rank: int, name: bytes, index: int) -> HostBlock | None:
        """Returns a block in host memory. If the block is only in pages of `rank`, copies it to
        host memory first. Returns None if the block is in neither place."""
        pages = self._kept.pages(rank, name)
        if pages:
            self._copy_out(rank, name, index, pages, self._most_writing)
        if (task := self._copies.get(name)) is not None:
            await asyncio.wait({task})
        return self.blocks.arrived(name)

    async def copied_snapshot(self, rank: int, name: bytes) -> HostBlock | None:
        kept = self._kept.snapshots[rank]
        if name in kept:
            self._copy_snapshot(rank, EvictedSnapshot(name, kept.tokens(name), kept.place(name)))
        if (task := self._snapshot_copies.get(name)) is not None:
            await asyncio.wait({task})
        return self.snapshots.arrived(name)

    async def load_snapshot(self, plan: RestorePlan, read: Read) -> HostBlock | None:
        """Reads the snapshot at the end of a plan's chain from disk into host memory. Like `load`,
        prevents its eviction, and returns None if there is no room or reading failed."""
        name, tokens = plan.chain[-1], len(plan.chain) * self._kept.block_tokens
        offers = snapshot_offers(self._limits, plan.rank, tokens, self._ids)
        snapshot, gone = self.snapshots.begin(name, tuple(map(HostPiece, offers)))
        self._release(gone)
        if snapshot is None:
            return None
        arrived = False
        try:
            sums = await read(snapshot.offer_ids)
            arrived = bool(sums) and self.snapshots.written(snapshot, _summed(snapshot, sums))
        finally:
            if not arrived and self.snapshots.forget(snapshot):
                self._release((snapshot,))
        return self.snapshots.hold((name,))[0] if arrived else None

    def _add(self, name: bytes, offers: tuple[Offer, ...]) -> HostBlock | None:
        block, gone = self.blocks.begin(name, tuple(map(HostPiece, offers)))
        self._drop(gone, "room")
        return block

    async def _write(self, block: HostBlock, copies: "list[asyncio.Future[StepResult]]") -> None:
        sums = await _sums(copies)
        if sums is None:
            if self.blocks.forget(block):
                self._counters.add("host_blocks_failed")
                self._release((block,))
        elif self._complete(block, sums):
            self._counters.add("host_blocks_written")

    async def _write_snapshot(
        self, snapshot: HostBlock, copies: "list[asyncio.Future[StepResult]]"
    ) -> None:
        sums = await _sums(copies)
        if sums is None:
            if self.snapshots.forget(snapshot):
                self._release((snapshot,))
        elif self.snapshots.written(snapshot, _summed(snapshot, sums)):
            self._counters.add("host_snapshots_written")

    def _complete(self, block: HostBlock, checksums: tuple[int, ...]) -> bool:
        written = self.blocks.written(block, _summed(block, checksums))
        if written:
            self._kept.log.gained(block.name)
        return written

    async def load(self, name: bytes, offers: tuple[Offer, ...], read: Read) -> HostBlock | None:
        """Reads a block from disk into host memory and prevents its eviction. Returns None if host
        memory has no room or reading failed."""
        block = self._add(name, offers)
        if block is None:
            return None
        arrived = False
        try:
            checksums = await read(block.offer_ids)
            arrived = bool(checksums) and self._complete(block, checksums)
        finally:
            if not arrived and self.blocks.forget(block):
                self._release((block,))
        return self.blocks.hold((name,))[0] if arrived else None

    # ---- restoring

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        for name in query.chain[max(query.known) :]:
            if name not in self._asked and name not in self.blocks:
                break
            self._asked.asked(name)
        found = {
            rank: self.blocks.match(query.chain, query.known[rank], rank) for rank in query.ranks
        }
        reach = {rank: query.known[rank] + count for rank, count in found.items()}
        if self._kept.snapshots:
            return self._worth_of_snapshots(query, [*reach.values()])
        rank = max(reach, key=reach.__getitem__)
        tokens = found[rank] * self._kept.block_tokens
        if not self.prices.worth(tokens, tokens, query.instead):
            return None
        chain = query.chain[: query.known[rank] + found[rank]]
        return RestorePlan(self, rank, chain, tokens, tokens, instead=query.instead)

    def _worth_of_snapshots(self, query: RestoreQuery, reach: list[int]) -> RestorePlan | None:
        kept, size = self._kept, self._kept.block_tokens
        for name in reversed(query.chain[: max(reach)]):
            if name in self._snapshots_asked:
                self._snapshots_asked.asked(name)
                break
            if self.has_snapshot(name) or any(name in of_rank for of_rank in kept.snapshots):
                break
        rank, end = self.last_snapshot(query.chain, reach, self.has_snapshot)
        chain, known = query.chain[:end], min(query.known[rank], end)
        whole = end * size
        tokens = whole - kept.cached_tokens(rank, chain, whole, to_compute=True)
        if not tokens:
            return None
        snapshot = chain[-1] not in kept.snapshots[rank]
        moved = whole - known * size + snapshot * self.snapshot_tokens
        if not self.prices.worth(moved, tokens):
            return None
        return RestorePlan(self, rank, chain, tokens, moved, snapshot=snapshot)

    def last_snapshot(
        self, chain: Chain, reach: list[int], elsewhere: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """Finds the longest prefix of the chain that has a snapshot at its end, on the rank itself
        or elsewhere. Returns the rank and the number of blocks of this prefix, which is 0 if there
        is none."""
        ends = [
            next(
                (
                    end
                    for end in range(most, 0, -1)
                    if chain[end - 1] in self._kept.snapshots[rank] or elsewhere(chain[end - 1])
                ),
                0,
            )
            for rank, most in enumerate(reach)
        ]
        return ends.index(max(ends)), max(ends)

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
        held = self.blocks.hold(tuple(here.values()))
        restore.held.update(zip(here, held, strict=True))
        wanted = restore.plan.snapshot and self.has_snapshot(chain[-1])
        snapshots = self.snapshots.hold(chain[-1:]) if wanted else ()
        restore.snapshot = next(iter(snapshots), None)
        try:
            yield
        finally:
            self.blocks.let_go(held)
            self.snapshots.let_go(snapshots)

    async def bring(
        self, restore: Restore, elsewhere: Callable[[int], Awaitable[None]] | None = None
    ) -> str:
        """Copies the blocks of a restore to its reserved pages, a few at a time. `elsewhere`:
        function that restores a block from another tier, given its index. It is called for each
        block that is not in host memory."""
        slots = asyncio.Semaphore(BLOCKS_AT_ONCE)

        async def bring(index: int) -> None:
            async with slots:
                block = restore.held.get(index)
                if not isinstance(block, HostBlock):
                    if elsewhere is not None:
                        await elsewhere(index)
                elif await self.copy_in(block, restore):
                    restore.origins[index] = "host"

        missing = range(restore.first, len(restore.plan.chain))
        await asyncio.gather(*[bring(index) for index in missing], self.bring_snapshot(restore))
        restore.moved_tokens = len(restore.origins) * self._kept.block_tokens
        if restore.plan.snapshot:
            restore.moved_tokens += self.snapshot_tokens
        return ""

    async def bring_snapshot(self, restore: Restore) -> None:
        snapshot, plan = restore.snapshot, restore.plan
        if not isinstance(snapshot, HostBlock):
            return
        place = restore.place(self._kept, len(plan.chain) * self._kept.block_tokens)
        if place is None:
            return
        if await self._pieces.bring_back(snapshot.pieces, plan.rank, place):
            restore.restored = True
            self._counters.add("host_snapshots_restored")
        elif self.snapshots.forget(snapshot):
            self._counters.add("host_snapshots_broken")
            self._release((snapshot,))

    async def copy_in(self, block: HostBlock, restore: Restore) -> bool:
        """Returns whether the block is intact."""
        if await self._pieces.bring_back(block.pieces, restore.plan.rank, restore.pages):
            return True
        if self.blocks.forget(block):
            self._counters.add("host_blocks_broken")
            self._drop((block,), "broken")
        return False

    def failed(self, cause: str) -> None:
        if cause == "late":
            self._counters.add("host_restores_late")
        elif cause == "failed":
            self._counters.add("host_restores_failed")

    # ---- dropped blocks

    def _drop(self, gone: tuple[HostBlock, ...], cause: str) -> None:
        if gone:
            self._counters.add("host_blocks_dropped", len(gone), cause=cause)
            for block in gone:
                self._kept.log.lost(block.name)
                self._kept.promote(block.name)
            self._release(gone)

    def _release(self, gone: tuple[HostBlock, ...]) -> None:
        self._pieces.release(tuple([offer_id for block in gone for offer_id in block.offer_ids]))


async def _sums(copies: "list[asyncio.Future[StepResult]]") -> tuple[int, ...] | None:
    try:
        results = await asyncio.gather(*copies)
    except JdisaggError:
        return None
    return tuple([one.checksum.checksum for one in results if isinstance(one, ExtractResult)])


def _summed(block: HostBlock, checksums: tuple[int, ...]) -> tuple[HostPiece, ...]:
    pieces = zip(block.pieces, checksums, strict=True)
    return tuple([replace(piece, checksum=checksum) for piece, checksum in pieces])
