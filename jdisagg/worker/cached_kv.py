"""The cached KV of one worker, in pages and in slower tiers: what is used, dropped and shown."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.residency import Residency
from jdisagg.scheduler.sequences import Prompt
from jdisagg.telemetry import Counters
from jdisagg.worker.kv_sources import KvSources, RestoredBlocks

SHOWN_BYTES = 8  # leading bytes of a name that are shown

Listed = Iterable[tuple[int, bytes, int, bool]]


@plain
class KeptBlock:
    """One cached block in one tier: device pages, host memory or disk. A block that is in several
    tiers is listed for each.

    Attributes:
        rank: Data-parallel rank whose pages hold or held the block; 0 if an earlier run of the
            worker wrote the block to disk.
        name: First hexadecimal digits of the block's keyed hash. Blocks with the same hash have the
            same tokens, the same preceding tokens and the same tenant.
        index: Number of the block in its sequence, counted from 0. The block holds positions [index
            * tokens, (index + 1) * tokens). The number is 0 if an earlier run of the worker wrote
            the block to disk.
        in_use: Whether a sequence uses the block or the block is being copied. A block in use
            cannot be evicted.
    """

    worker: str
    tier: str
    rank: int
    name: str
    index: int
    tokens: int
    in_use: bool


def kept_blocks(worker: str, kept: Residency, tiers: Mapping[str, Listed]) -> Iterator[KeptBlock]:
    """Yields the cached blocks of a worker. Each tier lists its least recently used block first.
    Blocks in pages are listed rank by rank, and those in use last.

    Args:
        tiers: For each tier other than pages, its name and its blocks. A block is given as (rank,
            block name, index in its sequence, whether it is in use).
    """
    in_pages = [
        (rank, name, index, held)
        for rank, tree in enumerate(kept.trees)
        for name, index, held in tree.by_last_use()
    ]
    for tier, blocks in {"pages": in_pages, **tiers}.items():
        for rank, name, index, in_use in blocks:
            shown = name[:SHOWN_BYTES].hex()
            yield KeptBlock(worker, tier, rank, shown, index, kept.block_tokens, in_use)


@dataclass(slots=True, eq=False, repr=False)
class CachedKv:
    """Counts the reuse of cached blocks, and drops blocks in all tiers together."""

    _sources: KvSources
    _mesh: MeshLimits
    _counters: Counters
    _now: Callable[[], float]
    _closed_seconds: float  # after a drop, in which no cached block moves between workers
    _forgotten: int = 0  # blocks that were cleared rather than evicted for lack of room

    def tiers(self) -> tuple[KeptTier, ...]:
        """Returns the used and total bytes of the cached blocks in each tier, and of snapshots."""
        kept, mesh = self._sources.kept, self._mesh
        if not kept.on:
            return ()
        of_token = mesh.sent.bytes_per_token
        room = mesh.ranks * mesh.pages_per_rank * mesh.page_size * of_token
        blocks = kept.blocks
        tiers = [KeptTier("pages", blocks, blocks * kept.block_tokens * of_token, room)]
        if kept.snapshots:
            sizes = [(len(one), one.filled, one.total) for one in kept.snapshots]
            count, filled, total = map(sum, zip(*sizes, strict=True))
            size = mesh.snapshot_slot_bytes
            tiers.append(KeptTier("snapshots", count, filled * size, total * size))
        return (*tiers, *(tier for source in self._sources for tier in source.stats()))

    def used(self, prompt: Prompt, rank: int, cached_tokens: int, restored: RestoredBlocks) -> None:
        """Counts the cached tokens of a prompt that has pages, by tier."""
        kept, counters = self._sources.kept, self._counters
        for source in self._sources if cached_tokens else ():
            source.used(rank, prompt.chain[: cached_tokens // kept.block_tokens])
        if kept.on:
            counters.add("prefix_asked_tokens", prompt.tokens)
            for tier, count in restored.split(rank, cached_tokens).by_tier().items():
                if count or tier == "pages":
                    counters.add("prefix_hit_tokens", count, tier=tier)
            known = counters["prefix_blocks_evicted"] - self._forgotten
            if kept.evicted_blocks > known:
                count = kept.evicted_blocks - known
                counters.add("prefix_blocks_evicted", count, cause="room")
        if kept.snapshots:
            totals = [(one.made, one.used, one.evicted) for one in kept.snapshots]
            made, used, evicted = map(sum, zip(*totals, strict=True))
            counters.add("snapshots_kept", made - counters["snapshots_kept"])
            counters.add("snapshots_used", used - counters["snapshots_used"])
            counters.add("snapshots_evicted", evicted - counters["snapshots_evicted"])

    def forget(self, rank: int | None, cause: str) -> None:
        """Drops the blocks in the pages of a rank, or of all, and in all other tiers."""
        self._drop(rank, cause)
        self._sources.erase_later()

    def _drop(self, rank: int | None, cause: str) -> int:
        elsewhere = self._sources.clear(cause)
        blocks = self._sources.kept.clear(rank, self._now() + self._closed_seconds)
        self._forgotten += blocks
        if blocks:
            self._counters.add("prefix_blocks_evicted", blocks, cause=cause)
        return blocks + elsewhere

    async def reset(self) -> int:
        blocks = self._drop(None, "reset")
        await self._sources.erase()
        return blocks
