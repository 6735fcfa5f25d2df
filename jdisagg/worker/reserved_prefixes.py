"""Restores cached blocks of a request to the pages that a decode worker has reserved for it.

Blocks in host memory, on disk or on another worker are restored (`worker/kv_sources.py`) if this is
faster than the alternative. If this mesh computes the rest of the prompt, the alternative is
computing the tokens. If a prefill worker sends KV, the alternative is receiving it. Of that time,
only the part after the end of the prefill counts. `reserve` returns when the restore has ended. If
the request ends earlier, nothing more is written to its pages."""

import asyncio

from jdisagg.messages.ports import ReserveCall
from jdisagg.request import CachedTokens
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.prices import Instead
from jdisagg.scheduler.sequences import SequenceGroup, wanted_of_prompt
from jdisagg.worker.kv_sources import KvSources, Restore, RestoredBlocks, RestoreQuery


class ReservedPrefixes:
    def __init__(self, sources: KvSources, state: DecodeState, computes: bool) -> None:
        self._sources = sources
        self._kept = sources.kept
        self._state = state
        self._computes = computes
        self._running: dict[int, Restore] = {}  # by the group's key

    def __len__(self) -> int:
        return len(self._running)

    async def restore(self, group: SequenceGroup, call: ReserveCall) -> RestoredBlocks:
        """Restores blocks of a group that has pages, if that is worthwhile. Updates the group's
        number of cached tokens. Returns the origins of the restored blocks."""
        restored = RestoredBlocks(self._kept.block_tokens)
        query = self._query(group, call) if group.chain else None
        if query is None or (plan := self._sources.best(query)) is None:
            return restored
        pages = self._state.ledgers[group.rank].pages(group.key)
        restore = Restore(plan, query.known[group.rank], pages, group.key)
        epoch = self._kept.epoch
        task = self._sources.begin_in(restore, restored)
        self._running[group.key] = restore
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self.forget(group.key)
            raise
        if self._running.pop(group.key, None) is not None and epoch == self._kept.epoch:
            tokens = restore.blocks * self._kept.block_tokens
            usable = self._kept.usable_tokens(tokens, self._computes or call.computes)
            group.cached_tokens = max(group.cached_tokens, usable)
        return restored

    def _query(self, group: SequenceGroup, call: ReserveCall) -> RestoreQuery | None:
        kept, tokens = self._kept, len(group.known_tokens)
        computes = call.computes or self._computes
        accepted = call.children[0].accepted
        if computes and wanted_of_prompt(group.request, accepted) is not None:
            return None
        usable = kept.usable_tokens(tokens - computes, computes) // kept.block_tokens
        known = [0] * self._state.limits.ranks
        known[group.rank] = group.cached_tokens // kept.block_tokens
        hinted = min(call.peer_tokens, tokens - computes)
        # a prefill worker would have to compute the accepted tokens before it sends their KV
        instead: Instead = "compute" if computes or accepted else "receive"
        chain = group.chain[:usable]
        return RestoreQuery(chain, tuple(known), 0, call.peer, hinted, group.rank, instead)

    def forget(self, key: int) -> None:
        restore = self._running.pop(key, None)
        if restore is not None:
            restore.stop()

    def used(self, group: SequenceGroup, restored: RestoredBlocks) -> CachedTokens:
        cached, size = group.cached_tokens, self._kept.block_tokens
        if cached:
            self._sources.used(group.rank, group.chain[: cached // size])
        return restored.split(group.rank, cached)
