"""The disk tier of a mesh: writes cached KV blocks to disk at their second use and restores them.
Blocks survive a restart of the worker.

Blocks are copied to disk from host memory and restored through host memory (`worker/host_tier.py`).
The executor owns the files (`transfer/disk_store.py`); this module issues the commands. Block names
stay the same as long as the cluster's secret does. A failure of the disk is counted (`disk_errors`)
and has the effect of a cache miss. Only `erase` raises an error, because files that cannot be
removed would be restored after a restart."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.step_commands import (
    SLOW,
    DiskCommand,
    DiskResult,
    FindSaved,
    LoadBlock,
    RemoveSaved,
    SaveBlock,
    StepResult,
)
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES, DiskBlocks, restorable
from jdisagg.scheduler.host_blocks import TierBlock, TierRoom
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.host_tier import HostTier, Tier
from jdisagg.worker.kv_sources import Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.step_loop import StepLoop

FILE_SECONDS = 10.0  # deadline for one block; the disk counts as slow beyond it
FIND_SECONDS = 600.0  # deadline for listing the directory
START_SECONDS = 5.0  # longest wait at the start; a longer listing continues in the background
RESET_SECONDS = 60.0


SNAPSHOT_MARK = b"snapshot"  # a block's name is a hash and does not begin with this


def _saved_name(name: bytes) -> bytes:
    return (SNAPSHOT_MARK + name)[: len(name)]


class DiskTier(Tier[DiskBlocks]):
    """The disk as a source of cached blocks (`KvSource`). It has no room if `host` is off."""

    name: Origin = "disk"

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        host: HostTier,
        room: TierRoom,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        of_snapshots = host.bytes_of_snapshots(room.disk_bytes) if host.on else 0
        of_blocks = room.disk_bytes - of_snapshots if host.on else 0
        block_bytes = host.blocks.block_bytes + FILE_EXTRA_BYTES
        nbytes = host.snapshot_bytes + FILE_EXTRA_BYTES
        super().__init__(
            DiskBlocks(of_blocks // block_bytes, kept.retained, block_bytes),
            DiskBlocks(of_snapshots // nbytes, None, nbytes),  # by names of `_saved_name`
            room,
        )
        self._named: dict[bytes, bytes] = {}  # block names of snapshots to be written
        self._ttl_seconds = room.disk_ttl_seconds
        self._kept = kept
        self._loop = loop
        self._host = host
        self._counters = counters
        self._now = now
        self._open = False
        self._epoch = 0  # increases when blocks are cleared

    async def start(self) -> None:
        await asyncio.wait({self._tasks.spawn(self._find())}, timeout=START_SECONDS)

    async def _find(self) -> None:
        epoch, kept = self._epoch, self._kept
        namespace = kept.digest(b"jdisagg disk", self._host.geometry())
        found = await self._run(FindSaved(self._loop.next_number(), namespace, FIND_SECONDS))
        for cause, count in found.skipped:
            self._counters.add("disk_errors", count, cause=cause)
        if found.error:
            return
        self._open = True
        if epoch == self._epoch:
            now = self._now()
            written_at = [now - age for age in found.ages]
            named = dict(zip(found.names, written_at, strict=True))
            marked = {name: at for name, at in named.items() if name.startswith(SNAPSHOT_MARK)}
            blocks = {name: at for name, at in named.items() if name not in marked}
            stay, gone = self.blocks.found(blocks)
            for name in stay:
                kept.log.gained(name)
            self._counters.add("disk_blocks_found", len(stay))
            self._count_dropped(len(gone), "room")
            self._remove_files((*gone, *self.snapshots.found(marked)[1]))
            self.expire(now)

    # ---- writing

    def used(self, rank: int, chain: Chain) -> None:
        if self._open:
            self._counters.add("disk_blocks_skipped", self.blocks.use(rank, chain))
            if self._kept.snapshots and chain and chain[-1] in self._kept.snapshots[rank]:
                saved = _saved_name(chain[-1])
                if saved not in self.snapshots:
                    self._named[saved] = chain[-1]
                self.snapshots.use(rank, (saved,))
            self._write_more()

    def _write_more(self) -> None:
        for shelf in (self.blocks, self.snapshots):
            while self._loop.failure is None:
                block, gone = shelf.take()
                self._drop(shelf, gone, "room")
                if block is None:
                    break
                name = self._named.get(block.name, block.name)
                self._tasks.spawn(self._write(shelf, block, name))
        if not self.snapshots.wanted:
            self._named.clear()

    async def _write(self, shelf: DiskBlocks, block: TierBlock, name: bytes) -> None:
        """`name`: that of the block, or of the block before the snapshot."""
        error, done, snapshot = "", False, shelf is self.snapshots
        try:
            host = await self._host.copied(block.rank, name, block.index, snapshot)
            if host is not None and shelf.knows(block):
                error = await self._save(block, host)
                if not error and shelf.written(block, now=self._now()):
                    done = True
                    self._counters.add(
                        "disk_snapshots_written" if snapshot else "disk_blocks_written"
                    )
                    if not snapshot:
                        self._kept.log.gained(name)
        finally:
            if not done and shelf.not_written(block, bool(error)) and not error:
                self._counters.add("disk_blocks_skipped")
        self._write_more()

    async def _save(self, block: TierBlock, host: TierBlock) -> str:
        number, sums = self._loop.next_number(), tuple([one.checksum for one in host.pieces])
        command = SaveBlock(number, block.name, block.index, host.offer_ids, sums, FILE_SECONDS)
        saved = await self._run(command)
        if not saved.error:
            self._counters.add("disk_bytes_written", saved.bytes_moved)
        elif saved.error == SLOW:
            self._remove_files((block.name,))  # it may still be written later
        return saved.error

    # ---- restoring

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        self.expire(self._now())
        chain, host = query.chain, self._host
        runs = {
            rank: restorable(chain[query.known[rank] :], host.blocks, self.blocks)
            for rank in query.ranks
        }

        def snapshot(end: int) -> int | None:
            name = chain[end - 1]
            if host.has_snapshot(name):
                return 0
            return host.snapshot_tokens if self._readable(name) else None

        return self.plan(self._kept, query, runs, snapshot, tail=host.tail_behind)

    def _readable(self, name: bytes) -> bool:
        return self.snapshots.arrived(_saved_name(name)) is not None

    @contextmanager
    def holding(self, restore: Restore) -> Iterator[None]:
        self.expire(self._now())
        chain, host = restore.plan.chain, self._host
        saved = {
            index: name
            for index, name in enumerate(chain)
            if name not in host.blocks and self.blocks.arrived(name)
        }
        blocks = self.blocks.hold(saved.values())
        restore.held.update(zip(saved, blocks, strict=True))
        wanted = restore.plan.snapshot and not host.has_snapshot(chain[-1])
        wanted = wanted and self._readable(chain[-1])
        held = self.snapshots.hold([_saved_name(chain[-1])]) if wanted else ()
        try:
            with host.holding(restore):
                restore.snapshot = next(iter(held), restore.snapshot)
                yield
        finally:
            self.blocks.let_go(blocks)
            self.snapshots.let_go(held)

    async def bring(self, restore: Restore) -> str:
        await self._host.bring(restore, self)
        # blocks that could not be read took time, too
        restore.moved_tokens = restore.plan.moved_tokens
        return ""

    async def read(
        self, file: TierBlock, index: int, offer_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        read = await self._run(
            LoadBlock(self._loop.next_number(), file.name, index, offer_ids, FILE_SECONDS)
        )
        if not read.error:
            self._counters.add("disk_blocks_read")
            self._counters.add("disk_bytes_read", read.bytes_moved)
            return read.checksums
        if read.error != SLOW:
            self.broken(file)
        return ()

    def failed(self, cause: str) -> None:
        self._host.failed(cause)

    # ---- dropped blocks

    def expire(self, now: float) -> None:
        if self._ttl_seconds:
            for shelf in (self.blocks, self.snapshots):
                self._drop(shelf, shelf.expire(now - self._ttl_seconds), "expired")

    def drop(self, names: Collection[bytes]) -> None:
        self._drop(self.blocks, self.blocks.drop(names), "session")
        self._drop(self.snapshots, self.snapshots.drop(map(_saved_name, names)), "session")

    def clear(self, cause: str) -> int:
        self._epoch += 1
        gone = self.blocks.clear()
        self.snapshots.clear()
        self._lost(gone, cause)
        return len(gone)

    async def erase(self) -> None:
        command = RemoveSaved(self._loop.next_number(), (), RESET_SECONDS, everything=True)
        removed = await self._run(command)
        if removed.error:
            raise UnavailableError(
                f"KV on disk could not be removed ({removed.error}) and would be used again after a"
                " restart; empty the folder of --disk_cache_dir, or repair the disk and reset again"
            )

    def broken(self, file: TierBlock) -> None:
        if self.blocks.forget(file):
            self._drop(self.blocks, (file,), "broken")
        elif self.snapshots.forget(file):
            self._counters.add("disk_snapshots_broken")
            self._drop(self.snapshots, (file,), "broken")

    def _drop(self, shelf: DiskBlocks, gone: tuple[TierBlock, ...], cause: str) -> None:
        if shelf is self.blocks:
            self._lost(gone, cause)
        self._remove_files(tuple([block.name for block in gone]))

    def _lost(self, gone: tuple[TierBlock, ...], cause: str) -> None:
        self._count_dropped(len(gone), cause)
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)

    def _count_dropped(self, blocks: int, cause: str) -> None:
        if blocks:
            self._counters.add("disk_blocks_dropped", blocks, cause=cause)

    def _remove_files(self, names: tuple[bytes, ...]) -> None:
        if not names:
            return
        # issued now, before any later write of the same names
        removing = self._issue(RemoveSaved(self._loop.next_number(), names, RESET_SECONDS))
        self._tasks.spawn(self._end(removing))

    # ---- commands

    async def _run(self, command: DiskCommand) -> DiskResult:
        return await self._end(self._issue(command))

    def _issue(self, command: DiskCommand) -> "asyncio.Future[StepResult] | None":
        try:
            return self._loop.submit(command)
        except JdisaggError:
            return None

    async def _end(self, running: "asyncio.Future[StepResult] | None") -> DiskResult:
        result: StepResult = DiskResult(0, "mesh")
        if running is not None:
            with contextlib.suppress(JdisaggError):
                result = await asyncio.shield(running)
        assert isinstance(result, DiskResult)
        if result.error:
            self._counters.add("disk_errors", cause=result.error)
        return result
