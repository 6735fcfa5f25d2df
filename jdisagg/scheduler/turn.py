"""One turn of a mesh: what its scheduler decides each time that something has happened, in order.

1. Freed: prompts of sequences that have ended leave the queue of chunks.
2. Gives way: sequences lose their slots or pages to requests of higher priority.
3. Granted: waiting requests get pages, first come first served.
4. Issued: the next command, which is decode steps, a prefill chunk, both in one program, or none.
   Sequences that run out of pages get more; if none is free, the newest of the lowest priority are
   preempted.
5. Reported: new tokens, and what has ended.

A turn changes the scheduler's own state, and nothing else. The worker (`worker/mesh_worker.py`)
takes a turn after each event, also while enough commands are in flight, so that no grant waits for
a step to end. It then carries the turn out: copies are issued before the command."""

from dataclasses import dataclass, field

import msgspec

from jdisagg.messages.step_commands import DecodeSteps, StepCommand
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.mixed_times import MixedTimes
from jdisagg.scheduler.prompts import Prompts
from jdisagg.scheduler.reservations import Reservations
from jdisagg.scheduler.sequences import ChildProgress, Sequence, SequenceGroup, Stage
from jdisagg.scheduler.step_policy import Action, StepSnapshot, next_step

# copies between state slots, as in `CopyPages.states`
StateCopies = tuple[tuple[int, int, int], ...]


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
    """

    step: int | None
    lease_until: float
    steps_in_flight: bool = False
    chunk_in_flight: bool = False
    kv_arriving: bool = False
    kv_completing: bool = False


@dataclass(slots=True)
class Turn:
    """The outcome of a turn, which the worker carries out.

    Attributes:
        granted: Groups that have pages now. They may have lost them again (`news`).
        yielded: Number of sequences that gave way to requests of higher priority.
        copies: Copies of recurrent state, to be issued in this order before the command.
        command: Next command, which must be issued; None if the mesh waits.
        reason: Why the mesh issues this command, or waits.
        interrupt: Whether the running span of decode steps must end early.
        news: New tokens and ends of sequences.
        cut: Owners of cached pages for other workers that sequences needed.
    """

    granted: list[SequenceGroup] = field(default_factory=list)
    yielded: int = 0
    copies: list[StateCopies] = field(default_factory=list)
    command: StepCommand | None = None
    reason: str = ""
    interrupt: bool = False
    news: list[ChildProgress] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)


class Scheduler:
    """Decides what one mesh does.

    Args:
        computes: Whether the mesh computes prompts.
        spans: Whether decode commands can be interrupted.
    """

    def __init__(
        self,
        state: DecodeState,
        prompts: Prompts,
        reservations: Reservations,
        batches: DecodeBatches,
        computes: bool,
        spans: bool,
    ) -> None:
        self._state = state
        self._prompts = prompts
        self._reservations = reservations
        self._batches = batches
        self._computes = computes
        self._spans = spans
        self._alternates = state.limits.pack_tokens is None
        self._prefilled_last = False
        self._times = MixedTimes(prompts.beside(), state.limits.batch_buckets)

    def turn(self, now: Facts) -> Turn:
        turn, state = Turn(), self._state
        self._forget_ended()
        self._give_way(turn, now.lease_until)
        for group in self._reservations.grant(now.lease_until):
            self._granted(turn, group)
        if now.step is not None:
            self._issue(turn, now, now.step)
        self._forget_ended()
        turn.news, turn.cut = state.take_news(), state.take_cut()
        return turn

    def _forget_ended(self) -> None:
        for progress in self._state.news:
            if progress.group_key not in self._state.groups:
                self._prompts.forget(progress.group_key)

    # ---- pages and slots

    def _give_way(self, turn: Turn, lease_until: float) -> None:
        if self._state.ready and not self._state.one_priority:
            for last in self._batches.yielding_slots():
                self._preempt(turn, last)
        while (waiting := self._reservations.pressing()) is not None:
            group = self._reservations.grant_one(waiting, lease_until)
            if group is not None:
                self._granted(turn, group)
                continue
            last_ones = self._reservations.to_preempt(waiting)
            if not last_ones:
                return
            for last in last_ones:
                self._preempt(turn, last)

    def _preempt(self, turn: Turn, child: Sequence) -> None:
        if child.stage is Stage.RESERVED:
            turn.yielded += len(child.group.alive)
            self._state.end_group(child.group, preempted=True, yielded=True)
        elif child.stage is not Stage.ENDED:
            turn.yielded += 1
            self._state.end_child(child, preempted=True, yielded=True)

    def _granted(self, turn: Turn, group: SequenceGroup) -> None:
        turn.granted.append(group)
        kept, rank, cached = self._state.residency, group.rank, group.cached_tokens
        if group.computes and cached and kept.snapshots:
            # before another prompt can evict the snapshot
            (source,) = kept.use_snapshot(rank, group.chain, cached)
            turn.copies.append(((rank, source, self._state.states.slot(rank, group.key)),))

    # ---- commands

    def _issue(self, turn: Turn, now: Facts, step: int) -> None:
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
                turn.command = self._prompts.next_chunk(step)
            case Action.DECODE | Action.MIXED:
                steps = self._batches.next_step(step, decision.quiet, drafts=not snapshot.mixes)
                if copies := self._batches.take_snapshots():
                    turn.copies.append(copies)
                self._forget_ended()  # of sequences that lost their pages to running ones
                if steps is None and snapshot.prompts_queued:
                    turn.command = self._prompts.next_chunk(step)
                    return
                self._prefilled_last = False
                turn.command = steps
                if steps is not None and decision.chunk_tokens:
                    sizes = [one for one in self._times.chunks if one <= decision.chunk_tokens]
                    chunk = self._prompts.next_chunk(step, beside=tuple(sizes))
                    turn.command = msgspec.structs.replace(steps, chunk=chunk)

    def _snapshot(self, now: Facts) -> StepSnapshot:
        """To save time, omits what the policy does not read."""
        prompts = self._computes and bool(self._prompts)
        if self._spans and now.steps_in_flight:
            return StepSnapshot(
                interruptible=True,
                prompts_queued=prompts,
                span_in_flight=True,
                span_blocks=not prompts and self._batches.interrupting(),
            )
        # while each rank decodes a sequence, none is idle
        gathering = prompts and self._prompts.gathering and all(self._state.running)
        mixes = prompts and not gathering and bool(self._times.chunks)
        steps_turn = prompts and self._prefilled_last and self._alternates
        runnable = not mixes and not steps_turn or self._batches.runnable()
        width = self._batches.width() if mixes and runnable else 0
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
        if isinstance(command, DecodeSteps) and self._times.chunks and not command.drafts:
            chunk_tokens = command.chunk.chunk_tokens if command.chunk else 0
            sequences = max(map(len, command.slots))
            self._times.took(sequences, chunk_tokens, seconds / command.steps)
        if self._computes:
            self._prompts.step_ended()
