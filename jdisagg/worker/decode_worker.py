"""The decode worker: a mesh's control endpoint, `DecodePort` and `PeerPort` in front, the schedulers and the step loop behind.

It asks the schedulers, runs commands, reports facts; it decides nothing about pages or batches itself. It is mixed-capable:
`generate` without a source prefills in the same pages. Mode CHUNKED then lets prefill chunks alternate with decode steps,
UNIFIED runs whole prefills first; DISAGGREGATED receives KV from a prefill worker (and would prefill locally if asked to).
Running sequences move to another decode worker through its `PeerPort` (worker/movers.py). A source of KV
that fails does not end a reservation: it waits for another.

All state is touched on the event loop only, between awaits, so that every method sees it whole. `_settle` runs after each
change: it hands news to the listeners, grants freed pages to whoever waits, and wakes the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from jdisagg.clock import Clock, within
from jdisagg.config import InstanceConfig, LimitsConfig, Mode
from jdisagg.dispatch.ports import (
    GenerateCall,
    HandoffSource,
    PeerHello,
    PeerMessage,
    PeerPort,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    WorkerRole,
    WorkerStatus,
)
from jdisagg.errors import BrokenModelError, DeadlineExceededError, HandoffError, JdisaggError, OverloadedError, UnavailableError
from jdisagg.request import FinishReason
from jdisagg.scheduler.backlog import Backlog
from jdisagg.scheduler.commands import (
    BROKEN_TOKEN,
    DecodeResult,
    DecodeSteps,
    Executor,
    InterruptibleExecutor,
    PrefillChunk,
    PrefillResult,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState, sweep
from jdisagg.scheduler.prefill_batches import PrefillBatches, PrefillJob
from jdisagg.scheduler.reservations import Reservations
from jdisagg.scheduler.sequences import Group
from jdisagg.telemetry import Counters
from jdisagg.worker.attempts import Attempts
from jdisagg.worker.decode_status import decode_status
from jdisagg.worker.handoffs import Handoffs
from jdisagg.worker.intake import Intake
from jdisagg.worker.movers import Movers
from jdisagg.worker.outbox import Outboxes
from jdisagg.worker.peer_hello import hello_of
from jdisagg.worker.peers import PeerResolver, Peers
from jdisagg.worker.span_stream import SpanStream
from jdisagg.worker.step_loop import StepLoop
from jdisagg.worker.sweeper import Sweeper

MOST_MOVES = 3


class DecodeWorker:
    """Implements `DecodePort` and `PeerPort`. `peers`: whom it may receive from, by name, or a resolver by address; `address`: where
    its own `PeerPort` listens. `ids` gives fresh random 64-bit numbers. `can_prefill`: its mesh has a prefill program (in the one-mesh
    modes it always has)."""

    def __init__(
        self,
        name: str,
        executor: Executor,
        config: InstanceConfig,
        mode: Mode,
        limits: LimitsConfig,
        peers: Mapping[str, PeerPort] | PeerResolver,
        clock: Clock,
        ids: Callable[[], int],
        model_fingerprint: str = "",
        address: str = "",
        can_prefill: bool = False,
    ) -> None:
        self.name = name
        self.address = address
        self.boot_id = ids()
        self.counters = Counters()
        self.loading_seconds: Callable[[], float] = float  # none; set by whoever loads programs while it serves
        self._config = config
        self._mode = mode
        self._can_prefill = can_prefill or mode is not Mode.DISAGGREGATED
        self._limits = limits
        self._clock = clock
        self._state = DecodeState(executor.limits)
        self._reservations = Reservations(self._state, config.growth_tokens, config.ahead_sequences)
        self._interruptible = executor if isinstance(executor, InterruptibleExecutor) else None
        self._batches = DecodeBatches(
            self._state, config.growth_tokens, config.steps_per_dispatch, config.stream_tokens, spans=self._interruptible is not None
        )
        self._prefills = PrefillBatches(executor.limits, ids)
        self._backlog = Backlog()
        self._last_was_prefill = False
        self._tickets: dict[int, asyncio.Future[Group]] = {}
        self._streams: dict[int, SpanStream] = {}
        self._attempts = Attempts()
        self._loop = StepLoop(executor, self._plan, self._apply, self._break_down, clock.now)
        key = ids() if limits.verify else 0
        lease_seconds = limits.handoff_lease_seconds
        hello = hello_of(name, model_fingerprint, executor.limits, executor.card, self.boot_id, key)
        self._peers = Peers(peers, hello, self._loop, config.codec, limits.verify, clock.now)
        self._handoffs = Handoffs(self._loop, self._peers, executor.limits, limits.pull_seconds, clock.now, self.counters)
        holds, ends = (self._state, self._streams, self._batches, self._handoffs), (self._join, self._fail, self._settle)
        self._intake = Intake(name, *holds, limits, self._loop, clock, self.counters, *ends)
        self._boxes = Outboxes(hello, self._loop, clock, lease_seconds, self.counters)
        self._movers = Movers(self._state, self._boxes, self._loop, ids, key, self._settle, self.counters)
        self._sweeper = Sweeper(clock, min(lease_seconds, limits.reservation_lease_seconds), self._sweep, self._loop.break_down)
        self._draining = False
        self._quiet = asyncio.Event()

    async def start(self) -> None:
        self._loop.start()
        self._sweeper.start()

    async def stop(self) -> None:
        """Ends what still runs with UnavailableError and stops the tasks. The executor stays open."""
        self._end_everything(UnavailableError(f"worker {self.name!r} was stopped"))
        await self._sweeper.stop()
        await self._handoffs.stop()
        await self._loop.stop()

    async def drain(self, deadline_seconds: float | None = None) -> None:
        """Refuses new requests and returns when the running ones have ended. With a deadline, they are offered to other decode workers
        meanwhile; what is left when it passes is ended with UnavailableError, for the path to begin it elsewhere."""
        self._draining = True
        offered: dict[int, int] = {}
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._state.groups or len(self._reservations) or self._streams:
                    for key in list(self._state.groups) if deadline_seconds is not None else ():
                        if offered.get(key, 0) < MOST_MOVES and self.migrate_out(key):
                            offered[key] = offered.get(key, 0) + 1
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            self.counters.add("drains_cut_short")
            self._end_everything(UnavailableError(f"worker {self.name!r} shuts down; its time to drain is over"))

    def migrate_out(self, reservation_id: int) -> bool:
        """Offers a running sequence to other decode workers; it goes on here until one of them has it. False: it cannot move (now)."""
        group, stream = self._state.groups.get(reservation_id), self._streams.get(reservation_id)
        if group is None or stream is None or not stream.taken or not self._movers.movable(group):
            return False
        stream.tell(moving=HandoffSource(self.name, self._movers.begin(group, stream.until), self.address, self.boot_id))
        return True

    async def reserve(self, call: ReserveCall) -> Reservation:
        self._check_serving(call)
        indices = tuple(child.index for child in call.children)
        self._attempts.take(call.request, indices, call.attempt, self._clock.now())
        self._supersede(call)
        children = tuple((child.index, child.accepted) for child in call.children)
        self._reservations.check(call.request, children)
        if len(self._reservations) >= self._config.queue_limit:
            raise OverloadedError(
                f"worker {self.name!r}: {len(self._reservations)} requests wait for pages, the queue's limit; try again later",
                retry_after_seconds=1.0,
            )
        arrival = self._clock.now() - call.age_seconds
        ticket = self._reservations.enqueue(call.request, call.attempt, children, arrival)
        granted = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self._settle()
        group = await self._granted(ticket, granted, call.deadline_seconds)
        return Reservation(group.key, self.name, group.rank, max(0.0, group.handoff.deadline - self._clock.now()))

    async def _granted(self, ticket: int, granted: "asyncio.Future[Group]", seconds: float) -> Group:
        try:
            return await within(granted, seconds)
        except TimeoutError:
            self._give_up(ticket)
            raise DeadlineExceededError(f"worker {self.name!r} had no free pages for the request within its {seconds:g} s") from None
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise

    def _give_up(self, ticket: int) -> None:
        self._reservations.withdraw(ticket)
        self._tickets.pop(ticket, None)
        self._drop(ticket)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        stream = self._streams.get(call.reservation_id)
        if stream is None or stream.taken or stream.attempt != call.attempt:
            raise HandoffError(
                f"worker {self.name!r}: reservation {call.reservation_id} is not held for attempt {call.attempt}: its lease passed"
            )
        stream.taken = True
        stream.until = self._clock.now() + call.deadline_seconds
        group = self._state.groups.get(call.reservation_id)
        try:
            if group is not None:
                group.handoff = group.handoff.move(HandoffEvent.GENERATE, stream.until)
                self._begin(group, call.source)
            stream.begun.set()
            while (span := await stream.next()) is not None:
                yield span
        finally:
            self._drop(call.reservation_id)

    async def resume_source(self, call: ResumeCall) -> int | None:
        return await self._intake.resume(call)

    async def hello(self, hello: PeerHello) -> PeerHello:
        return await self._boxes.hello(hello)

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        return self._boxes.offers(handoff_id, attempt)

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await self._boxes.acknowledge(handoff_id, offer_ids)
        self._movers.poke()

    async def abort(self, handoff_id: int, reason: str) -> None:
        await self._boxes.abort(handoff_id, reason)

    async def cancel(self, reservation_id: int, child: int | None = None) -> None:
        group = self._state.groups.get(reservation_id)
        if child is None:
            self._drop(reservation_id)
        elif group is not None:
            for sequence in group.alive:
                if sequence.child == child:
                    self._state.end_child(sequence, FinishReason.CANCELLED)
        self._settle()

    async def status(self) -> WorkerStatus:
        return self.status_now()

    def status_now(self) -> WorkerStatus:
        """Raises UnavailableError when the mesh failed."""
        self._loop.check()
        return decode_status(
            self.name,
            WorkerRole.DECODE if self._mode is Mode.DISAGGREGATED else WorkerRole.MIXED,
            self._config,
            self._state,
            self._backlog,
            waiting=len(self._reservations),
            handoffs=len(self._handoffs) + len(self._boxes),
            draining=self._draining,
            can_prefill=self._can_prefill,
            loading_seconds=self.loading_seconds(),
        )

    def _begin(self, group: Group, source: HandoffSource | None) -> None:
        """Lets the KV come: from the peer, or by prefilling here."""
        if source is not None:
            self._intake.begin(group, source)
        else:
            specs = tuple(child.sample_spec() for child in group.alive)
            pages = self._state.ledgers[group.rank].pages(group.key)
            self._prefills.add(PrefillJob(group.key, group.rank, group.known_tokens, pages, specs, group.arrival))
            self._backlog.add(group.key, len(group.known_tokens))
        self._settle()

    def _join(self, group: Group, firsts: tuple[SampledToken, ...]) -> None:
        if any(first.token == BROKEN_TOKEN for first in firsts):
            return self._fail(group, BrokenModelError())
        copies = self._batches.ready(group, firsts, self._loop.next_number(), group.handoff.deadline)
        if copies is not None:
            self._loop.fire(copies)

    def _plan(self, step: int) -> StepCommand | None:
        command = self._choose(step)
        if self._state.news:
            self._settle()
        return command

    def _choose(self, step: int) -> StepCommand | None:
        prefill = bool(self._prefills)
        if self._interruptible is not None and self._loop.in_flight(DecodeSteps):
            # One span at a time: what to do next is known when it ends, and it ends when something waits for that.
            if prefill or self._batches.interrupting():
                self._interruptible.interrupt()
            return None
        if prefill and (self._mode is Mode.UNIFIED or not self._last_was_prefill or not self._batches.runnable()):
            self._last_was_prefill = True
            return self._prefills.next_chunk(step)
        if self._mode is Mode.UNIFIED and self._loop.in_flight(PrefillChunk):
            return None  # its sequences join the very next step; one without them would cost them a step more
        if self._handoffs.completing_before(self._loop.newest(DecodeSteps)):
            return None  # a step behind the insertion keeps the mesh at work: who has come joins the next
        quiet = not prefill and (self._interruptible is not None or not self._handoffs.coming)
        decode = self._batches.next_step(step, quiet)
        if decode is None and prefill:
            return self._prefills.next_chunk(step)
        self._last_was_prefill = False
        return decode

    def _apply(self, command: StepCommand, result: StepResult) -> None:
        if isinstance(command, PrefillChunk):
            assert isinstance(result, PrefillResult)
            for row in command.rows:
                self._backlog.computed(row.sequence, len(row.tokens))
                if row.samples and (group := self._state.groups.get(row.sequence)) is not None:
                    self._join(group, tuple(sample for sample in result.samples if sample.sequence == row.sequence))
        else:
            assert isinstance(result, DecodeResult)
            for group in self._batches.apply(result):
                self._fail(group, BrokenModelError())
        self._movers.poke()
        self._settle()

    def _settle(self) -> None:
        """After any change: news to listeners, pages to waiters, and the loop looks again."""
        for progress in self._state.take_news() if self._state.news else ():
            if (stream := self._streams.get(progress.group_key)) is not None:
                stream.put(progress)
            if progress.group_key not in self._state.groups:
                self._handoffs.abort(progress.group_key, "the receiver gave the sequence up")
                self._movers.abort(progress.group_key, "the sequence has ended")
                self._prefills.remove(progress.group_key)
                self._backlog.forget(progress.group_key)
        if len(self._reservations) and self._loop.failure is None:
            for group in self._reservations.grant(self._clock.now() + self._limits.reservation_lease_seconds):
                self._streams[group.key] = SpanStream(group)
                self._tickets.pop(group.key).set_result(group)
        self._loop.wake()
        self._quiet.set()

    def _drop(self, reservation_id: int) -> None:
        """Cancels a reservation and forgets its stream. Idempotent."""
        group = self._state.groups.get(reservation_id)
        if group is not None:
            self._state.end_group(group)
        self._settle()
        self._streams.pop(reservation_id, None)
        self._quiet.set()

    def _fail(self, group: Group, error: JdisaggError) -> None:
        """Ends a group with an error for its listener."""
        stream = self._streams.get(group.key)
        if stream is not None:
            stream.fail(error)
        if group.key in self._state.groups:
            self._state.end_group(group)
        self._settle()

    def _supersede(self, call: ReserveCall) -> None:
        """A later attempt at the same children makes an earlier one a zombie."""
        indices = {child.index for child in call.children}
        for group in self._state.groups_of(call.request.identity):
            if group.attempt < call.attempt and indices & {child.child for child in group.alive}:
                self.counters.add("attempts_superseded")
                self._fail(group, HandoffError(f"attempt {group.attempt} was superseded by attempt {call.attempt}"))
        for ticket in self._reservations.earlier(call.request, indices, call.attempt):
            self.counters.add("attempts_superseded")
            self._reservations.withdraw(ticket)
            self._tickets.pop(ticket).set_exception(HandoffError(f"the attempt was superseded by attempt {call.attempt}"))

    def _sweep(self, now: float) -> None:
        """Frees what outstayed its deadline, whether or not there is work."""
        late = {handoff.handoff_id: handoff for handoff in sweep([group.handoff for group in self._state.groups.values()], now)}
        for group in [self._state.groups[key] for key in late]:
            self.counters.add("leases_expired")
            if group.handoff.state is HandoffState.RESERVED:
                self._fail(group, HandoffError(f"reservation {group.key}: its lease passed before generate took it over"))
            elif group.handoff.state is HandoffState.ORPHANED:
                self._fail(group, HandoffError(f"reservation {group.key}: its source failed, and its lease passed before another came"))
            else:
                self._fail(group, DeadlineExceededError("the request's deadline passed while its tokens were being generated"))
        unheard = [key for key, stream in self._streams.items() if not stream.taken and stream.lease_until < now]
        for key in unheard:
            self._streams.pop(key)
        self._boxes.sweep(now)
        self._peers.sweep(now, self._handoffs.peers())
        self._loop.break_if_stalled(self._limits.step_seconds)
        self._attempts.forget_before(now - 2 * self._limits.handoff_lease_seconds)
        self._settle()

    def _break_down(self, error: UnavailableError) -> None:
        self.counters.add("mesh_failures")
        self._end_everything(error)

    def _end_everything(self, error: UnavailableError) -> None:
        for ticket, granted in list(self._tickets.items()):
            self._reservations.withdraw(ticket)
            if not granted.done():
                granted.set_exception(UnavailableError(error.message))
        self._tickets.clear()
        for group in list(self._state.groups.values()):
            self._fail(group, UnavailableError(error.message))

    def _check_serving(self, call: ReserveCall) -> None:
        self._loop.check()
        fresh = not any(child.accepted for child in call.children)
        if self._draining and fresh:
            raise UnavailableError(f"worker {self.name!r} is draining and takes no new requests; try another", retry_after_seconds=1.0)
