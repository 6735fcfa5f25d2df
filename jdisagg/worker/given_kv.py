"""Sends cached KV blocks of this mesh to workers that request them. The requesting side is
`worker/incoming_kv.py`.

A block name is a keyed hash that includes the tenant, so a caller that has a block's name may read
the block.

On a decode mesh, transfers must not delay decode steps, so only a few blocks are extracted between
two steps. If a sequence needs pages and none is free, the youngest transfer is ended and its pages
are released."""

import asyncio
import sys
from collections.abc import Callable

from jdisagg.clock import BackgroundTasks
from jdisagg.errors import HandoffError, InvalidRequestError, JdisaggError
from jdisagg.messages.ports import FetchCall, FetchReply, HandoffEnd
from jdisagg.messages.step_commands import StepResult
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.residency import Chain
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import offers_of_pages, snapshot_offers
from jdisagg.worker.kv_sources import KvSources, RestoreQuery
from jdisagg.worker.outgoing_kv import OutgoingHandoff, OutgoingKv
from jdisagg.worker.step_loop import StepLoop

MOST_GIVEN = 16  # most hand-offs at the same time
MOST_GIVEN_WITH_STATE = 4
BETWEEN_STEPS = 16  # most extractions in flight on a decode mesh
MOST_NAMES = 1 << 16
# limits of full chunks that are offered and not yet fetched
MOST_CHUNKS = 4
MOST_CHUNKS_OF_DECODE = 1  # fewer on a decode mesh, whose sequences could use the pages


class GivenKv:
    """Sends the cached blocks of one mesh to other workers.

    Attributes:
        closed: Whether no transfer may begin.
    """

    def __init__(
        self,
        sources: KvSources,
        outgoing: OutgoingKv,
        loop: StepLoop,
        mesh: MeshLimits,
        ids: Callable[[], int],
        counters: Counters,
        role: WorkerRole,
    ) -> None:
        self._kept = sources.kept
        self._sources = sources
        self._outgoing = outgoing
        self._loop = loop
        self._mesh = mesh
        self._ids = ids
        self._counters = counters
        self._given: dict[int, OutgoingHandoff] = {}  # by the owner of their pages
        self._beginning = 0
        self._moved = asyncio.Event()  # a block was fetched, or a hand-off ended
        self.closed = False
        self._tasks = BackgroundTasks()
        self.take_role(role)

    def take_role(self, role: WorkerRole) -> None:
        self._decodes = role.decodes
        # for extractions in flight
        self._places = asyncio.Semaphore(BETWEEN_STEPS if role.decodes else sys.maxsize)

    def __len__(self) -> int:
        return len(self._given)

    def stop(self) -> None:
        self._tasks.cancel()

    async def give(self, call: FetchCall) -> FetchReply:
        """The reply has the number of blocks, which is 0 if no transfer was started. A transfer
        ends at the call's deadline. Raises HandoffError if the hand-off id is in use. Raises
        InvalidRequestError if the block names are invalid."""
        known = 0 <= call.first <= len(call.names) - (not self._kept.snapshots)
        if not known or not 0 < len(call.names) <= MOST_NAMES:
            raise InvalidRequestError(
                f"fetch: must have 1 to {MOST_NAMES} block names and begin at one of them, got"
                f" {len(call.names)} names and first={call.first}"
            )
        if call.handoff_id in self._outgoing:
            raise HandoffError(f"hand-off {call.handoff_id} exists already; give each its own id")
        if not self._may(call):
            return FetchReply()
        until = self._outgoing.now() + call.deadline_seconds
        self._beginning += 1
        try:
            async with asyncio.timeout(call.deadline_seconds):
                rank = await self._best_rank(call)
        except TimeoutError:
            return FetchReply()
        finally:
            self._beginning -= 1
        count = self._kept.match(rank, call.names)
        if with_state := bool(self._kept.snapshots):
            size = self._kept.block_tokens
            count = self._kept.cached_tokens(rank, call.names, count * size, True) // size
        if count < call.first + (not with_state) or not count:
            return FetchReply()
        if not self._may(call) or call.handoff_id in self._outgoing:
            return FetchReply()
        owner, pages = self._kept.hold(rank, call.names[:count])
        handoff = OutgoingHandoff(call.handoff_id, 0, owner, until, call.asker)
        self._given[owner] = handoff
        self._outgoing.open(handoff, lambda error: self._ended(owner), awaits=True)
        # the snapshot may be dropped while blocks wait to be fetched, so it is extracted at once
        states = self._extract_snapshot(handoff, rank, call.names[:count]) if with_state else []
        self._tasks.spawn(self._offer(handoff, rank, pages, call.first, count, states))
        return FetchReply(count - call.first, with_state)

    def moved(self) -> None:
        """Lets transfers offer further blocks. Called when a receiver has fetched a block."""
        self._moved.set()

    def _ended(self, owner: int) -> None:
        del self._given[owner]
        self._kept.release(owner)
        self._moved.set()

    def cut(self, owner: int) -> None:
        """Ends a transfer that has lost its pages to a sequence."""
        self._counters.add("peer_gives_cut")
        self._outgoing.end(self._given[owner], HandoffError("its owner needs the pages"))

    def _may(self, call: FetchCall) -> bool:
        kept = self._kept
        return (
            kept.on
            and not self.closed
            # without snapshots, the only state or window is that of a sequence's newest position
            and (bool(kept.snapshots) or not self._mesh.kv_spec.has_state)
            and not self._mesh.ring_pages
            and kept.block_tokens == call.block_tokens
            and self._loop.failure is None
            and self._outgoing.now() >= kept.closed_until
            and len(self._given) + self._beginning
            < (MOST_GIVEN_WITH_STATE if kept.snapshots else MOST_GIVEN)
        )

    async def _best_rank(self, call: FetchCall) -> int:
        known = tuple([self._kept.match(rank, call.names) for rank in range(self._mesh.ranks)])
        plan = self._sources.best(RestoreQuery(call.names, known))
        if plan is None or len(plan.chain) <= max(known):
            return known.index(max(known))
        await self._sources.restore(plan)
        return plan.rank

    def _extract_snapshot(
        self, handoff: OutgoingHandoff, rank: int, chain: Chain
    ) -> "list[asyncio.Future[StepResult]]":
        tokens = len(chain) * self._kept.block_tokens
        place = self._kept.use_snapshot(rank, chain, tokens)
        offers = snapshot_offers(self._mesh, rank, tokens, self._ids)
        return [self._outgoing.extract(handoff, offer, place) for offer in offers]

    async def _offer(
        self,
        handoff: OutgoingHandoff,
        rank: int,
        pages: tuple[int, ...],
        first: int,
        count: int,
        states: "list[asyncio.Future[StepResult]]",
    ) -> None:
        size, extracts, places = self._kept.block_tokens, states, self._places  # of this role
        try:
            for start in range(first * size, count * size, size):
                while self._full() and not handoff.over:
                    self._moved.clear()
                    await self._moved.wait()
                for offer in offers_of_pages(self._mesh, rank, start, start + size, self._ids):
                    await places.acquire()
                    if handoff.over:
                        places.release()
                        return
                    # does not wait for it, because the mesh runs other commands in between
                    extracts.append(self._outgoing.extract(handoff, offer, pages))
                    extracts[-1].add_done_callback(lambda _: places.release())
            if self._decodes:
                self._kept.release(handoff.sequence)
            await asyncio.gather(*extracts)
        except JdisaggError:
            return  # the mesh failed, and all its hand-offs with it
        if not handoff.over:
            self._counters.add("peer_blocks_given", count - first)
            self._outgoing.finish(handoff, lambda offers: HandoffEnd(offers, count * size, ()))

    def _full(self) -> bool:
        offered = sum([handoff.outstanding_tokens for handoff in self._given.values()])
        chunk = self._mesh.chunk_buckets[-1] * self._mesh.layer_groups
        return offered >= (MOST_CHUNKS_OF_DECODE if self._decodes else MOST_CHUNKS) * chunk
