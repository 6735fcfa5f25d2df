"""The KV that comes to a decode worker's reservations: from a source, from another when that fails, until the sequence may join.

A source that fails does not end a reservation: what has come and was verified is kept, whoever listens is told, and within a lease
another source may take over from there (`HandoffState.ORPHANED`). A running sequence that moved here brings its tokens along, and goes on
where it was. Touched on the event loop only; knows no steps and no batches but that a sequence is ready.
"""

import asyncio
import contextlib
from collections.abc import Callable

from jdisagg.clock import Clock
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.ports import HandoffSource, ResumeCall, SourceLost
from jdisagg.errors import HandoffError, IncompatiblePeerError, JdisaggError, UnavailableError
from jdisagg.scheduler.commands import SampledToken
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.sequences import Group
from jdisagg.telemetry import Counters
from jdisagg.worker.handoffs import Handoffs
from jdisagg.worker.receiver import Received
from jdisagg.worker.span_stream import SpanStream
from jdisagg.worker.step_loop import StepLoop

RESUME_SECONDS = 5.0


class Intake:
    """`join` admits a group whose KV is here, with its first tokens; `fail` ends one with an error; `settle`: something changed."""

    def __init__(
        self,
        name: str,
        state: DecodeState,
        streams: dict[int, SpanStream],
        batches: DecodeBatches,
        handoffs: Handoffs,
        limits: LimitsConfig,
        loop: StepLoop,
        clock: Clock,
        counters: Counters,
        join: Callable[[Group, tuple[SampledToken, ...]], None],
        fail: Callable[[Group, JdisaggError], None],
        settle: Callable[[], None],
    ) -> None:
        self._name = name
        self._state = state
        self._streams = streams
        self._batches = batches
        self._handoffs = handoffs
        self._limits = limits
        self._loop = loop
        self._clock = clock
        self._counters = counters
        self._join = join
        self._fail = fail
        self._settle = settle

    def begin(self, group: Group, source: HandoffSource, cached_tokens: int = 0) -> None:
        """Lets the KV from position `cached_tokens` on come from `source`."""
        self._handoffs.begin(
            group,
            source,
            lambda tokens: self._pages(group, tokens),
            cached_tokens,
            done=lambda received: self._received(group, received),
            failed=lambda error, kept: self._lost(group, source, error, kept),
        )

    async def resume(self, call: ResumeCall) -> int | None:
        """`DecodePort.resume_source`."""
        stream = self._streams.get(call.reservation_id)
        if stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESUME_SECONDS):
                    await stream.begun.wait()  # this call may have overtaken that of `generate`
        group = self._state.groups.get(call.reservation_id)
        if group is None or stream is None or stream.attempt != call.attempt or group.handoff.state is HandoffState.RESERVED:
            raise HandoffError(f"worker {self._name!r}: reservation {call.reservation_id} is not held for attempt {call.attempt} any more")
        if group.handoff.state not in (HandoffState.RECEIVING, HandoffState.ORPHANED):
            return None
        here = self._handoffs.abort(group.key, "another source takes over")
        granule, wanted = self._state.limits.granule_tokens, len(group.known_tokens)
        kept = min(stream.kept_tokens if here is None else here, wanted - 1) // granule * granule
        group.handoff = group.handoff.move(HandoffEvent.NEW_SOURCE, stream.until)
        stream.firsts.update((first.child, first) for first in call.firsts)
        self._counters.add("sources_replaced")
        self._counters.add("kv_tokens_kept", kept)
        self.begin(group, call.source, kept)
        return kept

    def _pages(self, group: Group, tokens: int) -> tuple[int, ...]:
        pages = self._state.cover(group, tokens)
        if pages is None:
            raise HandoffError(f"worker {self._name!r} has no pages for the {tokens} positions to which the moving sequence has grown")
        return pages

    def _received(self, group: Group, received: Received) -> None:
        if group.key not in self._state.groups:
            return
        stream = self._streams[group.key]
        stream.kv_bytes_moved, stream.exposed_seconds = received.bytes_moved, received.exposed_seconds
        self._counters.add("handoffs_completed")
        self._counters.add("kv_bytes_received", received.bytes_moved)
        if not received.moved:
            firsts = [stream.firsts.get(first.child, first) for first in received.firsts]
            self._join(group, tuple(SampledToken(group.key, first.child, first.token_id, first.logprobs) for first in firsts))
        elif not self._batches.take_over(group, received.moved, stream.until):
            self._fail(group, HandoffError(f"worker {self._name!r} cannot go on with the sequence that moved to it"))
        self._settle()

    def _lost(self, group: Group, source: HandoffSource, error: JdisaggError, kept_tokens: int) -> None:
        """What is missing will not come from this source. The reservation waits for another, with what it has."""
        if group.key not in self._state.groups:
            return
        if not isinstance(error, UnavailableError | IncompatiblePeerError) or self._loop.failure is not None:
            return self._fail(group, error)
        stream = self._streams[group.key]
        until = min(stream.until, self._clock.now() + self._limits.handoff_lease_seconds)
        group.handoff = group.handoff.move(HandoffEvent.SOURCE_LOST, until)
        stream.kept_tokens = kept_tokens
        self._counters.add("sources_lost")
        stream.tell(lost=SourceLost(source.handoff_id, kept_tokens, error.message))
