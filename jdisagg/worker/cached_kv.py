"""The cached KV of one worker, in pages and in slower tiers: what is used, dropped and shown."""

from collections.abc import Iterator

from jdisagg.messages.worker_status import KeptTier
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.kept_view import KeptBlock, kept_blocks, kept_tiers
from jdisagg.scheduler.sequences import Prompt
from jdisagg.telemetry import Counters
from jdisagg.worker.given_kv import GivenKv
from jdisagg.worker.kv_sources import KvSources, RestoredBlocks


class CachedKv:
    """Counts the reuse of cached blocks, and drops blocks in all tiers together.

    Args:
        closed_seconds: Time after a drop in which no cached block is sent to other workers.
    """

    def __init__(
        self,
        sources: KvSources,
        given: GivenKv,
        mesh: MeshLimits,
        counters: Counters,
        closed_seconds: float,
    ) -> None:
        self._kept = sources.kept
        self._sources = sources
        self._given = given
        self._mesh = mesh
        self._counters = counters
        self._closed_seconds = closed_seconds
        self._forgotten = 0  # blocks that were cleared rather than evicted for lack of room

    def tiers(self) -> tuple[KeptTier, ...]:
        return (*kept_tiers(self._kept, self._mesh), *self._sources.stats())

    def blocks(self, worker: str) -> Iterator[KeptBlock]:
        tiers = {source.name: source.listed() for source in self._sources}
        return kept_blocks(worker, self._kept, tiers)

    def used(self, prompt: Prompt, rank: int, cached_tokens: int, restored: RestoredBlocks) -> None:
        """Counts the cached tokens of a prompt that has pages, by tier."""
        kept, counters = self._kept, self._counters
        if cached_tokens:
            self._sources.used(rank, prompt.chain[: cached_tokens // kept.block_tokens])
        if kept.on:
            counters.add("prefix_asked_tokens", prompt.tokens)
            for tier, count in restored.split(rank, cached_tokens).by_tier().items():
                if count or tier == "pages":
                    counters.add("prefix_hit_tokens", count, tier=tier)
            known = counters["prefix_blocks_evicted"] - self._forgotten
            if kept.evicted_blocks > known:
                count = kept.evicted_blocks - known
                counters.add("prefix_blocks_evicted", count, cause="room")
        for what in ("made", "used", "evicted") if kept.snapshots else ():
            count, name = sum([getattr(one, what) for one in kept.snapshots]), f"snapshots_{what}"
            name = "snapshots_kept" if what == "made" else name
            counters.add(name, count - counters[name])

    def forget(self, rank: int | None, cause: str) -> int:
        """Drops the blocks in the pages of a rank, or of all, and in all other tiers. Returns their
        number."""
        self._given.close_for(self._closed_seconds)
        elsewhere = self._sources.clear(cause)
        blocks = self._kept.clear(rank)
        self._forgotten += blocks
        if blocks:
            self._counters.add("prefix_blocks_evicted", blocks, cause=cause)
        return blocks + elsewhere

    def forget_broken(self, rank: int) -> None:
        """Drops the blocks that may be the cause of a result that is no number."""
        self.forget(rank, "broken")
        self._sources.erase_later()

    async def reset(self) -> int:
        blocks = self.forget(None, "reset")
        await self._sources.erase()
        return blocks
