"""The decode worker: receives the KV of prompts and generates tokens on one mesh.

In modes CHUNKED and UNIFIED the mesh computes prompts itself. In mode DISAGGREGATED it receives
their KV from prefill workers. It may still compute prompts with few uncached tokens
(`MeshLimits.append_buckets`). Cached blocks in slower tiers are restored to reserved pages
(`KvSources.fill`). Other decode workers
take over running sequences through `PeerPort`, and other workers fetch cached blocks. If a source
of KV fails, the reservation waits for another source. After each change of state the loop takes a
turn (`scheduler/turn.py`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec

from jdisagg.clock import within
from jdisagg.config import InstanceConfig, LimitsConfig, Mode
from jdisagg.errors import (
    BrokenModelError,
    DeadlineExceededError,
    HandoffError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.messages.ports import (
    FetchCall,
    FetchReply,
    GenerateCall,
    HandoffSource,
    Reservation,
    ReserveCall,
    ResumeCall,
    SourceLost,
    Span,
)
from jdisagg.messages.step_commands import (
    DecodeResult,
    DecodeSteps,
    PrefillChunk,
    PrefillResult,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.request import FinishReason, Request
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.prompt import Prompt
from jdisagg.scheduler.prompts import check_queue
from jdisagg.scheduler.sequences import ChildProgress, SequenceGroup, Stage
from jdisagg.scheduler.turn import Facts, Turn
from jdisagg.worker.incoming_handoff import Received
from jdisagg.worker.incoming_kv import IncomingKv
from jdisagg.worker.kv_sources import RestoredBlocks
from jdisagg.worker.mesh_worker import MeshWorker, WorkerContext
from jdisagg.worker.migration import MigrationSender
from jdisagg.worker.outgoing_kv import OutgoingHandoff
from jdisagg.worker.peers import PeerResolver
from jdisagg.worker.span_stream import SpanStream

MOST_MOVES = 3
_OVERDUE = {
    HandoffState.RESERVED: "its lease passed before generate took it over",
    HandoffState.ORPHANED: "its source failed, and its lease passed before another came",
}


class DecodeWorker(MeshWorker):
    """Implements `DecodePort`."""

    def __init__(
        self,
        context: WorkerContext,
        executor: Executor,
        config: InstanceConfig,
        limits: LimitsConfig,
        peers: PeerResolver,
        mode: Mode = Mode.DISAGGREGATED,
        fetches: bool = False,
    ) -> None:
        role = WorkerRole.DECODE if mode is Mode.DISAGGREGATED else WorkerRole.MIXED
        super().__init__(role, context, executor, config, limits, peers if fetches else None)
        self._computes = role is WorkerRole.MIXED
        state, counters = self._state, self.counters
        self._granting: dict[int, asyncio.Future[SequenceGroup]] = {}  # by the key of the prompt
        self._streams: dict[int, SpanStream] = {}
        timeouts = limits.timeouts.handoff
        self._peers = self._connect(peers, config.codec)
        self._incoming = IncomingKv(state, self._loop, self._peers, limits, counters, events=self)
        self._migration = MigrationSender(
            state, self._outgoing, self._loop, context.ids, timeouts, counters
        )

    # ---- the loop

    def _carry_out(self, turn: Turn) -> StepCommand | None:
        if turn.yielded:
            self.counters.add("sequences_yielded", turn.yielded)
        for owner in turn.cut:
            self._given.cut(owner)
        for group in turn.groups:
            self._streams[group.key] = SpanStream(group, self._hello.weights)
            granted = self._granting.pop(group.key)
            if not granted.done():  # otherwise the call has been given up
                granted.set_result(group)
        if self._report(turn.news):
            self._loop.wake()  # others may get what became free
        if turn.interrupt and self._interruptible is not None:
            self._interruptible.interrupt()
        return turn.command

    def _facts(self, step: int | None) -> Facts:
        spans, loop = self._interruptible is not None, self._loop
        newest = loop.newest(DecodeSteps) if step is not None else 0
        now = self._clock.now()
        return Facts(
            step,
            now + self._limits.reservation_lease_seconds,
            newest > 0,
            loop.in_flight(PrefillChunk),
            not spans and step is not None and self._incoming.arriving,
            not spans and newest > 0 and self._incoming.completing_before(newest),
            at=now,
        )

    def _apply(self, command: StepCommand, result: StepResult) -> None:
        if isinstance(command, PrefillChunk):
            assert isinstance(result, PrefillResult)
            self._apply_chunk(command, result)
        else:
            assert isinstance(command, DecodeSteps) and isinstance(result, DecodeResult)
            if command.chunk is not None and result.chunk is not None:
                self._apply_chunk(command.chunk, result.chunk)
            for group, token in self._scheduler.batches.apply(result, self._loop.took):
                self.fail(group, self._unchosen(group.request, token))
            self._count_drafts()
        self._scheduler.ended(command, self._loop.took)
        self._migration.poke()

    def _count_drafts(self) -> None:
        every = self._scheduler.batches.forced_tokens
        if every and (forced := every - self.counters["forced_tokens"]):
            self.counters.add("forced_tokens", forced)
        for source, drafted, accepted in self._scheduler.batches.take_drafts():
            self.counters.add("drafted_tokens", drafted, source=source)
            self.counters.add("accepted_tokens", accepted, source=source)

    def _prefilled(self, key: int, firsts: list[SampledToken]) -> None:
        group, stream = self._state.groups.get(key), self._streams.get(key)
        if stream is not None:
            stream.prompt_logprobs = self._prompts[key].all_scores
        if group is not None:
            self._join(group, tuple(firsts))

    def _report(self, news: list[ChildProgress]) -> bool:
        """Returns whether a group has ended. Nothing more is written to its pages then."""
        ended = False
        for progress in news:
            key = progress.group_key
            if (stream := self._streams.get(key)) is not None:
                stream.put(progress)
            if key not in self._state.groups:
                ended = True
                self._adapters.poke()
                self._incoming.forget(key, "the receiver gave the sequence up")
                self._migration.abort(key, "the sequence has ended")
                self._prompts.forget(key)
                self._sources.let_go(key)
        return ended

    def _end(self, group: SequenceGroup, preempted: bool = False, awaited: bool = False) -> None:
        self._state.end_group(group, preempted, awaited=awaited)
        self._report(self._state.take_news())

    # ---- reservations

    async def reserve(self, call: ReserveCall) -> Reservation:
        arrival = self._clock.now() - call.age_seconds
        await self._compiled(call.request, call.deadline_seconds)
        async with self._adapters.held(call.request, call.deadline_seconds):
            if len(self._granting) >= self._config.queue_limit:
                await asyncio.sleep(0)  # the turn that is due may grant some
            self._take(call)
            prompt = Prompt(
                self._state.new_key(),
                call.request,
                call.children,
                arrival,
                call.attempt,
                call.computes or self._computes,
            )
            if call.aside_seconds is not None:
                prompt.since = arrival + max(0.0, call.age_seconds - call.aside_seconds)
            key = prompt.key
            self._granting[key] = asyncio.get_running_loop().create_future()
            self._prompts.begin(prompt, named=not call.whole, shared=self._computes)
            self._seek(prompt)
            self._loop.wake()
            began = self._clock.now()
            group = await self._granted(key, call.deadline_seconds)
        if not group.alive:
            raise self._not_held(key, call.attempt)
        if call.aside_seconds is not None:
            for child in group.alive:
                child.aside_seconds = call.aside_seconds + self._clock.now() - began
        self._hold(group, call.deadline_seconds)  # a restore may outlast the lease
        try:
            restored = await self._restore(group, prompt, call)
        except BaseException:
            self._drop(key)
            raise
        self._count_reuse(prompt, group.rank, group.cached_tokens, restored)
        return self._reserved(group, restored)

    async def _granted(self, key: int, seconds: float) -> SequenceGroup:
        try:
            return await within(self._granting[key], seconds)
        except BaseException as error:
            self._admission.withdraw(key)
            self._granting.pop(key, None)
            self._drop(key)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"worker {self.name!r} had no free pages for the request within its"
                    f" {seconds:g} s"
                ) from None
            raise

    async def _restore(
        self, group: SequenceGroup, prompt: Prompt, call: ReserveCall
    ) -> RestoredBlocks:
        kept, rank = self._kept, group.rank
        restored, known = RestoredBlocks(kept.block_tokens), [0] * self._mesh.ranks
        if prompt.useful:
            known[rank] = group.cached_tokens // kept.block_tokens
            # a prefill worker would have to compute the accepted tokens before it sends their KV
            computes = prompt.computes or call.children[0].accepted
            instead = "compute" if computes else "receive"
            query = self._query(prompt, call)
            query = replace(query, known=tuple(known), only=rank, instead=instead)
            pages = self._state.ledgers[rank].pages(group.key)
            blocks = await self._sources.fill(query, group.key, pages, restored)
            usable = kept.usable_tokens(blocks * kept.block_tokens, prompt.computes)
            group.cached_tokens = max(group.cached_tokens, usable)
        return restored

    def _hold(self, group: SequenceGroup, seconds: float) -> None:
        group.handoff = group.handoff.expect(self._clock.now() + seconds)
        if (stream := self._streams.get(group.key)) is not None:
            stream.lease_until = group.handoff.deadline

    def _seek(self, prompt: Prompt) -> None:
        if not self._prompts.follows(prompt) and prompt.key in self._granting:
            self._admission.enqueue(prompt)

    def _reserved(self, group: SequenceGroup, restored: RestoredBlocks) -> Reservation:
        key, cached = group.key, group.cached_tokens
        self._hold(group, self._limits.reservation_lease_seconds)
        of_prompt = restored.split(group.rank, min(cached, group.prompt_tokens))
        left, own = max(0.0, group.handoff.deadline - self._clock.now()), self._hello.weights
        block = self._kept.block_tokens
        return Reservation(key, self.name, group.rank, left, cached, of_prompt, own, block)

    def _take(self, call: ReserveCall) -> None:
        self._check_serving(call.request, call.children, call.computes)
        self._attempts.take(call.request, call.children, call.attempt, self._clock.now())
        indices = {child.index for child in call.children}
        later = f"was superseded by attempt {call.attempt}"
        for group in self._state.groups_of(call.request.identity):
            if group.attempt < call.attempt and indices & {child.child for child in group.alive}:
                self.counters.add("attempts_superseded")
                self.fail(group, HandoffError(f"attempt {group.attempt} {later}"))
        for prompt in [self._prompts[key] for key in self._granting]:
            same = prompt.request.identity == call.request.identity
            children = {child.index for child in prompt.children}
            if same and prompt.attempt < call.attempt and indices & children:
                self.counters.add("attempts_superseded")
                self._refuse(prompt.key, HandoffError(f"attempt {prompt.attempt} {later}"))
        self._admission.check(call.request, call.children)
        waiting = [self._prompts[key] for key in self._granting]
        check_queue(self.name, waiting, call.request.priority, self._config.queue_limit)

    def _refuse(self, key: int, error: JdisaggError) -> None:
        self._admission.withdraw(key)
        granted = self._granting.pop(key)
        if not granted.done():
            granted.set_exception(error)

    # ---- sequences

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        stream = self._streams.get(call.reservation_id)
        if stream is None or stream.taken or stream.attempt != call.attempt:
            raise self._not_held(call.reservation_id, call.attempt)
        stream.taken, stream.began_at = True, self._clock.now()
        group = self._state.groups.get(call.reservation_id)
        try:
            if group is not None:
                group.until = self._clock.now() + call.deadline_seconds
                self._state.advance(group, HandoffEvent.GENERATE, group.until)
                self._begin(group, call.source)
            stream.begun.set()
            while (span := await stream.next()) is not None:
                yield span
        finally:
            self._drop(call.reservation_id)

    async def resume_source(self, call: ResumeCall) -> int | None:
        stream = self._streams.get(call.reservation_id)
        if stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.timeouts.handoff.resume_seconds):
                    await stream.begun.wait()  # this call may have arrived before `generate`
        group = self._state.groups.get(call.reservation_id)
        if (
            group is None
            or stream is None
            or stream.attempt != call.attempt
            or group.handoff.state is HandoffState.RESERVED
        ):
            raise self._not_held(call.reservation_id, call.attempt)
        return self._incoming.replace_source(group, call.source, call.firsts)

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
        group = self._state.groups.get(reservation_id)
        if child is None:
            self._drop(reservation_id, awaited)
        elif group is not None:
            for sequence in group.alive:
                if sequence.child == child:
                    self._state.end_child(sequence, FinishReason.CANCELLED)
            self._report(self._state.take_news())
        self._loop.wake()

    def migrate_out(self, reservation_id: int) -> bool:
        """Offers a running sequence to other decode workers. Until one of them has taken it over,
        it continues on this worker. Returns False if the sequence cannot migrate now."""
        group, stream = self._state.groups.get(reservation_id), self._streams.get(reservation_id)
        if group is None or stream is None:
            return False
        if not stream.taken or not self._migration.movable(group):
            return False
        handoff_id = self._migration.begin(group)
        own = self.address, self.boot_id, self._hello.weights
        stream.announce(moving=HandoffSource(self.name, handoff_id, *own))
        return True

    def _not_held(self, reservation_id: int, attempt: int) -> HandoffError:
        return HandoffError(
            f"worker {self.name!r}: reservation {reservation_id} is not held for attempt {attempt}"
            " (any more): its lease passed"
        )

    def _begin(self, group: SequenceGroup, source: HandoffSource | None) -> None:
        if source is not None:
            self._prompts.forget(group.key)
            return self._incoming.begin(group, source)
        cached, samples = group.cached_tokens, [child.sample_spec() for child in group.alive]
        self._prompts.add(group.key, group.rank, tuple(samples), cached, group.epoch)
        group.request = group.request.without_pixels()  # only the queued prompt needs the pixels
        if not self._computes:
            self.counters.add("prompts_appended")
            self.counters.add("tokens_appended", len(group.known_tokens) - cached)
        self._loop.wake()

    def kv_complete(self, group: SequenceGroup, received: Received) -> None:
        stream = self._streams[group.key]
        stream.kv_bytes_moved = received.bytes_moved
        stream.exposed_seconds = received.exposed_seconds
        if not received.moved:
            if group.epoch == self._kept.epoch and not self._kept.snapshots:
                self._kept.keep(group.rank, group.key, group.chain)
            tokens = len(group.known_tokens) - group.cached_tokens
            self._sources.computed_in(tokens, received.exposed_seconds, "receive")
        stream.prompt_logprobs = received.prompt_logprobs
        if not received.moved:
            firsts = [
                SampledToken(group.key, first.child, first.token_id, first.logprobs)
                for first in received.firsts
            ]
            self._join(group, tuple(firsts))
        elif not self._scheduler.batches.take_over(group, received.moved, group.until):
            text = f"worker {self.name!r} cannot go on with the sequence that moved to it"
            self.fail(group, HandoffError(text))
        self._loop.wake()

    def kv_lost(self, group: SequenceGroup, lost: SourceLost) -> None:
        self._streams[group.key].announce(lost=lost)

    def _join(self, group: SequenceGroup, firsts: tuple[SampledToken, ...]) -> None:
        if error := self._unsampled(group.request, firsts):
            return self.fail(group, error)
        copies = self._scheduler.batches.ready(
            group, firsts, self._loop.next_number(), group.handoff.deadline
        )
        if copies is not None:
            self._loop.fire(copies)

    def _drop(self, reservation_id: int, awaited: bool = False) -> None:
        group = self._state.groups.get(reservation_id)
        if group is not None:
            self._end(group, awaited=awaited)
        self._prompts.forget(reservation_id)
        self._streams.pop(reservation_id, None)
        self._loop.wake()  # pages may be free, or the queue may have another first request
        self._quiet.set()

    def fail(self, group: SequenceGroup, error: JdisaggError) -> None:
        if isinstance(error, BrokenModelError):
            self._forget_broken(group.rank)
        stream = self._streams.get(group.key)
        if stream is not None:
            stream.fail(error)
        if group.key in self._state.groups:
            self._end(group)
        self._loop.wake()
        self._quiet.set()

    # ---- the worker

    def _requests_running(self) -> list[Request]:
        return [group.request for group in self._state.groups.values()]

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await super().acknowledge(handoff_id, offer_ids)
        self._migration.poke()

    async def fetch(self, call: FetchCall) -> FetchReply:
        # lossily compressed KV differs from the KV that the requesting worker would compute
        if self._draining or self._config.codec != "none":
            return FetchReply()
        return await super().fetch(call)

    def _handed_over(self, handoff: OutgoingHandoff, error: JdisaggError | None) -> None:
        self._migration.ended(handoff.sequence, error)

    def _busy(self) -> bool:
        others = len(self._given) + len(self._granting)
        return bool(self._state.groups or self._streams or others)

    def _hand_on(self) -> None:
        for key in list(self._state.groups):
            stream = self._streams.get(key)
            if stream is not None and stream.moves < MOST_MOVES:
                stream.moves += self.migrate_out(key)

    def _end_everything(self, error: UnavailableError) -> None:
        for key in list(self._granting):
            self._refuse(key, UnavailableError(error.message))
        for group in list(self._state.groups.values()):
            self.fail(group, UnavailableError(error.message))
        self._incoming.stop()
        self._outgoing.end_all(error)

    def _sweep(self, now: float) -> None:
        for group in self._state.overdue(now):
            self.counters.add("leases_expired")
            self.fail(group, _overdue(group))
        for key, stream in list(self._streams.items()):
            if not stream.taken and stream.lease_until < now:
                del self._streams[key]
        super()._sweep(now)
        self._peers.sweep(now, self._incoming.senders())
        self._loop.wake()
        self._quiet.set()

    def _end_old(self, keep: bool) -> None:
        self._prompts.rename()
        for group in list(self._state.groups.values()):
            if not keep or any(child.stage is Stage.RESERVED for child in group.alive):
                self._end(group, preempted=True)
        self._loop.wake()
        for stream in self._streams.values():
            stream.weights = self._hello.weights

    def _status(self, common: WorkerStatus) -> WorkerStatus:
        state, mesh = self._state, self._mesh
        return msgspec.structs.replace(
            common,
            running=sum(state.living),
            slots=mesh.ranks * mesh.slots_per_rank,
            preemptions=state.preemptions,
            reserved_pages=state.reserved_pages(),
            rank_sequences=tuple(state.living),
            rank_contexts=state.contexts(),
            handoffs=len(self._incoming) + len(self._outgoing),
            drafted_tokens=self.counters["drafted_tokens"],
            accepted_tokens=self.counters["accepted_tokens"],
        )


def _overdue(group: SequenceGroup) -> JdisaggError:
    if reason := _OVERDUE.get(group.handoff.state):
        return HandoffError(f"reservation {group.key}: {reason}")
    return DeadlineExceededError(
        "the request's deadline passed while its tokens were being generated"
    )
