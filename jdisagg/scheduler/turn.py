"""One turn of a mesh: what its scheduler decides each time that something has happened, in order.

1. Freed: prompts of sequences that have ended leave the queue of chunks.
2. Gives way: sequences lose their slots to requests of higher priority.
3. Granted: waiting prompts get pages, first come first served; others may give way.
4. Issued: the next command, which is decode steps, a prefill chunk, both in one program, or none.
   Sequences that run out of pages get more; if none is free, the newest of the lowest priority are
   preempted.
5. Reported: new tokens, and what has ended.

A mesh that does not decode has no sequences: its turns grant pages and issue chunks, and leave out
what goes to decode workers that fetch too slowly.

A turn changes the scheduler's own state, and nothing else. The worker (`worker/worker.py`)
takes a turn after each event, also while enough commands are in flight, so that no grant waits for
a step to end. It then carries the turn out: copies are issued before the command."""

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jdisagg.config import InstanceConfig
from jdisagg.messages.step_commands import DecodeSteps, StepCommand
from jdisagg.messages.worker_status import PriorityLoad, WorkerRole
from jdisagg.scheduler.admission import Admission, Admitted, stalled_destinations
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.prompts import Prompts
from jdisagg.scheduler.sequences import ChildProgress
from jdisagg.scheduler.speculation import Speculation
from jdisagg.telemetry import Counters

# Largest time of a decode step with a prefill chunk, relative to a step alone. The smallest chunk
# may exceed this limit.
GAP_STEPS = 6.0
# A larger chunk makes gaps longer. It is chosen only if it computes over a tenth more tokens per
# second than a smaller one (benchmarks/LOG.md).
EFFICIENT = 0.9


class Action(enum.Enum):
    PREFILL = "prefill"
    MIXED = "mixed"
    DECODE = "decode"
    WAIT = "wait"
    INTERRUPT = "interrupt"


class StepSnapshot(msgspec.Struct, frozen=True, gc=False):
    """The input of `next_step`: work that waits for the mesh, and commands in flight.

    Attributes:
        prompts_queued: Whether some prompt has tokens that are in no issued chunk.
        gathering: Whether the queued prompts wait for prompts of other dp ranks.
        steps_turn: Whether decode steps go before further prompts, because the newest command was a
            prefill chunk and the mesh alternates.
        decode_runnable: Whether any sequence can run a decode step. Read only if a prompt waits.
        mixes: Whether the mesh has programs that run a chunk and a decode step together.
        step_seconds: Measured seconds of a decode step alone. None if there is no recent
            measurement. Read only if `mixes` is set.
        mixed_seconds: (tokens of a chunk, predicted seconds of the chunk with a decode step),
            ascending. The smallest chunk is always included, others only if they can be predicted.
        interruptible: Whether the mesh runs spans: commands of many steps that can be ended early.
        span_in_flight: Whether a span is running.
        span_blocks: Whether a sequence must wait until the running span ends.
        kv_arriving: Whether KV blocks are being received from another worker.
        joining: Whether sequences join the batch before the newest command in flight ends.
    """

    interruptible: bool = False
    prompts_queued: bool = False
    gathering: bool = False
    steps_turn: bool = False
    decode_runnable: bool = True
    mixes: bool = False
    span_in_flight: bool = False
    span_blocks: bool = False
    kv_arriving: bool = False
    joining: bool = False
    step_seconds: float | None = None
    mixed_seconds: tuple[tuple[int, float], ...] = ()


class StepDecision(msgspec.Struct, frozen=True, gc=False):
    """The action that the mesh takes next, and the reason. `quiet` means that no other work waits,
    so one command may run several steps. If the action is MIXED, `chunk_tokens` is the largest
    number of tokens of the chunk. If the action is DECODE or MIXED but no sequence can run, a
    queued prompt is prefilled alone."""

    action: Action
    reason: str
    quiet: bool = False
    chunk_tokens: int = 0


_INTERRUPT = StepDecision(Action.INTERRUPT, "something waits for the end of the span")
_ONE_SPAN = StepDecision(Action.WAIT, "a span is under way; what follows is decided at its end")
_CHUNKS_TURN = StepDecision(Action.PREFILL, "a prompt waits, and it is not the turn of steps")
_NO_STEPS = StepDecision(Action.PREFILL, "a prompt waits, and no sequence can be stepped")
_UNMEASURED = StepDecision(Action.DECODE, "a prompt waits, and the time of a step is not measured")
_JOINING = StepDecision(Action.WAIT, "sequences whose KV is nearly complete join the next step")
_ALONE = StepDecision(Action.DECODE, "nothing else waits", quiet=True)
_BESIDE = StepDecision(Action.DECODE, "prompts or KV wait beside the sequences")


def next_step(now: StepSnapshot) -> StepDecision:
    """Decides what the mesh does next: prefill, decode, both in one program, wait, or interrupt the
    running span (one command of many decode steps). Returns the action with its reason.

    CHUNKED mode runs prefill chunks together with decode steps. The predicted time of both
    together, which is the gap between two tokens of a running sequence, is at most `GAP_STEPS`
    times the measured time of a step alone. Among the chunk sizes within this limit, the smallest
    is chosen that computes nearly as many prompt tokens per second as the best one (`EFFICIENT`).
    If no sequence runs, chunks have their full size. A mesh without mixed programs alternates
    chunks and steps. Mode UNIFIED sets large chunks without mixed programs, after which steps have
    no turn while a prompt waits.

    If sequences are about to join the batch, no step is issued, so that they join the next step.
    The mesh is busy with earlier commands in the meantime. Two kinds of sequences are about to
    join: those whose last KV insertions were issued before the newest step in flight, and those of
    a prefill chunk in flight if prompts are computed whole.

    On a mesh with several dp ranks, prompts may wait until each rank has one (`gathering`). During
    this time only single steps run, so that a chunk can follow any step.

    The decision depends only on the snapshot, so recorded snapshots can be replayed."""
    if now.span_in_flight:
        return _INTERRUPT if now.prompts_queued or now.span_blocks else _ONE_SPAN
    if now.prompts_queued and not now.gathering:
        if now.mixes and now.decode_runnable:
            return _UNMEASURED if now.step_seconds is None else _mixed(now, now.step_seconds)
        if not now.steps_turn:
            return _CHUNKS_TURN
        if not now.decode_runnable:
            return _NO_STEPS
    if now.joining:
        return _JOINING
    quiet = not now.prompts_queued and (now.interruptible or not now.kv_arriving)
    return _ALONE if quiet else _BESIDE


def _mixed(now: StepSnapshot, step_seconds: float) -> StepDecision:
    smallest, *others = now.mixed_seconds
    fits = [smallest, *(one for one in others if one[1] <= GAP_STEPS * step_seconds)]
    best = max(size / max(seconds, 1e-9) for size, seconds in fits)
    tokens = next(size for size, seconds in fits if size >= EFFICIENT * best * seconds)
    return StepDecision(
        Action.MIXED, "a prompt waits, and its chunk runs with a step", chunk_tokens=tokens
    )


SAMPLES = 9
KEPT_STEPS = 256
_Times = deque[tuple[int, float]]


class MixedTimes:
    """Measured times of decode steps on one mesh, alone and together with a prefill chunk.

    The predicted time for a chunk size is its fastest recent measurement, because other work on the
    machine only adds time. Measurements older than `KEPT_STEPS` commands are dropped, because
    contexts grow. The time for a size without measurements is extrapolated from the nearest
    measured size.

    Args:
        batches: Batch sizes of steps, ascending. Steps without a chunk are measured separately for
            each.
    """

    def __init__(self, chunks: Sequence[int], batches: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self._batches = batches
        self._alone = {size: _Times(maxlen=SAMPLES) for size in batches}
        self._mixed = {size: _Times(maxlen=SAMPLES) for size in chunks}
        self._now = 0

    def took(self, sequences: int, chunk_tokens: int, seconds: float) -> None:
        """Records the seconds of a step.

        Args:
            chunk_tokens: Padded number of tokens of the chunk, or 0 without a chunk.
        """
        self._now += 1
        if not chunk_tokens:
            self._alone[self._batch(sequences)].append((self._now, seconds))
        elif chunk_tokens in self._mixed:
            self._mixed[chunk_tokens].append((self._now, seconds))

    def alone(self, sequences: int) -> float | None:
        return self._fastest(self._alone[self._batch(sequences)])

    def mixed(self, sequences: int) -> tuple[tuple[int, float], ...]:
        """Returns (tokens of a chunk, predicted seconds of a step with this chunk) for each chunk
        size that can be predicted. The smallest size is always included, with 0 seconds if it is
        not measured."""
        alone = self.alone(sequences)
        known = {
            size: seconds
            for size, times in self._mixed.items()
            if (seconds := self._fastest(times)) is not None
        }
        if alone is None or not known:
            return ((self.chunks[0], 0.0),)
        found: list[tuple[int, float]] = []
        for size in self.chunks:
            near = min(known, key=lambda one: (abs(one - size), one))
            longer = max(0.0, known[near] - alone) * size / near
            found.append((size, known.get(size, alone + longer)))
        return tuple(found)

    def _fastest(self, times: _Times) -> float | None:
        while times and self._now - times[0][0] > KEPT_STEPS:
            times.popleft()
        return min([seconds for _, seconds in times], default=None)

    def _batch(self, sequences: int) -> int:
        return next(size for size in self._batches if size >= min(sequences, self._batches[-1]))


CHUNKS_OFFERED = 4
_NOTHING: Mapping[str, int] = {}
_NONE_STALLED: tuple[frozenset[str], bool] = frozenset(), False


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What a turn depends on besides the scheduler's own state.

    Attributes:
        step: Number of the next command; None if enough commands are in flight.
        lease_until: Time until which granted pages are held for a caller.
        steps_in_flight: Whether decode steps are in flight.
        chunk_in_flight: Whether a prefill chunk is in flight.
        kv_arriving: Whether KV blocks are being received from another worker.
        kv_completing: Whether the last KV of some sequence is inserted before the newest decode
            steps in flight end.
        offered_tokens: For each decode worker, the number of tokens whose KV it has not fetched
            yet.
        at: The time of the turn in seconds.
    """

    step: int | None
    lease_until: float = 0.0
    steps_in_flight: bool = False
    chunk_in_flight: bool = False
    kv_arriving: bool = False
    kv_completing: bool = False
    offered_tokens: Mapping[str, int] = _NOTHING
    at: float = 0.0


@dataclass(slots=True)
class Turn(Admitted):
    """The outcome of a turn, which the worker carries out. Those that got pages may have lost them
    again (`news`).

    Attributes:
        command: Next command, which must be issued; None if the mesh waits.
        reason: Why the mesh issues this command, or waits.
        held_back: Whether some prompts are not computed because their KV would not be fetched.
        interrupt: Whether the running span of decode steps must end early.
        news: New tokens and ends of sequences.
        cut: Owners of cached pages for other workers that sequences needed.
    """

    held_back: bool = False
    command: StepCommand | None = None
    reason: str = ""
    interrupt: bool = False
    news: list[ChildProgress] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)


class Scheduler:
    """Decides what one mesh does.

    Args:
        spans: Whether decode commands can be interrupted.
        ids: Generator of fresh numbers for the blocks that are sent.
        clock: Function that returns the CPU seconds of the calling thread.

    Attributes:
        chunk_tokens: Number of tokens of the largest chunk that the mesh computes; 0 if it computes
            no prompts.
    """

    def __init__(
        self,
        state: DecodeState,
        config: InstanceConfig,
        role: WorkerRole,
        spans: bool,
        ids: Callable[[], int],
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        limits = state.limits
        self.prompts = prompts = Prompts(state, ids, counters)
        self.admission = Admission(state, prompts, config.growth_tokens, config.ahead_sequences)
        self.batches = DecodeBatches(
            state,
            config.growth_tokens,
            config.steps_per_dispatch,
            config.stream_tokens,
            spans,
            Speculation.of(limits, clock),
        )
        self._state = state
        self._counters = counters
        self._spans = spans
        self._alternates = limits.pack_tokens is None
        self._prefilled_last = False
        self._times = MixedTimes(prompts.beside(), limits.batch_buckets)
        # the offers of chunks in the pipeline are published already
        chunks = CHUNKS_OFFERED + limits.stages - 1
        self._most_offered = chunks * limits.ranks * limits.chunk_buckets[-1] * limits.layer_groups
        self.take_role(role)

    def take_role(self, role: WorkerRole) -> None:
        """No prompt is queued for chunks, and there are no sequences."""
        limits = self._state.limits
        computed = limits.computed_by(role.computes)
        computes = role.computes or limits.append_buckets
        self.chunk_tokens = computed.chunk_buckets[-1] if computes else 0
        self._decodes = role.decodes
        self.prompts.compute_in(computed)

    def idle(self, steps_in_flight: bool) -> bool:
        """Whether a turn would decide nothing, because nothing waits or has ended."""
        state, prompts = self._state, self.prompts
        if self.admission.queue or prompts.released or state.news or state.cut:
            return False
        if self.chunk_tokens and prompts:
            return False
        # what is ready or frozen may interrupt the running span
        spans = self._spans and steps_in_flight
        return not self._decodes or (spans and not state.ready and not state.frozen)

    def turn(self, now: Facts) -> Turn:
        state, admission = self._state, self.admission
        state.residency.retained.advance(now.at)
        if state.ended:
            self._forget_ended()
        stalled, full = _NONE_STALLED
        if now.offered_tokens:
            stalled, full = stalled_destinations(now.offered_tokens, self._most_offered)
        turn = Turn(held_back=full or bool(stalled))
        if state.ready and not state.one_priority:
            turn.yielded = sum(map(admission.give_way, self.batches.yielding_slots()))
        if admission.queue or stalled:
            admission.admit(now.lease_until, stalled, turn)
        if state.ended:
            self._forget_ended()  # those that gave way have no pages for their chunks
        if now.step is not None and not full:
            self._issue(turn, now, now.step, stalled)
        if state.ended:
            self._forget_ended()
        if state.news:
            turn.news = state.take_news()
        if state.cut:
            turn.cut = state.take_cut()
        return turn

    def _forget_ended(self) -> None:
        for key in self._state.ended:
            self.prompts.forget(key)
        self._state.ended.clear()

    def _issue(self, turn: Turn, now: Facts, step: int, stalled: frozenset[str]) -> None:
        if not self._decodes:
            held = self.prompts.stall_those_to(stalled) if stalled else ()
            turn.command = self.prompts.next_chunk(step, held, now.chunk_in_flight)
            return
        snapshot = self._snapshot(now)
        decision = next_step(snapshot)
        turn.reason = decision.reason
        match decision.action:
            case Action.WAIT:
                pass
            case Action.INTERRUPT:
                turn.interrupt = True
            case Action.PREFILL:
                self._prefilled_last = True
                turn.command = self.prompts.next_chunk(step)
            case Action.DECODE | Action.MIXED:
                steps = self.batches.next_step(step, decision.quiet, drafts=not snapshot.mixes)
                if copies := self.batches.take_snapshots():
                    turn.copies.append(copies)
                if self._state.ended:
                    self._forget_ended()  # of sequences that lost their pages to running ones
                if steps is None and snapshot.prompts_queued:
                    turn.command = self.prompts.next_chunk(step)
                    return
                self._prefilled_last = False
                turn.command = steps
                if steps is not None and decision.chunk_tokens:
                    sizes = [one for one in self._times.chunks if one <= decision.chunk_tokens]
                    chunk = self.prompts.next_chunk(step, beside=tuple(sizes))
                    turn.command = msgspec.structs.replace(steps, chunk=chunk)

    def _snapshot(self, now: Facts) -> StepSnapshot:
        """To save time, omits what the policy does not read."""
        prompts = self.chunk_tokens > 0 and bool(self.prompts)
        if self._spans and now.steps_in_flight:
            return StepSnapshot(
                interruptible=True,
                prompts_queued=prompts,
                span_in_flight=True,
                span_blocks=not prompts and self.batches.interrupting(),
            )
        # while each rank decodes a sequence, none is idle
        gathering = prompts and self.prompts.gathering and all(self._state.running)
        mixes = prompts and not gathering and bool(self._times.chunks)
        steps_turn = prompts and self._prefilled_last and self._alternates
        runnable = not mixes and not steps_turn or self.batches.runnable()
        width = self.batches.width() if mixes and runnable else 0
        return StepSnapshot(
            interruptible=self._spans,
            prompts_queued=prompts,
            gathering=gathering,
            steps_turn=steps_turn,
            decode_runnable=runnable,
            mixes=mixes,
            step_seconds=self._times.alone(width) if width else None,
            mixed_seconds=self._times.mixed(width) if width else (),
            kv_arriving=now.kv_arriving,
            joining=now.kv_completing or (not self._alternates and now.chunk_in_flight),
        )

    def ended(self, command: StepCommand, seconds: float) -> None:
        """Records that a command ran for some seconds."""
        if self.chunk_tokens:
            self.prompts.step_ended()
        if isinstance(command, DecodeSteps):
            self._count_drafts()
            if self._times.chunks and not command.drafts:
                chunk_tokens = command.chunk.chunk_tokens if command.chunk else 0
                sequences = max(map(len, command.slots))
                self._times.took(sequences, chunk_tokens, seconds / command.steps)

    def _count_drafts(self) -> None:
        every, counters = self.batches.forced_tokens, self._counters
        if every and (forced := every - counters["forced_tokens"]):
            counters.add("forced_tokens", forced)
        drafts = self.batches.speculation
        if drafts and (drafted := drafts.drafted - counters["drafted_tokens"]):
            accepted = drafts.accepted - counters["accepted_tokens"]
            counters.add("drafted_tokens", drafted, source=drafts.source)
            counters.add("accepted_tokens", accepted, source=drafts.source)

    def loads(self) -> tuple[PriorityLoad, ...]:
        """Returns the load by priority."""
        groups, waits, backlog = self._state.groups, self.admission.queue, self.prompts.backlog
        if not (groups or waits or backlog.tokens):
            return ()
        held, queued = self._state.priorities(), backlog.by_priority()
        waiting = Counter([one.priority for one in waits])
        return tuple(
            [
                PriorityLoad(one, *held.get(one, (0, 0)), waiting.get(one, 0), queued.get(one, 0))
                for one in sorted({*held, *waiting, *queued})
            ]
        )
