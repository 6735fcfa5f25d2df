"""KV from other workers: the last sources in the plan of a reservation's blocks.

A worker that may hold cached blocks of a prompt, which the router names, is a source as host memory
is (`KvSource`): it is asked by the blocks' names and answers how many it sends
(`worker/given_kv.py`). What no cache has comes from the prefill worker, or from the decode worker
that a sequence leaves, together with the sequence's tokens. Both arrive by hand-offs
(`worker/incoming_handoff.py`), whose blocks are pulled, inserted and verified as those of host
memory are.

If a prefill worker fails, the reservation and the verified blocks remain. Until the lease ends,
another source may send the remaining positions (`HandoffState.ORPHANED`). The outcome for each
reservation is reported to `KvEvents`. A failed fetch of cached blocks only costs time
(`peer_fetch_failed`, by cause). Used on the event loop only."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from jdisagg.config import LimitsConfig
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError, UnavailableError
from jdisagg.messages.ports import FetchCall, FirstToken, HandoffSource, SourceLost
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.sequences import SequenceGroup
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import Destination, state_weight
from jdisagg.worker.incoming_handoff import IncomingHandoff, Received
from jdisagg.worker.kv_sources import KvSource, Origin, Restore, RestorePlan, RestoreQuery
from jdisagg.worker.peers import Peers, SenderLine
from jdisagg.worker.step_loop import StepLoop

MOST_FETCHES = 4  # simultaneous restores; their blocks in flight need memory besides the pages


class KvEvents(Protocol):
    """Callbacks for the outcome of a group's KV transfer. They are called only while the group
    exists."""

    def kv_complete(self, group: SequenceGroup, received: Received) -> None: ...

    def kv_lost(self, group: SequenceGroup, lost: SourceLost) -> None:
        """Called when the source failed and another source may send the remaining KV."""
        ...

    def fail(self, group: SequenceGroup, error: JdisaggError) -> None:
        """Called when the group must end, because no source can send the remaining KV."""
        ...


@dataclass(slots=True)
class _Incoming:
    kept_tokens: int = 0
    firsts: dict[int, FirstToken] = field(default_factory=dict)
    handoff: IncomingHandoff | None = None


class IncomingKv(KvSource):
    """Args:
    fetches: Prices of restores of other workers' cached blocks; None if there are none.
    """

    name: Origin = "peer"

    def __init__(
        self,
        state: DecodeState,
        loop: StepLoop,
        peers: Peers,
        limits: LimitsConfig,
        counters: Counters,
        events: KvEvents,
        fetches: Prices | None,
    ) -> None:
        self.prices = fetches or Prices()
        self._fetch_seconds = limits.pull_seconds * limits.timeouts.handoff.pull_tries
        self.most_seconds = self._fetch_seconds
        self._state, self._kept, self._mesh = state, state.residency, state.limits
        self._loop = loop
        self._peers = peers
        self._limits = limits
        self._now = peers.now
        self._counters = counters
        self._events = events
        self._incoming: dict[int, _Incoming] = {}
        self.most_restores = MOST_FETCHES if fetches else 0
        self._fetching: list[IncomingHandoff] = []

    def __len__(self) -> int:
        """Returns the number of hand-offs to reservations in progress."""
        return len(self._handoffs()) if self._incoming else 0

    @property
    def arriving(self) -> bool:
        return any([handoff.blocks.arriving for handoff in self._handoffs()])

    def completing_before(self, step: int) -> bool:
        return any(
            [one.completing and one.blocks.last_insertion < step for one in self._handoffs()]
        )

    def expire(self, now: float) -> None:
        handoffs = (*self._fetching, *self._handoffs())
        self._peers.sweep(now, {handoff.line.link.peer for handoff in handoffs})

    def _handoff(self, line: SenderLine, to: Destination) -> IncomingHandoff:
        return IncomingHandoff(self._loop, line, to, self._limits, self._counters, self._now)

    # ---- of the sequences that have pages

    def begin(self, group: SequenceGroup, source: HandoffSource) -> None:
        self._incoming[group.key] = _Incoming(group.cached_tokens)
        self._receive_from(source, group, group.cached_tokens)

    def replace_source(
        self, group: SequenceGroup, source: HandoffSource, firsts: tuple[FirstToken, ...]
    ) -> int | None:
        """Receives the remaining KV from another source. Returns the first position that the source
        must send. Returns None if the group has all its KV, so that no source is needed."""
        if group.handoff.state not in (HandoffState.RECEIVING, HandoffState.ORPHANED):
            return None
        incoming = self._incoming.setdefault(group.key, _Incoming(group.cached_tokens))
        if incoming.handoff is not None:
            incoming.kept_tokens = self._close(incoming, "another source takes over")
        granule, wanted = self._mesh.granule_tokens, len(group.known_tokens)
        kept = min(incoming.kept_tokens, wanted - 1) // granule * granule
        # cached pages are shared, so they must not be written
        kept = max(kept, group.cached_tokens)
        self._state.advance(group, HandoffEvent.NEW_SOURCE, group.until)
        incoming.firsts.update((first.child, first) for first in firsts)
        self._counters.add("sources_replaced")
        self._counters.add("kv_tokens_kept", kept)
        self._receive_from(source, group, kept)
        return kept

    def let_go(self, owner: int) -> None:
        incoming = self._incoming.pop(owner, None)
        if incoming is not None and incoming.handoff is not None:
            self._close(incoming, "the receiver gave the sequence up")

    def stop(self) -> None:
        for key in list(self._incoming):
            self.let_go(key)

    def _handoffs(self) -> list[IncomingHandoff]:
        return [one.handoff for one in self._incoming.values() if one.handoff is not None]

    def _close(self, incoming: _Incoming, reason: str) -> int:
        handoff, incoming.handoff = incoming.handoff, None
        assert handoff is not None and handoff.task is not None
        handoff.task.cancel()
        handoff.give_up(reason)
        return handoff.blocks.kept_tokens()

    def _receive_from(
        self, source: HandoffSource, group: SequenceGroup, cached_tokens: int
    ) -> None:
        incoming, place = self._incoming[group.key], self._state.room.place
        try:
            line = self._peers.line_to(source, group.attempt)
        except JdisaggError as error:
            self._lost(group, incoming, source, error, cached_tokens)
            return
        to = Destination(
            self._mesh,
            group.rank,
            lambda tokens: self._pages(group, tokens),
            cached_tokens,
            lambda kind, tokens: place(kind, group.rank, group.key, tokens),
        )
        incoming.handoff = handoff = self._handoff(line, to)
        receiving = self._receive(group, incoming, handoff)
        handoff.task = asyncio.get_running_loop().create_task(receiving)

    async def _receive(
        self, group: SequenceGroup, incoming: _Incoming, handoff: IncomingHandoff
    ) -> None:
        try:
            await handoff.line.greet(self._peers)
            received = await handoff.receive()
            if not handoff.closed:
                self._complete(group, incoming, received)
        except Exception as error:
            if handoff.closed:
                return  # another source may be writing to this reservation by now
            self._counters.add("handoffs_failed")
            handoff.give_up(str(error))
            known = (
                error
                if isinstance(error, JdisaggError)
                else UnavailableError(f"hand-off failed: {type(error).__name__}: {error}")
            )
            self._lost(group, incoming, handoff.line.source, known, handoff.blocks.kept_tokens())

    def _complete(self, group: SequenceGroup, incoming: _Incoming, received: Received) -> None:
        del self._incoming[group.key]
        if group.key in self._state.groups:
            self._counters.add("handoffs_completed")
            self._counters.add("kv_bytes_received", received.bytes_moved)
            known, end = incoming.firsts, received.end
            firsts = tuple([known.get(first.child, first) for first in end.firsts])
            received.end = msgspec.structs.replace(end, firsts=firsts)
            self._events.kv_complete(group, received)

    def _lost(
        self,
        group: SequenceGroup,
        incoming: _Incoming,
        source: HandoffSource,
        error: JdisaggError,
        kept_tokens: int,
    ) -> None:
        incoming.handoff, incoming.kept_tokens = None, kept_tokens
        if group.key not in self._state.groups:
            return
        recoverable = isinstance(error, UnavailableError | IncompatiblePeerError)
        if not recoverable or self._loop.failure is not None:
            return self._events.fail(group, error)
        until = min(group.until, self._now() + self._limits.handoff_lease_seconds)
        self._state.advance(group, HandoffEvent.SOURCE_LOST, until)
        self._counters.add("sources_lost")
        self._events.kv_lost(group, SourceLost(source.handoff_id, kept_tokens, error.message))

    def _pages(self, group: SequenceGroup, tokens: int) -> tuple[int, ...]:
        pages = self._state.cover(group, tokens)
        if pages is None:
            raise HandoffError(
                f"this worker has no pages for the {tokens} positions to which the moving sequence"
                " has grown"
            )
        return pages

    # ---- cached by other workers

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        kept = self._kept
        if query.peer is None or self._now() < kept.closed_until:
            return None
        usable = kept.usable_tokens(query.peer_tokens, query.instead == "compute")
        chain = query.chain[: usable // kept.block_tokens]
        query = replace(
            query, chain=chain, known=tuple([min(one, len(chain)) for one in query.known])
        )
        runs = {rank: (1,) * (len(chain) - query.known[rank]) for rank in query.ranks}

        def snapshot(end: int) -> int | None:
            whole = end == len(chain)
            return self._snapshot_tokens(end * kept.block_tokens) if whole else None

        plan = self.plan(kept, query, runs, snapshot, query.ahead_tokens)
        return plan and replace(plan, snapshot=bool(kept.snapshots))

    async def bring(self, restore: Restore) -> str:
        plan, size, handoff = restore.plan, self._kept.block_tokens, None
        whole, blocks, done = len(plan.chain) * size, restore.first, False
        if plan.snapshot and restore.place(self._kept, whole) is None:
            return "room"
        try:
            handoff = await self._ask(restore)
            if handoff is None:
                return "gone"
            restore.closing.append(handoff.close)
            self._fetching.append(handoff)
            await handoff.receive()
            restore.restored, done = plan.snapshot, True
        except JdisaggError as error:
            spoiled = handoff is not None and handoff.spoiled
            refused = isinstance(error, IncompatiblePeerError)
            return "spoiled" if spoiled else "refused" if refused else "lost"
        finally:
            if handoff is not None:
                self._fetching.remove(handoff)
                handoff.close()
                if not done:
                    handoff.give_up("the fetch was given up")
                blocks = handoff.blocks.kept_tokens() // size
            restore.origins.update(dict.fromkeys(range(restore.first, blocks), self.name))
        restore.moved_tokens = (blocks - restore.first) * size
        if restore.restored:
            restore.moved_tokens += self._snapshot_tokens(blocks * size)
            self._counters.add("peer_snapshots_fetched")
        return "gone" if blocks < len(plan.chain) else ""

    async def _ask(self, restore: Restore) -> IncomingHandoff | None:
        plan, size, mesh = restore.plan, self._kept.block_tokens, self._mesh
        assert plan.peer is not None, "`worth` plans with a peer only"
        line = self._peers.line_to(plan.peer, 0)
        await line.greet(self._peers, codec="none")  # a cached block must be exact
        seconds = plan.patience_seconds or self._fetch_seconds
        own, handoff_id = self._peers.own_name, plan.peer.handoff_id
        call = FetchCall(handoff_id, own, plan.chain, restore.first, size, seconds)
        try:
            reply = await line.peer.fetch(call)
        except BaseException:
            line.give_up("its answer is not waited for")
            raise
        if plan.snapshot and not reply.snapshot:
            line.give_up("its blocks come without a snapshot")
            return None
        if reply.blocks < 1 and not reply.snapshot:
            return None
        start = restore.first * size
        place = restore.place(self._kept, start + reply.blocks * size)

        def pages(tokens: int) -> tuple[int, ...]:
            return restore.pages[: pages_for(tokens, mesh.page_size)]

        snapshot = (lambda *_: place) if place else None
        return self._handoff(line, Destination(mesh, plan.rank, pages, start, snapshot))

    def failed(self, cause: str) -> None:
        self._counters.add("peer_fetch_failed", cause=cause)

    def _snapshot_tokens(self, end: int) -> int:
        mesh = self._mesh
        seen, spec = end - mesh.seen_from(end), mesh.kv_spec.windowed
        windows = seen * spec.bytes_per_token // mesh.sent.bytes_per_token
        return state_weight(mesh) // mesh.layer_groups + (windows if mesh.windows_apart else 0)
