"""The KV of sessions on a mesh (`scheduler/session_blocks.py`), in the pauses between their turns.

When a pause begins, the session's own blocks are copied to host memory, and each copied block is
then evicted from pages before others. So the pause costs other prompts no pages, and the eviction
no copy. When the pause ends, blocks that were evicted are restored, if that is faster than the
alternative (`KvSources.best`). Models whose cache hits need snapshots are left out."""

import asyncio

from jdisagg.scheduler.prices import Instead
from jdisagg.scheduler.residency import Residency
from jdisagg.scheduler.session_blocks import Session
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.host_tier import HostTier
from jdisagg.worker.kv_sources import KvSources, RestoredBlocks, RestoreQuery


class SessionKv:
    """`instead`: what a prompt needs for KV that is not restored."""

    def __init__(
        self, kept: Residency, sources: KvSources, host: HostTier, instead: Instead
    ) -> None:
        self._kept = kept
        self._sources = sources
        self._host = host
        self._instead: Instead = instead
        self._tasks = BackgroundTasks()
        self._restoring = asyncio.Lock()  # one session at a time, so that prompts may restore, too

    def sweep(self, now: float) -> None:
        kept = self._kept
        kept.retained.advance(now)
        if not self._host.on or kept.snapshots:
            return
        for session in kept.sessions.begun_pauses():
            self._tasks.spawn(self._demote(session))
        for session in kept.sessions.ended_pauses(now):
            self._tasks.spawn(self._restore(session))

    def stop(self) -> None:
        self._tasks.cancel()

    async def _demote(self, session: Session) -> None:
        """Begins at the first block, so that the end of a prefix is evicted before its start."""
        until = session.pause_until
        for index, name in enumerate(session.chain):
            for rank in range(len(self._kept.trees)):
                if name not in session.own or not self._kept.pages(rank, name):
                    continue
                block = await self._host.copied(rank, name, index)
                if until is None or session.pause_until != until:
                    return  # the next turn has begun, or the pause has ended
                if block is not None and block.pieces[0].offer.rank == rank:
                    self._kept.demote(rank, name)

    async def _restore(self, session: Session) -> None:
        kept, chain = self._kept, session.chain
        for name in session.own:
            kept.promote(name)
        async with self._restoring:
            known = tuple([kept.match(rank, chain) for rank in range(len(kept.trees))])
            plan = self._sources.best(RestoreQuery(chain, known, instead=self._instead))
            if plan is not None:
                restored = RestoredBlocks(kept.block_tokens)
                await asyncio.wait({self._sources.begin(plan, restored, lambda: None)})
