"""The KV of sessions on a mesh (`scheduler/retention.py`): in the pauses between their turns,
and for calls that show, restore or drop it.

When a pause begins, the session's own blocks are copied to host memory, and each copied block is
then evicted from pages before others. So the pause costs other prompts no pages, and the eviction
no copy. When the pause ends, blocks that were evicted are restored, if that is faster than the
alternative (`KvSources.best`). Models whose cache hits need snapshots are left out."""

import asyncio
from collections.abc import Callable

from jdisagg.clock import BackgroundTasks
from jdisagg.messages.ports import SessionAction, SessionCall, SessionReport
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.scheduler.prices import Instead
from jdisagg.scheduler.retention import KeptSession
from jdisagg.worker.disk_tier import DiskTier
from jdisagg.worker.host_tier import HostTier
from jdisagg.worker.kv_sources import KvSources, RestoredBlocks, RestoreQuery


class SessionKv:
    def __init__(
        self,
        worker: str,
        sources: KvSources,
        host: HostTier,
        disk: DiskTier,
        role: WorkerRole,
        now: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._kept = sources.kept
        self._sources = sources
        self._host = host
        self._disk = disk
        self._now = now
        self._tasks = BackgroundTasks()
        self._restoring = asyncio.Lock()  # one session at a time, so that prompts may restore, too
        self.take_role(role)

    def take_role(self, role: WorkerRole) -> None:
        # what a prompt needs for KV that is not restored
        self._instead: Instead = "compute" if role.computes else "receive"

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

    async def answer(self, call: SessionCall) -> SessionReport | None:
        sessions, key = self._kept.sessions, (call.tenant, call.cache_scope, call.session)
        session = sessions.find(key)
        if session is None:
            return None
        if call.action is SessionAction.DROP:
            return self._drop(sessions.drop(key))
        if call.action is SessionAction.PREFETCH:
            # Goes on if the caller leaves.
            restoring = self._tasks.spawn(self._restore(sessions.end_pause(key)))
            await asyncio.wait({restoring}, timeout=call.deadline_seconds / 2)
        return self._report(session)

    def _report(self, session: KeptSession) -> SessionReport:
        kept, chain, now = self._kept, session.chain, self._now()
        in_pages = [name for name in chain if any(name in tree for tree in kept.trees)]
        in_host = [name for name in chain if self._host.blocks.arrived(name) is not None]
        on_disk = list(filter(self._disk.blocks.arrived, chain))
        tokens = [len(found) * kept.block_tokens for found in (chain, in_pages, in_host, on_disk)]
        return SessionReport(
            self._worker,
            *tokens,
            idle_seconds=max(0.0, now - session.turn_at),
            retention_seconds=session.retention_left(now),
            pause_seconds=session.pause_left(now),
        )

    def _drop(self, names: frozenset[bytes]) -> SessionReport:
        kept = self._kept
        dropped = len([name for name in names if name in kept.log]) * kept.block_tokens
        kept.drop(names)
        self._sources.drop(names)
        return SessionReport(self._worker, dropped_tokens=dropped)

    async def _demote(self, session: KeptSession) -> None:
        """Begins at the first block, so that the end of a prefix is evicted before its start. Ends
        when the next turn begins or the pause ends."""
        until, ranks = session.pause_until, range(len(self._kept.trees))
        for index, name in enumerate(session.chain if until is not None else ()):
            for rank in [one for one in ranks if self._kept.pages(one, name)]:
                if name in session.own:
                    block = await self._host.copied(rank, name, index)
                    if session.pause_until != until:
                        return
                    if block and block.rank == rank and name in session.own:
                        self._kept.demote(rank, name)

    async def _restore(self, session: KeptSession) -> None:
        kept, chain = self._kept, session.chain
        for name in session.own:
            kept.promote(name)
        async with self._restoring:
            known = tuple([kept.match(rank, chain) for rank in range(len(kept.trees))])
            plan = self._sources.best(RestoreQuery(chain, known, instead=self._instead))
            if plan is not None:
                restored = RestoredBlocks(kept.block_tokens)
                await asyncio.wait({self._sources.begin(plan, restored)})
