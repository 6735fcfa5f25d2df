"""Continuous batching on one decode mesh.

Step n + 1 is planned before the tokens of step n are read. The device does not stop at stop ids, so
`apply` also drops tokens after a stop id.

Order of a plan: first, running sequences get the pages they need, highest priority and then oldest
sequence first. If no page is free, the youngest sequence of the lowest priority is preempted.

Invariants: a slot has at most one sequence; a sequence is decoded only up to its limit and within
its pages; tokens of a child are accepted once, in order."""

from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    NO_TOKEN,
    STUCK_TOKEN,
    CopyPages,
    DecodeResult,
    DecodeSteps,
    SampledToken,
    SlotAdmit,
    SlotGrow,
)
from jdisagg.prompt.images import shift_before
from jdisagg.request import TokenLogprobs
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage
from jdisagg.scheduler.speculation import SURE_TOKENS, Planned, Speculation, StepKind

# a planned row of a step: its sequence, how many tokens the result must have, and its drafts
_Issued = tuple[Sequence, int, Planned | None]


class DecodeBatches:
    """Plans the decode steps of one mesh and updates `DecodeState` with their results.

    Args:
        stream_tokens: Number of new tokens of a sequence that are collected into one report. The
            first token and the end of a sequence are reported immediately.
        spans: Whether the mesh can end a command of several steps early. Drafts are never verified
            on such a mesh.
    """

    def __init__(
        self,
        state: DecodeState,
        growth_tokens: int,
        steps_per_dispatch: int,
        stream_tokens: int = 1,
        spans: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self._state = state
        self._growth_tokens = growth_tokens
        self._steps = steps_per_dispatch
        self._stream_tokens = stream_tokens
        self._spans = spans
        self.speculation = None if spans else speculation
        self._issued: dict[int, list[list[_Issued]]] = {}
        # variant and number of steps of each command in flight
        self._kinds: dict[int, tuple[StepKind, int]] = {}
        self._snapshots: list[tuple[int, int, int]] = []
        self.forced_tokens = 0  # tokens forced by grammars that needed no step of their own

    def ready(
        self, group: SequenceGroup, firsts: tuple[SampledToken, ...], step: int, deadline: float
    ) -> CopyPages | None:
        """Marks the children of a group as ready to decode, because all KV is in pages and the
        first tokens are sampled. Ends children whose first token is their last.

        Returns the command that copies the prompt's partly filled last page for each child, or None
        if no copy is needed. This command must be issued before the children's first steps."""
        self._state.advance(group, HandoffEvent.ALL_INSERTED, deadline)
        tokens, alive = {first.child: first for first in firsts}, group.alive
        copies = states = ()
        if group.copies:
            ledger = self._state.ledgers[group.rank]
            pages = {page for child in alive for page in ledger.pages(child.key)}
            copies = tuple([copy for copy in group.copies if copy[2] in pages])
        if self._state.states.on:
            states = self._state_copies(group)
        self._state.advance(group, HandoffEvent.ADMIT, deadline)
        for child in alive:
            first = tokens[child.child]
            self._state.become_ready(child)
            self._accept(child, (first.token,), (first.logprobs,) if first.logprobs else ())
        self._state.release_root(group)
        return CopyPages(step, copies, states) if copies or states else None

    def _state_copies(self, group: SequenceGroup) -> tuple[tuple[int, int, int], ...]:
        rank, states = group.rank, self._state.states
        source = states.slot(rank, group.key)
        own = [states.slot(rank, child.key) for child in group.alive]
        return tuple([(rank, source, slot) for slot in own if slot != source])

    def take_over(self, group: SequenceGroup, generated: tuple[int, ...], deadline: float) -> bool:
        """Marks a sequence that was migrated to this mesh as ready, with the tokens `generated` on
        its previous worker. The sequence must be the group's only child. Returns False if the
        tokens contradict tokens that were accepted here, if the sequence is at its limit, or if no
        page is free for the next step."""
        (child,) = group.children
        position = group.prompt_tokens + len(generated) - 1
        ours = tuple(child.generated)
        if (
            generated[: len(ours)] != ours
            or position >= child.limit
            or self._state.cover(group, position + 1) is None
        ):
            return False
        self._state.advance(group, HandoffEvent.ALL_INSERTED, deadline)
        self._state.advance(group, HandoffEvent.ADMIT, deadline)
        child.generated = list(generated)
        child.accepted = child.told = len(generated)
        self._state.become_ready(child)
        self._state.release_root(group)
        return True

    def runnable(self) -> bool:
        running = (child for rank in self._state.running for child in rank)
        return (
            any(child.issued_position < child.limit and not child.frozen for child in running)
            or self._waiting()
        )

    def interrupting(self) -> bool:
        """Returns whether a running span should be interrupted: a ready sequence could take a free
        slot, or a frozen sequence must stop for its migration."""
        state = self._state
        return any(not one.frozen and None in state.slots[one.rank] for one in state.ready) or any(
            one.stage is Stage.RUNNING and one.issued_position > one.position
            for one in state.frozen
        )

    def yielding_slots(self) -> list[Sequence]:
        yielding: list[Sequence] = []
        free = [slots.count(None) for slots in self._state.slots]
        running = [list(rank) for rank in self._state.running]
        for child in self._state.ready:
            priority = child.group.request.priority
            if child.frozen:
                continue
            if free[child.rank]:
                free[child.rank] -= 1
                continue
            able = [one for one in running[child.rank] if one.yields_to(priority)]
            if able:
                last = max(able, key=lambda one: one.precedence)
                running[child.rank].remove(last)
                yielding.append(last)
        return yielding

    def _waiting(self) -> bool:
        return any(not child.frozen for child in self._state.ready)

    def width(self) -> int:
        waiting = [0] * len(self._state.slots)
        for child in self._state.ready:
            waiting[child.rank] += not child.frozen
        return max(
            min(len(slots), len(running) + ready)
            for slots, running, ready in zip(
                self._state.slots, self._state.running, waiting, strict=True
            )
        )

    def next_step(self, step: int, quiet: bool, drafts: bool = True) -> DecodeSteps | None:
        """Returns the next decode command, or None if no sequence can run.

        Args:
            quiet: Whether no other work waits for the mesh. The command may then have several
                steps.
        """
        steps = 1 if self._spans or not quiet or self._waiting() else self._most_steps()
        grows = self._grow_running(steps)
        admits = [
            admit
            for child in list(self._state.ready)
            if not child.frozen and (admit := self._admit(child))
        ]
        active = [
            [
                child
                for child in rank
                if child.issued_position < child.issued_limit and not child.frozen
            ]
            for rank in self._state.running
        ]
        if not any(active):
            return None
        if admits:
            steps = 1
        keeps = self._state.residency.snapshots and self._state.residency.keeps_answers
        boundary = self._make_snapshots(active) if keeps else self._steps
        if self._spans and quiet:
            left = [child.issued_limit - child.issued_position for rank in active for child in rank]
            steps = min(self._steps, *left)
        steps = min(steps, boundary)
        masked = self._state.masked > 0 and any(
            child.group.request.sampling.grammar is not None for rank in active for child in rank
        )
        planned: dict[tuple[int, int], Planned] = {}
        if self.speculation is not None and drafts and not self.speculation.rests():
            kind = self.speculation.kind(active, masked)
            planned = self.speculation.plan(active, kind)
            steps = 1 if planned else steps
            self._kinds[step] = kind, steps
        self._issued[step] = [
            _issue(rank, steps, number, planned) for number, rank in enumerate(active)
        ]
        return DecodeSteps(
            step=step,
            steps=steps,
            slots=tuple([tuple([child.slot for child in rank]) for rank in active]),
            admits=tuple(admits),
            grows=tuple(grows),
            masked=masked,
            drafts=tuple([one.drafts for one in planned.values()]),
        )

    def take_snapshots(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the copies of state slots, as in `CopyPages.states`, that the last call of
        `next_step` planned. They must be issued before the command that it returned."""
        copies, self._snapshots = tuple(self._snapshots), []
        return copies

    def _make_snapshots(self, active: list[list[Sequence]]) -> int:
        kept, states, steps = self._state.residency, self._state.states, self._steps
        every = kept.snapshot_tokens
        for child in (child for rank in active for child in rank):
            into = child.issued_position % every
            steps = min(steps, every - into)
            if not into and child.group.epoch == kept.epoch and _sure(child):
                slot = kept.begin_snapshot(
                    child.rank, child.key, child.issued_position, rolling=True
                )
                if slot is not None:
                    self._snapshots.append((child.rank, states.slot(child.rank, child.key), slot))
        return steps

    def _most_steps(self) -> int:
        wanted = max(
            (child.limit - child.issued_position for rank in self._state.running for child in rank),
            default=1,
        )
        return max(1, min(self._steps, wanted))

    def apply(self, result: DecodeResult, seconds: float = 0.0) -> list[tuple[SequenceGroup, int]]:
        """Appends the tokens of a result to their sequences and records the progress in
        `DecodeState.news`. Returns the sequence groups that must end because no token could be
        sampled, each with its error code (BROKEN_TOKEN or STUCK_TOKEN)."""
        broken: list[tuple[SequenceGroup, int]] = []
        drafted = False
        # rows of a span may share one tuple of tokens, which is then processed once
        seen: tuple[int, ...] | None = None
        kept: tuple[int, ...] = ()
        count, bad, running = 0, False, Stage.RUNNING
        issued = self._issued.pop(result.step)
        for rank, rows in enumerate(issued):
            for row, ((child, due, drafts), tokens) in enumerate(
                zip(rows, result.tokens[rank], strict=True)
            ):
                if drafts is not None:
                    drafted = True
                    child.drafting -= drafts.drafts.count
                if child.stage is not running:
                    continue
                if tokens is not seen:
                    seen, bad = tokens, BROKEN_TOKEN in tokens or STUCK_TOKEN in tokens
                    kept = (
                        tuple([token for token in tokens if token != NO_TOKEN])
                        if NO_TOKEN in tokens
                        else tokens
                    )
                    count = len(kept)
                if bad:
                    broken.append((child.group, min(tokens)))
                    continue
                if count != due:
                    assert (
                        (self._spans and count < due)
                        or self.speculation
                        or child.group.request.sampling.grammar is not None
                    ), f"step {result.step}: {count} tokens came back, {due} were due"
                    child.issued_position += count - due
                    if drafts is None and count > due:
                        self.forced_tokens += count - due
                if drafts is not None and self.speculation is not None:
                    self.speculation.verified(child, drafts, count - due)
                generated = child.generated
                if len(generated) + count < child.uneventful:
                    generated.extend(kept)
                else:
                    logprobs = result.logprobs[rank][row] if result.logprobs else ()
                    self._accept(
                        child, kept, tuple([entry for entry in logprobs if entry is not None])
                    )
        if self.speculation is not None and result.step in self._kinds:
            kind, steps = self._kinds.pop(result.step)
            self.speculation.took(kind, seconds / steps, drafted, sum(map(len, issued)))
        return broken

    def _accept(
        self, child: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        first, request = len(child.generated), child.group.request
        context = self._state.limits.context_tokens
        kept, finish = request.end_among(first, tokens, context)
        child.generated += tokens[:kept]
        if logprobs:
            child.held_logprobs += logprobs[:kept]
        if finish:
            return self._state.end_child(child, finish)
        if first == child.accepted or first + kept - child.told >= self._stream_tokens:
            self._state.news.append(self._state.untold(child))
        if not request.stop_ids and request.sampling.logprobs is None:
            told_at = child.told + self._stream_tokens
            child.uneventful = min(request.most_tokens(context), told_at)

    def _grow_running(self, steps: int) -> list[SlotGrow]:
        grows: list[SlotGrow] = []
        needy = [
            child
            for rank in self._state.running
            for child in rank
            if child.issued_position + steps + 2 * child.drafting > child.issued_limit < child.limit
            and not child.frozen
        ]
        for child in sorted(needy, key=lambda child: child.precedence):
            if child.stage is not Stage.RUNNING or child.issued_position >= child.limit:
                continue
            if self._grow(child):
                pages = self._state.ledgers[child.rank].pages(child.key)
                self._state.note_pages(child)
                child.issued_limit = min(child.limit, len(pages) * self._state.limits.page_size)
                grows.append(SlotGrow(child.rank, child.slot, child.issued_limit, pages))
        return grows

    def _grow(self, child: Sequence) -> bool:
        """Preempts another sequence only if the child has no page for its next step."""
        size, ledger = self._state.limits.page_size, self._state.ledgers[child.rank]
        held = ledger.count(child.key)
        wanted = (
            pages_for(min(child.limit, child.issued_position + self._growth_tokens), size) - held
        )
        stuck = child.issued_position >= child.issued_limit
        if not ledger.free_pages and stuck and not self._state.preempt_for(child):
            return False
        count = min(max(wanted, 1), ledger.free_pages)
        return count > 0 and ledger.extend(child.key, count) is not None

    def _admit(self, child: Sequence) -> SlotAdmit | None:
        rank, limits = child.rank, self._state.limits
        slots, position = self._state.slots[rank], child.position
        if None not in slots:
            return None
        self._state.take_slot(child, slots.index(None))
        pages = self._state.ledgers[rank].pages(child.key)
        child.issued_position, child.drafting = position, 0
        child.issued_limit = min(child.limit, len(pages) * limits.page_size)
        assert position < child.issued_limit, "a reservation covers a step of growth"
        return SlotAdmit(
            sequence=child.key,
            rank=rank,
            slot=child.slot,
            token=child.generated[-1],
            position=position,
            limit=child.issued_limit,
            pages=pages,
            sample=child.sample_spec(),
            state=self._state.states.slot(rank, child.key),
            adapter=self._state.adapters.slot_of(child.group.request),
            shift=shift_before(position, child.group.request.images, limits.images),
        )


def _sure(child: Sequence) -> bool:
    """Returns whether `issued_position` is the sequence's position after the steps in flight. A
    step with drafts or forced tokens may go further, but not within `SURE_TOKENS` of a snapshot."""
    guessed = child.drafting > 0 or child.group.request.sampling.grammar is not None
    return not guessed or child.issued_position - child.position <= SURE_TOKENS


def _issue(
    rank: list[Sequence], steps: int, number: int, drafts: dict[tuple[int, int], Planned]
) -> list[_Issued]:
    issued = []
    for row, child in enumerate(rank):
        left = child.issued_limit - child.issued_position
        tokens = steps if steps < left else left
        child.issued_position += tokens
        planned = drafts.get((number, row)) if drafts else None
        if planned is not None:
            child.drafting += planned.drafts.count
        issued.append((child, tokens, planned))
    return issued
