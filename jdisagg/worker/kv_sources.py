"""Restores cached KV blocks from host memory, disk or other workers to the mesh's pages, if that is
faster than computing them.

A prompt waits no longer than computing the same tokens would take. A failed restore costs time but
never changes a result.

Invariants: a block enters the prefix cache only after the checksum of its KV in pages was verified.
The pages of a restore are always released when the restore ends. A reset of the cache, or the end
of a session, also discards blocks that are being restored."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jdisagg.clock import BackgroundTasks
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.ports import HandoffSource
from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.request import CachedTokens
from jdisagg.scheduler.block_names import Tail
from jdisagg.scheduler.host_blocks import TierBlock
from jdisagg.scheduler.prices import Instead, Prices
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters

_log = logging.getLogger(__name__)

Origin = Literal["host", "disk", "peer"]

# counters of restored blocks and tokens, by the source
_RESTORED: dict[Origin, tuple[str, str]] = {
    "host": ("host_blocks_restored", "host_tokens_restored"),
    "disk": ("disk_blocks_restored", "disk_tokens_restored"),
    "peer": ("peer_blocks_fetched", "peer_tokens_restored"),
}


@plain
class RestoreQuery:
    """Describes a prompt to the sources of KV, so that each source can plan what it would restore
    for the prompt.

    Attributes:
        chain: Hashes of the prompt's blocks in order. The block of the last token is excluded,
            because this token must be computed.
        known: For each rank, the number of leading blocks of `chain` that are in pages already.
        ahead_tokens: Number of tokens of other prompts that will be computed before this prompt.
        peer: Worker that holds the blocks according to the router's estimate; None if the router
            knows of no worker.
        tail: The KV behind the blocks, which host memory may have; None if none is known.
    """

    chain: Chain
    known: tuple[int, ...]
    ahead_tokens: int = 0
    peer: HandoffSource | None = None
    peer_tokens: int = 0
    only: int | None = None
    instead: Instead = "compute"
    tail: Tail | None = None

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.known)) if self.only is None else (self.only,)


@plain
class RestorePlan:
    """The blocks that one source can restore for a prompt.

    Attributes:
        moved_tokens: Number of tokens that the source must copy or send, which determines the
            duration.
        ahead_tokens: Number of tokens of other prompts that are computed while the restore runs.
            The prompt would have to wait for them anyway.
    """

    source: "KvSource"
    rank: int
    chain: Chain
    tokens: int
    moved_tokens: int
    ahead_tokens: int = 0
    peer: HandoffSource | None = None
    snapshot: bool = False
    instead: Instead = "compute"
    tail: Tail | None = None

    @property
    def saving(self) -> float:
        return self.source.prices.saving(self.moved_tokens, self.tokens, self.instead)

    @property
    def patience_seconds(self) -> float | None:
        """Longest time in seconds that the prompt waits for the restore; None means no limit."""
        tokens = self.tokens + self.ahead_tokens
        return self.source.prices.patience_seconds(tokens, self.instead)


@dataclass(slots=True, eq=False)
class Restore:
    """A running restore.

    Attributes:
        first: Number of leading blocks of the plan's chain that were in pages before the restore.
        owner: Sequence that holds the pages and uses the blocks; None if the restore reserves them.
        origins: Origin (name of the source) of each verified block, by its index in the plan's
            chain.
        snapshot_owner: Temporary owner of the pages of the snapshot; None if none is restored.
        held: The blocks that the source reads, by their index in the plan's chain.
        closing: Functions that keep background work of the source from writing to the pages.
        dropped: Names of blocks that were dropped meanwhile, which must not be cached.
    """

    plan: RestorePlan
    first: int
    pages: tuple[int, ...] = ()
    owner: int | None = None
    task: "asyncio.Task[None] | None" = None
    closing: list[Callable[[], None]] = field(default_factory=list)
    held: dict[int, TierBlock] = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    moved_tokens: int = 0
    snapshot_owner: int | None = None
    snapshot: TierBlock | None = None
    restored: bool = False
    tail: TierBlock | None = None
    tail_came: bool = False
    dropped: set[bytes] = field(default_factory=set)

    @property
    def to_cache(self) -> Chain:
        """The leading blocks that are in pages now, up to the first that was dropped."""
        came = self.plan.chain[: self.blocks]
        if not self.dropped:
            return came
        return tuple(itertools.takewhile(lambda name: name not in self.dropped, came))

    @property
    def blocks(self) -> int:
        """Number of leading blocks of the prompt that are in pages now."""
        count = self.first
        while count in self.origins:
            count += 1
        return count

    def place(self, kept: Residency, tokens: int) -> tuple[int, ...] | None:
        """Assigns pages (or a state slot, as one page) to the restored snapshot after `tokens`
        tokens. They replace those of an earlier call. Returns None if there is no room, or if no
        snapshot is restored."""
        if self.snapshot_owner is None:
            return None
        return kept.snapshots[self.plan.rank].begin_restore(self.snapshot_owner, tokens)

    def stop(self) -> None:
        """Ends the restore before its owner's pages are reused."""
        self.owner = -1
        for close in self.closing:
            close()
        if self.task is not None:
            self.task.cancel()


class KvSource(Protocol):
    """A source of KV blocks outside the pages of a mesh.

    Attributes:
        name: Name of the source in usage reports and metrics.
        prices: Measured durations of restores from this source.
        most_restores: Largest number of simultaneous restores from this source.
        most_seconds: Longest duration of a restore in seconds while the speed of computing is not
            measured yet; None means no limit.
    """

    name: Origin
    prices: Prices
    most_restores: int
    most_seconds: float | None

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        """Returns a plan to restore blocks from this source to the best rank, or None if computing
        is faster. Does not start the restore."""
        ...

    def plan(
        self,
        kept: Residency,
        query: RestoreQuery,
        runs: Mapping[int, Sequence[int]],
        snapshot: Callable[[int], int | None],
        ahead_tokens: int = 0,
        tail: Callable[[RestoreQuery, int, int], tuple[Tail, int] | None] = lambda *_: None,
    ) -> RestorePlan | None:
        """Plans a restore to the rank that has most blocks then. If hits need snapshots, it has a
        snapshot at its end. Returns None if computing is faster.

        Args:
            runs: The blocks after those in pages that the source can restore to each rank. Each is
                1 if the source must move it, and 0 if it moves without cost.
            snapshot: Function that returns the number of tokens that the snapshot after a number of
                blocks moves, or None if the source has none.
            tail: Function that returns the tail after a number of blocks, for a rank, and the
                number of tokens that it saves.
        """
        chain, size = query.chain, kept.block_tokens
        reach = {rank: query.known[rank] + len(run) for rank, run in runs.items()}
        if kept.snapshots:
            for rank, most in reach.items():
                here, ends = kept.snapshots[rank], range(most, 0, -1)
                usable = (
                    end for end in ends if chain[end - 1] in here or snapshot(end) is not None
                )
                reach[rank] = next(usable, 0)
        rank = max(reach, key=lambda one: (reach[one], query.known[one]))
        end, known, moved_snapshot = reach[rank], query.known[rank], None
        tokens, moved = (end - known) * size, sum(runs[rank][: max(0, end - known)]) * size
        if kept.snapshots:
            tokens = end * size - kept.cached_tokens(rank, chain[:end], end * size, True)
            if tokens and chain[end - 1] not in kept.snapshots[rank]:
                moved_snapshot = snapshot(end)
        moved += moved_snapshot or 0
        behind, saved = tail(query, end, rank) or (None, 0)
        if behind is not None:
            moved, tokens = moved + behind.tokens, tokens + saved
        if not tokens or not self.prices.worth(moved, tokens + ahead_tokens, query.instead):
            return None
        return RestorePlan(
            self,
            rank,
            chain[:end],
            tokens,
            moved,
            ahead_tokens,
            query.peer,
            moved_snapshot is not None,
            query.instead,
            behind,
        )

    def holding(self, restore: Restore) -> AbstractContextManager[None]:
        """Returns a context in which the blocks of a restore are not evicted. It must be entered
        before pages are reserved, because reserving may evict blocks to this source."""
        return contextlib.nullcontext()

    async def bring(self, restore: Restore) -> str:
        """Fills the pages of a restore and records each verified block in `restore.origins`. Writes
        no more pages after a cancellation.

        Returns:
            "", or the cause if fewer blocks than planned arrived.

        Raises:
            JdisaggError: The mesh failed.
        """
        ...

    def failed(self, cause: str) -> None:
        """Counts a restore that ended early. `cause` is "room" (no free pages), "late", "unwanted"
        (cancelled), "reset" (the cache was reset), "failed", or a cause that `bring` returned."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether the source has no background work in flight."""
        return True

    async def start(self) -> None:
        """Adds the blocks that earlier runs of the worker stored."""

    def used(self, rank: int, chain: Chain) -> None:
        """Records that a prompt used these blocks, which are in pages of `rank`."""

    def clear(self, cause: str) -> int:
        """Drops all blocks and returns their number. Called before the blocks in pages are
        dropped."""
        return 0

    def drop(self, names: Collection[bytes]) -> None:
        """Drops these blocks and snapshots, also those that are being read or written."""

    async def erase(self) -> None:
        """Deletes the blocks that `clear` dropped from durable storage. Raises UnavailableError if
        the next run of the worker would still find them."""

    def expire(self, now: float) -> None:
        """Drops blocks whose lifetime has ended at time `now`."""

    def stats(self) -> tuple[KeptTier, ...]:
        """Returns the used and available bytes of the source's tiers; empty if it stores no
        blocks."""
        return ()

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields (rank, name, index in sequence, in use) of blocks, least recently used first."""
        yield from ()

    def let_go(self, owner: int) -> None:
        """Writes nothing more to the pages of an owner. Idempotent."""

    def stop(self) -> None:
        """Cancels the source's background work."""


class RestoredBlocks:
    """Records from which source the blocks of one prompt were restored. All other cached blocks of
    the prompt count as found in pages."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._origins: dict[tuple[int, int], Origin] = {}  # by rank and index in the chain

    def add(self, rank: int, origins: Mapping[int, Origin]) -> None:
        self._origins.update({(rank, index): origin for index, origin in origins.items()})

    def split(self, rank: int, tokens: int) -> CachedTokens:
        if not self._origins:
            return CachedTokens(pages=tokens)
        size = self._block_tokens
        found: dict[Origin, int] = {"host": 0, "disk": 0, "peer": 0}
        for (where, index), origin in self._origins.items():
            if where == rank:
                found[origin] += min(size, max(0, tokens - index * size))
        return CachedTokens(pages=tokens - sum(found.values()), **found)


@dataclass(slots=True, eq=False, repr=False)
class KvSources:
    """Chooses the best source of KV for each prompt of one worker, and runs restores. If plans save
    equal time, an earlier source is preferred."""

    kept: Residency
    _page_size: int
    _counters: Counters
    _now: Callable[[], float]
    _sources: Sequence[KvSource]
    # whether a restore may reserve a number of pages of a rank
    _may_take: Callable[[int, int], bool] = lambda rank, pages: True
    _running: Counter[Origin] = field(default_factory=Counter)
    _filling: set[Restore] = field(default_factory=set)
    _owned: dict[int, Restore] = field(default_factory=dict)  # to pages of sequences, by owner
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __iter__(self) -> Iterator[KvSource]:
        return iter(self._sources)

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet and all([source.quiet for source in self._sources])

    def best(self, query: RestoreQuery) -> RestorePlan | None:
        """Returns the plan that saves most time, or None if no restore is faster than computing."""
        if not query.chain and query.tail is None:
            return None
        free = [one for one in self._sources if self._running[one.name] < one.most_restores]
        plans = [plan for source in free if (plan := source.worth(query)) is not None]
        return max(plans, key=lambda one: one.saving, default=None)

    def begin(self, plan: RestorePlan, restored: RestoredBlocks) -> "asyncio.Task[None]":
        """Returns a task that ends when the restore has ended or has reached its time limit
        (`RestorePlan.patience_seconds`)."""
        return self._tasks.spawn(self._restore_in_time(plan, restored))

    async def fill(
        self, query: RestoreQuery, owner: int, pages: tuple[int, ...], restored: RestoredBlocks
    ) -> tuple[int, bool]:
        """Restores blocks to pages that `owner` holds, if that is worthwhile. Ends at the restore's
        time limit (`RestorePlan.patience_seconds`), or when `let_go` is called.

        Returns:
            The number of leading blocks of the chain that are in the pages then, or 0 if nothing
                was restored; and whether the tail is behind them.
        """
        plan, epoch = self.best(query), self.kept.epoch
        if plan is None:
            return 0, False
        restore = self._owned[owner] = Restore(plan, query.known[plan.rank], pages, owner)
        restore.task = self._tasks.spawn(self._restore_in_time(plan, restored, restore))
        try:
            await asyncio.wait({restore.task})
        except asyncio.CancelledError:
            self.let_go(owner)
            raise
        known = self._owned.pop(owner, None) is not None and epoch == self.kept.epoch
        if not known:
            return 0, False
        return restore.blocks, restore.tail_came and restore.blocks == len(plan.chain)

    def let_go(self, owner: int) -> None:
        """Writes nothing more to the pages of an owner."""
        restore = self._owned.pop(owner, None)
        if restore is not None:
            restore.stop()
        for source in self._sources:
            source.let_go(owner)

    async def _restore_in_time(
        self, plan: RestorePlan, restored: RestoredBlocks, restore: Restore | None = None
    ) -> None:
        source, began = plan.source, self._now()
        patience = plan.patience_seconds
        try:
            async with asyncio.timeout(source.most_seconds if patience is None else patience):
                await self.restore(plan, restored, restore)
        except TimeoutError:
            source.failed("late")
            # records twice the time so far, because the complete restore would have taken longer
            source.prices.moved_in(plan.moved_tokens, 2 * (self._now() - began))
        except asyncio.CancelledError:
            source.failed("unwanted")
            raise

    async def restore(
        self,
        plan: RestorePlan,
        restored: RestoredBlocks | None = None,
        restore: Restore | None = None,
    ) -> None:
        if restore is None:
            restore = Restore(plan, self.kept.match(plan.rank, plan.chain))
        with plan.source.holding(restore):
            cause = await self._fill(restore, restored)
        if cause:
            plan.source.failed(cause)

    async def _fill(self, restore: Restore, restored: RestoredBlocks | None) -> str:
        kept, plan, source, cause = self.kept, restore.plan, restore.plan.source, ""
        guest = None
        if restore.owner is None and (guest := self._reserve(restore)) is None:
            return "room"
        epoch, began = kept.epoch, self._now()
        if plan.snapshot and guest is not None:
            restore.snapshot_owner = guest
        self._running[source.name] += 1
        self._filling.add(restore)
        try:
            cause = await source.bring(restore)
        except JdisaggError:
            cause = "failed"
        except Exception:  # after any failure, the prompt is computed
            _log.exception("a restore from %s failed; the blocks are computed", source.name)
            cause = "failed"
        finally:
            self._running[source.name] -= 1
            self._filling.remove(restore)
            fresh = epoch == kept.epoch
            came = restore.to_cache if fresh else ()
            if guest is not None:
                if not restore.restored:
                    kept.settle_snapshots(plan.rank, guest)
                kept.let_go(plan.rank, guest, came)
            elif restore.owner is not None and restore.owner >= 0:
                kept.keep(plan.rank, restore.owner, came)
            if fresh:
                self._count(restore, restored)
        if not fresh:
            return cause or "reset"
        source.prices.moved_in(restore.moved_tokens, self._now() - began)
        return cause

    def _reserve(self, restore: Restore) -> int | None:
        kept, rank, chain = self.kept, restore.plan.rank, restore.plan.chain
        size, owner = kept.block_tokens, kept.guest()
        count = len(chain) * size // self._page_size
        if not self._may_take(rank, count - restore.first * size // self._page_size):
            return None
        pages = kept.reserve(rank, owner, chain, restore.first * size, count)
        if pages is None:
            return None
        restore.pages = pages
        return owner

    def _count(self, restore: Restore, restored: RestoredBlocks | None) -> None:
        came: dict[int, Origin] = {
            at: restore.origins[at] for at in range(restore.first, restore.blocks)
        }
        if restored is not None:
            tail: dict[int, Origin] = {len(restore.plan.chain): "host"} if restore.tail_came else {}
            restored.add(restore.plan.rank, came | tail)
        for origin, (blocks, tokens) in _RESTORED.items():
            count = sum([one == origin for one in came.values()])
            self._counters.add(blocks, count)
            self._counters.add(tokens, count * self.kept.block_tokens)

    def computed_in(self, tokens: int, seconds: float, instead: Instead = "compute") -> None:
        for source in self._sources:
            source.prices.computed_in(tokens, seconds, instead)

    # ---- all of them at once

    def clear(self, cause: str) -> int:
        return sum([source.clear(cause) for source in self._sources])

    def drop(self, names: Collection[bytes]) -> None:
        """Drops these blocks in all sources, and caches none that is being restored."""
        for source in self._sources:
            source.drop(names)
        for restore in self._filling:
            restore.dropped.update(names)

    async def erase(self) -> None:
        for source in self._sources:
            await source.erase()

    def erase_later(self) -> None:
        """Runs `erase` in the background. A failure only increases a counter."""

        async def erase() -> None:
            with contextlib.suppress(UnavailableError):
                await self.erase()

        self._tasks.spawn(erase())

    def stop(self) -> None:
        self._tasks.cancel()
        for source in self._sources:
            source.stop()
