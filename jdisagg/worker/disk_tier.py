"""The disk tier of a mesh: writes cached KV blocks to disk at their second use and restores them.
Blocks survive a restart of the worker.

Blocks are copied to disk from host memory and restored through host memory (`worker/host_tier.py`).
The executor owns the files (`transfer/disk_store.py`); this module issues the commands. Block names
stay the same as long as the cluster's secret does. A failure of the disk is counted (`disk_errors`)
and has the effect of a cache miss. Only `erase` raises an error, because files that cannot be
removed would be restored after a restart."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
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
from jdisagg.messages.worker_status import KeptTier
from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES, DiskBlock, DiskBlocks, restorable
from jdisagg.scheduler.host_blocks import HostBlock, TierRoom
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.host_tier import HostTier
from jdisagg.worker.kv_sources import KvSource, Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.step_loop import StepLoop

FILE_SECONDS = 10.0  # deadline for one block; the disk counts as slow beyond it
FIND_SECONDS = 600.0  # deadline for listing the directory
START_SECONDS = 5.0  # longest wait at the start; a longer listing continues in the background
RESET_SECONDS = 60.0


SNAPSHOT_MARK = b"snapshot"  # a block's name is a hash and does not begin with this


def _saved_name(name: bytes) -> bytes:
    return (SNAPSHOT_MARK + name)[: len(name)]


class DiskTier(KvSource):
    """The disk as a source of cached blocks (`KvSource`). `room`: capacity of the disk tier. The
    tier is off if its number of bytes is 0 or if `host` is off."""

    name: Origin = "disk"
    most_restores = 4
    most_seconds = None

    def __init__(
        self,
        kept: Residency,
        loop: StepLoop,
        host: HostTier,
        room: TierRoom,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        self._file_bytes = host.block_bytes + FILE_EXTRA_BYTES
        self._snapshot_file_bytes = host.snapshot_bytes + FILE_EXTRA_BYTES
        of_snapshots = host.bytes_of_snapshots(room.disk_bytes) if host.on else 0
        of_blocks = room.disk_bytes - of_snapshots
        capacity = of_blocks // self._file_bytes if host.on else 0
        self.blocks = DiskBlocks(capacity, kept.retained)
        # by the names that `_saved_name` returns
        self.snapshots = DiskBlocks(of_snapshots // self._snapshot_file_bytes)
        self._named: dict[bytes, bytes] = {}  # block names of snapshots to be written
        self.prices = Prices(room.always)
        self._ttl_seconds = room.disk_ttl_seconds
        self._kept = kept
        self._loop = loop
        self._host = host
        self._counters = counters
        self._now = now
        self._open = False
        self._epoch = 0  # increases when blocks are cleared
        self._tasks = BackgroundTasks()

    @property
    def on(self) -> bool:
        return self.blocks.capacity > 0

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet

    def stats(self) -> tuple[KeptTier, ...]:
        found = ((self.blocks, self._file_bytes), (self.snapshots, self._snapshot_file_bytes))
        used = sum([len(blocks) * size for blocks, size in found])
        room = sum([blocks.capacity * size for blocks, size in found])
        return (KeptTier(self.name, len(self.blocks), used, room),)

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        return self.blocks.listed()

    async def start(self) -> None:
        await asyncio.wait({self._tasks.spawn(self._find())}, timeout=START_SECONDS)

    def stop(self) -> None:
        self._tasks.cancel()

    async def _find(self) -> None:
        epoch = self._epoch
        cuts = [
            (one.kind.value, one.group, one.groups, one.start, one.valid_tokens, one.block_tokens)
            for one in (*self._host.offers(0, 0), *self._host.snapshot_offers())
        ]
        geometry = f"blocks of {self._kept.block_tokens} tokens as {cuts}"
        namespace = self._kept.digest(b"jdisagg disk", geometry)
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
                self._kept.log.gained(name)
            self._counters.add("disk_blocks_found", len(stay))
            self._remove((*gone, *self.snapshots.found(marked)[1]), "room")
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
        while self._loop.failure is None:
            block, gone = self.blocks.take()
            self._gone(gone, "room")
            if block is None:
                break
            self._tasks.spawn(self._write(block))
        while self._loop.failure is None:
            snapshot, gone = self.snapshots.take()
            self._remove(gone, "room")
            if snapshot is None:
                break
            self._tasks.spawn(self._write_snapshot(snapshot))

    async def _write_snapshot(self, snapshot: DiskBlock) -> None:
        error, done = "", False
        try:
            name = self._named.pop(snapshot.name, b"")
            host = await self._host.copied_snapshot(snapshot.rank, name)
            if host is not None and self.snapshots.knows(snapshot):
                error = await self._save(snapshot, host)
                if not error and self.snapshots.written(snapshot, self._now()):
                    done = True
                    self._counters.add("disk_snapshots_written")
        finally:
            if not done:
                self.snapshots.not_written(snapshot, bool(error))
        self._write_more()

    async def _save(self, block: DiskBlock, host: HostBlock) -> str:
        sums = tuple([piece.checksum for piece in host.pieces])
        saved = await self._run(
            SaveBlock(
                self._loop.next_number(),
                block.name,
                block.index,
                host.offer_ids,
                sums,
                FILE_SECONDS,
            )
        )
        if not saved.error:
            self._counters.add("disk_bytes_written", saved.bytes_moved)
        elif saved.error == SLOW:
            self._remove_files((block.name,))  # it may still be written later
        return saved.error

    async def _write(self, block: DiskBlock) -> None:
        error, done = "", False
        try:
            host = await self._host.copied(block.rank, block.name, block.index)
            if host is not None and self.blocks.knows(block):
                error = await self._save(block, host)
                if not error and self.blocks.written(block, self._now()):
                    done = True
                    self._counters.add("disk_blocks_written")
                    self._kept.log.gained(block.name)
        finally:
            if not done and self.blocks.not_written(block, bool(error)) and not error:
                self._counters.add("disk_blocks_skipped")
        self._write_more()

    # ---- restoring

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        self.expire(self._now())
        chain, size = query.chain, self._kept.block_tokens
        host = self._host.blocks
        found = {
            rank: restorable(chain[query.known[rank] :], host, self.blocks) for rank in query.ranks
        }
        reach = {rank: query.known[rank] + len(run) for rank, run in found.items()}
        if self._kept.snapshots:
            return self._worth_of_snapshots(query, [*found.values()], [*reach.values()])
        rank = max(reach, key=reach.__getitem__)
        tokens, on_disk = len(found[rank]) * size, sum(found[rank]) * size
        if not self.prices.worth(on_disk, tokens, query.instead):
            return None
        chain = chain[: query.known[rank] + len(found[rank])]
        tail = self._host.tail_behind(query, chain, rank)
        return RestorePlan(self, rank, chain, tokens, on_disk, instead=query.instead, tail=tail)

    def _worth_of_snapshots(
        self, query: RestoreQuery, found: list[tuple[bool, ...]], reach: list[int]
    ) -> RestorePlan | None:
        kept, host = self._kept, self._host
        rank, end = host.last_snapshot(
            query.chain, reach, lambda name: host.has_snapshot(name) or self._readable(name)
        )
        chain, known, whole = query.chain[:end], query.known[rank], end * kept.block_tokens
        tokens = whole - kept.cached_tokens(rank, chain, whole, to_compute=True)
        if not tokens:
            return None
        snapshot = chain[-1] not in kept.snapshots[rank]
        moved = sum(found[rank][: max(0, end - known)]) * kept.block_tokens
        if snapshot and not host.has_snapshot(chain[-1]):
            moved += host.snapshot_tokens
        if not self.prices.worth(moved, tokens):
            return None
        return RestorePlan(self, rank, chain, tokens, moved, snapshot=snapshot)

    def _readable(self, name: bytes) -> bool:
        return self.snapshots.readable(_saved_name(name))

    @contextmanager
    def holding(self, restore: Restore) -> Iterator[None]:
        self.expire(self._now())
        saved = {
            index: self.blocks.hold(name)
            for index, name in enumerate(restore.plan.chain)
            if name not in self._host.blocks and self.blocks.readable(name)
        }
        restore.held.update(saved)
        name = restore.plan.chain[-1]
        wanted = restore.plan.snapshot and not self._host.has_snapshot(name)
        held = [self.snapshots.hold(_saved_name(name))] if wanted and self._readable(name) else []
        try:
            with self._host.holding(restore):
                if held:
                    restore.snapshot = held[0]
                yield
        finally:
            self.blocks.let_go(saved.values())
            self.snapshots.let_go(held)

    async def bring(self, restore: Restore) -> str:
        host, gap = self._host, False

        async def from_disk(index: int) -> None:
            nonlocal gap
            block = restore.held.get(index)
            if gap or not isinstance(block, DiskBlock):
                return  # blocks after a missing one are useless
            offers = host.offers(restore.plan.rank, index)
            loaded = await host.load(block.name, offers, lambda ids: self._read(block, index, ids))
            if loaded is None:
                gap = True
                return
            try:
                if await host.copy_in(loaded, restore):
                    restore.origins[index] = "disk"
                else:
                    self._forget(block)
            finally:
                host.blocks.let_go((loaded,))

        await asyncio.gather(host.bring(restore, from_disk), self._bring_snapshot(restore))
        # blocks that could not be read took time, too
        restore.moved_tokens = restore.plan.moved_tokens
        return ""

    async def _bring_snapshot(self, restore: Restore) -> None:
        saved, host = restore.snapshot, self._host
        if not isinstance(saved, DiskBlock) or restore.snapshot_owner is None:
            return
        loaded = await host.load_snapshot(restore.plan, lambda ids: self._read(saved, 0, ids))
        if loaded is None:
            return
        restore.snapshot = loaded
        try:
            await host.bring_snapshot(restore)
            if restore.restored:
                self._counters.add("disk_snapshots_restored")
            else:
                self._forget(saved)
        finally:
            host.snapshots.let_go((loaded,))

    async def _read(
        self, block: DiskBlock, index: int, offer_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        read = await self._run(
            LoadBlock(self._loop.next_number(), block.name, index, offer_ids, FILE_SECONDS)
        )
        if not read.error:
            self._counters.add("disk_blocks_read")
            self._counters.add("disk_bytes_read", read.bytes_moved)
            return read.checksums
        if read.error != SLOW:
            self._forget(block)
        return ()

    def failed(self, cause: str) -> None:
        self._host.failed(cause)

    # ---- dropped blocks

    def expire(self, now: float) -> None:
        if self._ttl_seconds:
            self._gone(self.blocks.expire(now - self._ttl_seconds), "expired")
            self._remove(self.snapshots.expire(now - self._ttl_seconds), "expired")

    def drop(self, names: Iterable[bytes]) -> None:
        """Drops these blocks and snapshots, also while they are being read."""

        def dropped(blocks: DiskBlocks, saved: Iterable[bytes]) -> tuple[bytes, ...]:
            written = [blocks.hold(name) for name in saved if blocks.readable(name)]
            return tuple([block.name for block in written if blocks.forget(block)])

        self._gone(dropped(self.blocks, names), "session")
        self._remove(dropped(self.snapshots, map(_saved_name, names)), "session")

    def clear(self, cause: str) -> int:
        self._epoch += 1
        gone = self.blocks.clear()
        self.snapshots.clear()
        if gone:
            self._counters.add("disk_blocks_dropped", len(gone), cause=cause)
        for block in gone:
            if block.written:
                self._kept.log.lost(block.name)
        return len(gone)

    async def erase(self) -> None:
        command = RemoveSaved(self._loop.next_number(), (), RESET_SECONDS, everything=True)
        removed = await self._run(command)
        if removed.error:
            raise UnavailableError(
                f"KV on disk could not be removed ({removed.error}) and would be used again after a"
                " restart; empty the folder of --disk_cache_dir, or repair the disk and reset again"
            )

    def _forget(self, block: DiskBlock) -> None:
        if self.blocks.forget(block):
            self._gone((block.name,), "broken")
        elif self.snapshots.forget(block):
            self._counters.add("disk_snapshots_broken")
            self._remove((block.name,), "broken")

    def _gone(self, names: Iterable[bytes], cause: str) -> None:
        names = tuple(names)
        for name in names:
            self._kept.log.lost(name)
        self._remove(names, cause)

    def _remove(self, names: tuple[bytes, ...], cause: str) -> None:
        if names:
            self._counters.add("disk_blocks_dropped", len(names), cause=cause)
            self._remove_files(names)

    def _remove_files(self, names: tuple[bytes, ...]) -> None:
        # issued now, before any later write of the same names
        removing = self._issue(RemoveSaved(self._loop.next_number(), names, RESET_SECONDS))

        async def remove() -> None:
            await self._end(removing)

        self._tasks.spawn(remove())

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
