"""Kept blocks that a worker gives to others: a prefill worker that is given a prompt may fetch its
beginning from one that keeps it, be it one that prefills or one that decodes
(`worker/fetched_kv.py` is the asker's side).

The holder decides. What it has in its pages, or may bring back from host memory, it holds there, so
that it is not given away, and offers as a hand-off of its own (`worker/outgoing_kv.py`), with the
checksums, heartbeats and leases of any; when that is over, however it ends, the pages are let go.
Few are given at a time, and of all together no more than a few chunks are offered and not fetched:
the rest waits. A block is known by its name, keyed and with its tenant in it, so that who can name
one may have it; one whose blocks are cut otherwise gets none.

A mesh that decodes gives without being in the way of its steps. Few extractions are issued at a
time, and no more than these come between two steps; pages are let go as soon as all that reads them
is issued, for commands run in their order; and where a sequence lacks pages, what still holds some
for others gives way: that hand-off ends."""

import asyncio

from jdisagg.errors import HandoffError, InvalidRequestError, JdisaggError
from jdisagg.messages.ports import FetchCall, FetchReply, HandoffEnd, Offer
from jdisagg.messages.step_commands import ExtractResult, StepResult
from jdisagg.scheduler.brought_blocks import BroughtBlocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.fetch_prices import MOST_CHUNKS, MOST_CHUNKS_OF_DECODE
from jdisagg.scheduler.residency import Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.host_tier import HostTier, RestorePlan
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.outgoing_kv import OutgoingHandoff, OutgoingKv, extraction, offers_of_pages
from jdisagg.worker.step_loop import StepLoop

MOST_GIVEN = 16  # hand-offs
BETWEEN_STEPS = 16  # extractions, of a mesh that decodes
MOST_NAMES = 1 << 16


class GivenKv:
    """Of one mesh. `kept`: what stays in its pages; `host`: behind them; None: nothing does, the
    mesh decodes."""

    def __init__(
        self,
        kept: Residency,
        host: HostTier | None,
        outgoing: OutgoingKv,
        loop: StepLoop,
        mesh: MeshLimits,
        context: WorkerContext,
        counters: Counters,
    ) -> None:
        self._kept = kept
        self._host = host
        self._outgoing = outgoing
        self._loop = loop
        self._mesh = mesh
        self._context = context
        self._counters = counters
        self._given: dict[int, tuple[int, OutgoingHandoff]] = {}  # rank and hand-off, by owner
        self._holding: set[int] = set()  # of these, who hold pages
        self._places = asyncio.Semaphore(BETWEEN_STEPS)  # used where the mesh decodes
        self._beginning = 0
        self._moved = asyncio.Event()  # something was fetched, or ended
        self._closed_until = 0.0
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._given)

    def close_for(self, seconds: float) -> None:
        """Nothing is given for so long: others may have forgotten already what is to be forgotten
        here, too."""
        self._closed_until = self._context.clock.now() + seconds

    def stop(self) -> None:
        self._tasks.cancel()

    async def give(self, call: FetchCall) -> FetchReply:
        """Begins a hand-off of what is here of the blocks asked for. Raises HandoffError where its
        id is in use, InvalidRequestError for what is no chain."""
        if not 0 <= call.first < len(call.names) <= MOST_NAMES:
            raise InvalidRequestError(
                f"fetch: {len(call.names)} names from the {call.first}th on; give 1 to {MOST_NAMES}"
                " and a place among them"
            )
        if call.handoff_id in self._outgoing:
            raise HandoffError(f"hand-off {call.handoff_id} exists already; give each its own id")
        if not self._may(call):
            return FetchReply()
        self._beginning += 1
        try:
            rank = await self._best_rank(call)
        finally:
            self._beginning -= 1
        count = self._kept.match(rank, call.names)
        if count <= call.first or not self._may(call) or call.handoff_id in self._outgoing:
            return FetchReply()
        owner = self._kept.guest()
        pages = self._kept.hold(rank, owner, call.names[:count])
        until = self._context.clock.now() + call.deadline_seconds
        handoff = OutgoingHandoff(call.handoff_id, 0, owner, until, call.asker)
        self._given[owner] = rank, handoff
        self._holding.add(owner)
        self._outgoing.open(handoff, awaits=True)
        self._tasks.spawn(self._offer(handoff, rank, pages, call.first, count))
        return FetchReply(count - call.first)

    def moved(self) -> None:
        """Something was fetched."""
        self._moved.set()

    def ended(self, owner: int) -> bool:
        """The hand-off of `owner` is over; whether it was one of these."""
        found = self._given.pop(owner, None)
        if found is not None:
            self._let_go(found[0], owner)
            self._moved.set()
        return found is not None

    def give_way(self, rank: int) -> bool:
        """Pages of a rank are needed: the youngest of those that hold some there for others ends.
        False: nobody does."""
        for owner, (where, handoff) in reversed(self._given.items()):
            if where == rank and owner in self._holding:
                self._counters.add("peer_gives_cut")
                self._outgoing.end(handoff, HandoffError("its pages are needed where they lie"))
                return True
        return False

    def _let_go(self, rank: int, owner: int) -> None:
        """Idempotent."""
        if owner in self._holding:
            self._holding.remove(owner)
            self._kept.let_go(rank, owner)

    def _may(self, call: FetchCall) -> bool:
        kept = self._kept
        return (
            kept.on
            and kept.block_tokens == call.block_tokens
            and self._loop.failure is None
            and self._context.clock.now() >= self._closed_until
            and len(self._given) + self._beginning < MOST_GIVEN
        )

    async def _best_rank(self, call: FetchCall) -> int:
        """The rank on which most of the chain is, once what host memory has behind it is back."""
        size = self._kept.block_tokens
        wanted = len(call.names) * size
        known = [self._kept.match(rank, call.names) for rank in range(self._mesh.ranks)]
        host = self._host
        if host is None:
            return known.index(max(known))
        worth = [
            max(blocks * size, host.worth(rank, call.names, wanted))
            for rank, blocks in enumerate(known)
        ]
        tokens = max(worth)
        rank = worth.index(tokens)
        if tokens > known[rank] * size:
            plan, nobody = RestorePlan(rank, call.names, tokens), BroughtBlocks(size)
            await host.restore(plan, self._context.clock.now, nobody, asyncio.Event())
        return rank

    async def _offer(
        self, handoff: OutgoingHandoff, rank: int, pages: tuple[int, ...], first: int, count: int
    ) -> None:
        size, summing = self._kept.block_tokens, list[asyncio.Task[None]]()
        try:
            for start in range(first * size, count * size, size):
                while self._full() and not handoff.over:
                    self._moved.clear()
                    await self._moved.wait()
                extracts: list[asyncio.Future[StepResult]] = []
                for offer in offers_of_pages(
                    self._mesh, rank, start, start + size, self._context.ids
                ):
                    if self._host is None:
                        await self._places.acquire()
                    if handoff.over:
                        self._places.release()
                        return
                    extracts.append(self._extract(handoff, offer, pages))
                # the mesh has its own work between: nothing waits for one block before the next
                summing.append(self._tasks.spawn(self._announce(handoff, extracts)))
            if self._host is None:
                self._let_go(rank, handoff.sequence)
            await asyncio.gather(*summing)
        except JdisaggError:
            return  # the mesh is broken, and with it all that leaves it
        if not handoff.over:
            self._counters.add("peer_blocks_given", count - first)
            self._outgoing.finish(handoff, lambda offers: HandoffEnd(offers, count * size, ()))

    def _extract(
        self, handoff: OutgoingHandoff, offer: Offer, pages: tuple[int, ...]
    ) -> "asyncio.Future[StepResult]":
        handoff.announce((offer,))
        key, page_size = self._outgoing.checksum_key, self._mesh.page_size
        extracting = self._loop.submit(
            extraction(self._loop.next_number(), offer, pages, page_size, key)
        )
        if self._host is None:
            extracting.add_done_callback(lambda _: self._places.release())
        return extracting

    async def _announce(
        self, handoff: OutgoingHandoff, extracts: "list[asyncio.Future[StepResult]]"
    ) -> None:
        try:
            done = await asyncio.gather(*extracts)
        except JdisaggError:
            return  # likewise
        if self._outgoing.checksum_key and not handoff.over:
            sums = [one.checksum for one in done if isinstance(one, ExtractResult)]
            handoff.announce_checksums(sums)

    def _full(self) -> bool:
        offered = sum([handoff.outstanding_tokens for _, handoff in self._given.values()])
        chunk = self._mesh.chunk_buckets[-1] * self._mesh.layer_groups
        return offered >= (MOST_CHUNKS if self._host is not None else MOST_CHUNKS_OF_DECODE) * chunk
