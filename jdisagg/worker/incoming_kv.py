"""Receives KV for the sequences that have pages reserved on a decode mesh. The senders are prefill
workers and other decode workers.

If a source fails, the reservation and the verified blocks remain. Until the lease ends, another
source may send the remaining positions (`HandoffState.ORPHANED`). For a migrated sequence, the
transfer (hand-off) includes the generated tokens. The outcome for each reservation is reported to
`KvEvents`. Used on the event loop only."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.config import LimitsConfig
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError, UnavailableError
from jdisagg.messages.ports import FirstToken, HandoffSource, SourceLost
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.sequences import SequenceGroup
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import Destination, WindowDestination
from jdisagg.worker.incoming_handoff import IncomingHandoff, Received
from jdisagg.worker.peers import Peers
from jdisagg.worker.step_loop import StepLoop


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
    task: "asyncio.Task[None] | None" = None


class IncomingKv:
    def __init__(
        self,
        state: DecodeState,
        loop: StepLoop,
        peers: Peers,
        limits: LimitsConfig,
        counters: Counters,
        events: KvEvents,
    ) -> None:
        self._state = state
        self._loop = loop
        self._peers = peers
        self._limits = limits
        self._now = peers.now
        self._counters = counters
        self._events = events
        self._incoming: dict[int, _Incoming] = {}

    def __len__(self) -> int:
        """Returns the number of transfers in progress."""
        return len(self._handoffs()) if self._incoming else 0

    @property
    def arriving(self) -> bool:
        return any([handoff.arriving for handoff in self._handoffs()])

    def completing_before(self, step: int) -> bool:
        return any([one.completing and one.last_insertion < step for one in self._handoffs()])

    def senders(self) -> set[str]:
        return {handoff.line.link.peer for handoff in self._handoffs()}

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
        granule, wanted = self._state.limits.granule_tokens, len(group.known_tokens)
        kept = min(incoming.kept_tokens, wanted - 1) // granule * granule
        # cached pages are shared, so they must not be written
        kept = max(kept, group.cached_tokens)
        self._state.advance(group, HandoffEvent.NEW_SOURCE, group.until)
        incoming.firsts.update((first.child, first) for first in firsts)
        self._counters.add("sources_replaced")
        self._counters.add("kv_tokens_kept", kept)
        self._receive_from(source, group, kept)
        return kept

    def forget(self, key: int, reason: str) -> None:
        """Stops receiving a group's KV and aborts the hand-off at its sender. Idempotent."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None and incoming.handoff is not None:
            self._close(incoming, reason)

    def stop(self) -> None:
        for key in list(self._incoming):
            self.forget(key, "the receiver stops")

    def _handoffs(self) -> list[IncomingHandoff]:
        return [one.handoff for one in self._incoming.values() if one.handoff is not None]

    def _close(self, incoming: _Incoming, reason: str) -> int:
        handoff, task = incoming.handoff, incoming.task
        assert handoff is not None and task is not None
        incoming.handoff = incoming.task = None
        task.cancel()
        handoff.give_up(reason)
        return handoff.kept_tokens()

    def _receive_from(
        self, source: HandoffSource, group: SequenceGroup, cached_tokens: int
    ) -> None:
        incoming, limits = self._incoming[group.key], self._state.limits

        def slot() -> int:
            return self._state.states.slot(group.rank, group.key)

        try:
            line = self._peers.line_to(source, group.attempt)
        except JdisaggError as error:
            self._lost(group, incoming, source, error, cached_tokens)
            return
        incoming.handoff = IncomingHandoff(
            self._loop,
            line,
            Destination(
                group.rank,
                lambda tokens: self._pages(group, tokens),
                limits.layer_groups,
                cached_tokens,
                slot if limits.kv_spec.has_state else None,
                WindowDestination(
                    lambda tokens: limits.ring(slot(), tokens),
                    limits.window_groups,
                    limits.seen_from,
                )
                if limits.windows_apart
                else None,
            ),
            self._limits,
            self._counters,
            self._now,
            self._peers.share(source.worker),
        )
        incoming.task = asyncio.get_running_loop().create_task(
            self._receive(group, incoming, incoming.handoff)
        )

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
            self._lost(group, incoming, handoff.line.source, known, handoff.kept_tokens())

    def _complete(self, group: SequenceGroup, incoming: _Incoming, received: Received) -> None:
        del self._incoming[group.key]
        if group.key in self._state.groups:
            self._counters.add("handoffs_completed")
            self._counters.add("kv_bytes_received", received.bytes_moved)
            firsts = incoming.firsts
            received.firsts = tuple([firsts.get(first.child, first) for first in received.firsts])
            self._events.kv_complete(group, received)

    def _lost(
        self,
        group: SequenceGroup,
        incoming: _Incoming,
        source: HandoffSource,
        error: JdisaggError,
        kept_tokens: int,
    ) -> None:
        incoming.handoff = incoming.task = None
        incoming.kept_tokens = kept_tokens
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
