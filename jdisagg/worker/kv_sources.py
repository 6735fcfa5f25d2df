"""Restores KV blocks that a prompt needs and the mesh's pages lack.

A `KvSource` is one place outside the pages that holds cached blocks: host memory
(`worker/host_tier.py`), disk (`worker/disk_tier.py`), other workers (`worker/peer_fetch.py`).
`KvSources` asks all sources of a worker once for a prompt, takes the plan that saves most time, and
runs it: it reserves pages, lets the source fill them, and keeps the verified blocks in the prefix
cache. A prompt waits no longer than computing the same tokens would take. Then, or when the prompt
is cancelled, the restore is cancelled, and what has arrived stays. A failed restore costs time and
never a token.

Invariants: a block enters the prefix cache only after its checksum was verified in its pages. The
pages of a restore are released however it ends. Nothing is kept that a reset should have removed
meanwhile."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.ports import HandoffSource
from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.request import CachedTokens
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks

Origin = Literal["host", "disk", "peer"]

# counters of restored blocks and tokens, by where they came from
_RESTORED: dict[Origin, tuple[str, str]] = {
    "host": ("host_blocks_restored", "host_tokens_restored"),
    "disk": ("disk_blocks_restored", "disk_tokens_restored"),
    "peer": ("peer_blocks_fetched", "peer_tokens_restored"),
}


@plain
class RestoreQuery:
    """The blocks of one prompt that can replace computing.

    Attributes:
        chain: Names of the prompt's first blocks, up to the last that is of use.
        known: By rank, how many of them are in pages already.
        ahead_tokens: Tokens of other prompts that are computed first.
        peer: Worker that may hold the blocks, a hint of the router.
        peer_tokens: Tokens that it is believed to hold.
    """

    chain: Chain
    known: tuple[int, ...]
    ahead_tokens: int = 0
    peer: HandoffSource | None = None
    peer_tokens: int = 0


@plain
class RestorePlan:
    """What one source offers for a prompt.

    Attributes:
        source: The source that moves the blocks.
        rank: Data-parallel rank whose pages they enter.
        chain: Names of the prompt's first blocks, up to the last that the source restores.
        tokens: Tokens of the chain that are not in pages.
        moved_tokens: Tokens by which the source estimates its duration.
        ahead_tokens: Tokens of other prompts behind whose computing the restore hides.
        peer: Worker to fetch from.
    """

    source: "KvSource"
    rank: int
    chain: Chain
    tokens: int
    moved_tokens: int
    ahead_tokens: int = 0
    peer: HandoffSource | None = None


@dataclass(slots=True, eq=False)
class Restore:
    """A plan that is running.

    Attributes:
        plan: The plan.
        first: Blocks of the chain that were in pages before.
        pages: Pages of the whole chain on the plan's rank, reserved for the restore.
        held: By index in the chain, blocks that the source must not drop meanwhile.
        origins: By index in the chain, where a block came from; only verified blocks.
        moved_tokens: Tokens that count as moved for the source's prices, set by the source.
    """

    plan: RestorePlan
    first: int
    pages: tuple[int, ...] = ()
    held: dict[int, object] = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    moved_tokens: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks of the chain are in pages, without a gap."""
        count = self.first
        while count in self.origins:
            count += 1
        return count


class KvSource(Protocol):
    """One place that holds KV blocks outside the pages of a mesh.

    Attributes:
        name: Where its blocks come from, as usage and metrics name it.
        prices: What it costs, as measured.
        most_restores: Restores that may run at the same time.
        most_seconds: Longest restore where computing is unmeasured; None if without limit.
    """

    name: Origin
    prices: Prices
    most_restores: int
    most_seconds: float | None

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        """Returns the plan that this source offers, on the best rank for it, or None if computing
        is cheaper. The source does nothing yet."""
        ...

    def holding(self, restore: Restore) -> AbstractContextManager[None]:
        """Keeps the blocks of a restore from being dropped. Entered before pages are reserved,
        because that may push other blocks out to the source."""
        return contextlib.nullcontext()

    async def bring(self, restore: Restore) -> str:
        """Fills the pages of a restore and records each verified block in `restore.origins`.
        Returns the cause if fewer blocks than planned arrived, or "". When cancelled it writes
        nothing more to the pages. Raises JdisaggError if the mesh failed."""
        ...

    def failed(self, cause: str) -> None:
        """Counts a restore that ended early: "room", "late", "unwanted", "reset", "failed" or a
        cause of `bring`."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether no work of its own is in flight."""
        return True

    async def start(self) -> None:
        """Finds what it holds from earlier runs of the worker."""

    def used(self, rank: int, chain: Chain) -> None:
        """Notes that a prompt was served from these blocks, which are in pages of `rank`."""

    def clear(self, cause: str) -> int:
        """Forgets all blocks; returns how many there were. Called before the pages are cleared."""
        return 0

    async def erase(self) -> None:
        """Removes what `clear` forgot from durable storage. Raises UnavailableError if the next run
        of the worker would find it again."""

    def expire(self, now: float) -> None:
        """Drops what is too old or too long unused."""

    def stats(self) -> tuple[KeptTier, ...]:
        """Returns its fill level for the worker's status; nothing where it holds no blocks."""
        return ()

    def listed(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """Yields rank, name, index in the chain and whether it is in use of each block, least
        recently used first."""
        yield from ()

    def stop(self) -> None:
        """Cancels its background work."""


class RestoredBlocks:
    """Which blocks of one prompt were restored for it, and from where. A block that was in pages
    already, or was restored for another prompt, counts as found in pages."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._origins: dict[tuple[int, int], Origin] = {}  # by rank and index in the chain

    def add(self, rank: int, origins: Mapping[int, Origin]) -> None:
        """Records blocks that entered the pages of a rank, by their index in the chain."""
        self._origins.update({(rank, index): origin for index, origin in origins.items()})

    def split(self, rank: int, tokens: int) -> CachedTokens:
        """Returns where the prompt's first `tokens`, now in pages of a rank, were before."""
        size = self._block_tokens
        found: dict[Origin, int] = {"host": 0, "disk": 0, "peer": 0}
        for (where, index), origin in self._origins.items():
            if where == rank:
                found[origin] += min(size, max(0, tokens - index * size))
        return CachedTokens(pages=tokens - sum(found.values()), **found)


class KvSources:
    """The sources of one worker.

    Args:
        kept: Prefix cache of the mesh's pages.
        page_size: Tokens of a page.
        sources: In order of preference where plans are equally good.
    """

    def __init__(
        self,
        kept: Residency,
        page_size: int,
        counters: Counters,
        now: Callable[[], float],
        sources: Iterable[KvSource] = (),
    ) -> None:
        self.kept = kept
        self._page_size = page_size
        self._counters = counters
        self._now = now
        self._sources = tuple(sources)
        self._running: Counter[Origin] = Counter()
        self._tasks = BackgroundTasks()

    def __iter__(self) -> Iterator[KvSource]:
        return iter(self._sources)

    @property
    def quiet(self) -> bool:
        """Whether no restore and no work of a source is in flight."""
        return self._tasks.quiet and all([source.quiet for source in self._sources])

    def best(self, query: RestoreQuery) -> RestorePlan | None:
        """Returns the plan that saves most time, or None if computing all of it is cheaper."""
        if not query.chain:
            return None
        free = [one for one in self._sources if self._running[one.name] < one.most_restores]
        plans = [plan for source in free if (plan := source.worth(query)) is not None]
        return max(plans, key=_saving, default=None)

    def begin(
        self, plan: RestorePlan, restored: RestoredBlocks, done: Callable[[], None]
    ) -> "asyncio.Task[None]":
        """Starts a restore for a prompt. `done` is called once, when the restore has ended or took
        as long as computing would; not if the task is cancelled because the prompt has ended."""
        return self._tasks.spawn(self._restore_in_time(plan, restored, done))

    async def _restore_in_time(
        self, plan: RestorePlan, restored: RestoredBlocks, done: Callable[[], None]
    ) -> None:
        source, began = plan.source, self._now()
        patience = source.prices.patience_seconds(plan.tokens + plan.ahead_tokens)
        try:
            async with asyncio.timeout(patience or source.most_seconds):
                await self.restore(plan, restored)
        except TimeoutError:
            source.failed("late")
            # the rest would have taken longer still
            source.prices.moved_in(plan.moved_tokens, 2 * (self._now() - began))
        except asyncio.CancelledError:
            source.failed("unwanted")
            raise
        done()

    async def restore(self, plan: RestorePlan, restored: RestoredBlocks | None = None) -> None:
        """Runs a plan to its end. Records what arrived in `restored`."""
        restore = Restore(plan, self.kept.match(plan.rank, plan.chain))
        with plan.source.holding(restore):
            cause = await self._fill(restore, restored)
        if cause:
            plan.source.failed(cause)

    async def _fill(self, restore: Restore, restored: RestoredBlocks | None) -> str:
        """Returns why not all blocks of a restore were kept, or ""."""
        kept, plan, source, cause = self.kept, restore.plan, restore.plan.source, ""
        chain, size, owner = plan.chain, kept.block_tokens, kept.guest()
        count = len(chain) * size // self._page_size
        pages = kept.reserve(plan.rank, owner, chain, restore.first * size, count)
        if pages is None:
            return "room"
        restore.pages, epoch, began = pages, kept.epoch, self._now()
        self._running[source.name] += 1
        try:
            cause = await source.bring(restore)
        except JdisaggError:
            cause = "failed"
        finally:
            self._running[source.name] -= 1
            fresh = epoch == kept.epoch
            kept.let_go(plan.rank, owner, chain[: restore.blocks] if fresh else ())
            if fresh:
                self._count(restore, restored)
        if not fresh:
            return cause or "reset"
        source.prices.moved_in(restore.moved_tokens, self._now() - began)
        return cause

    def _count(self, restore: Restore, restored: RestoredBlocks | None) -> None:
        came: dict[int, Origin] = {
            at: restore.origins[at] for at in range(restore.first, restore.blocks)
        }
        if restored is not None:
            restored.add(restore.plan.rank, came)
        for origin, (blocks, tokens) in _RESTORED.items():
            count = sum([one == origin for one in came.values()])
            self._counters.add(blocks, count)
            self._counters.add(tokens, count * self.kept.block_tokens)

    def computed_in(self, tokens: int, seconds: float) -> None:
        """Records for all prices that `tokens` of a prompt were computed."""
        for source in self._sources:
            source.prices.computed_in(tokens, seconds)

    # ---- all of them at once

    async def start(self) -> None:
        for source in self._sources:
            await source.start()

    def used(self, rank: int, chain: Chain) -> None:
        for source in self._sources:
            source.used(rank, chain)

    def clear(self, cause: str) -> int:
        return sum([source.clear(cause) for source in self._sources])

    async def erase(self) -> None:
        for source in self._sources:
            await source.erase()

    def erase_later(self) -> None:
        """Like `erase`, in the background: a failure is only counted."""

        async def erase() -> None:
            with contextlib.suppress(UnavailableError):
                await self.erase()

        self._tasks.spawn(erase())

    def expire(self, now: float) -> None:
        for source in self._sources:
            source.expire(now)

    def stats(self) -> tuple[KeptTier, ...]:
        return tuple([tier for source in self._sources for tier in source.stats()])

    def stop(self) -> None:
        self._tasks.cancel()
        for source in self._sources:
            source.stop()


def _saving(plan: RestorePlan) -> float:
    return plan.source.prices.saving(plan.moved_tokens, plan.tokens)
