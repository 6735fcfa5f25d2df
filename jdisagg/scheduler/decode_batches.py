"""Continuous batching on one decode mesh: which sequences step next, with which pages, and what the read-back means. Pure.

The loop runs ahead: step n + 1 is planned before the tokens of n are read. So a plan counts with `issued_position` (where each
slot will be), and `apply` with what was read; the device knows no stop ids, so tokens behind a stop are overrun and dropped here.

Order of a plan: running sequences first get the pages they need (oldest first; when none is free the youngest holder of the
rank is preempted), then ready ones take free slots. Several steps go into one dispatch only when nothing waits.

Invariants: a slot holds one sequence; a sequence is stepped only below its limit and inside its pages; tokens of a child
are accepted once, in order.
"""

from dataclasses import dataclass

from jdisagg.request import FinishReason, TokenLogprobs
from jdisagg.scheduler.commands import BROKEN_TOKEN, NO_TOKEN, CopyPages, DecodeResult, DecodeSteps, SampledToken, SlotAdmit, SlotGrow
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.handoff import HandoffEvent
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.sequences import Group, Progress, Sequence, Stage


@dataclass(frozen=True, slots=True)
class _Issued:
    """What was planned for one row of a step: whose it is and how many tokens must come back."""

    sequence: Sequence
    tokens: int


class DecodeBatches:
    """Plans decode steps over a `DecodeState` and applies their results."""

    def __init__(self, state: DecodeState, growth_tokens: int, steps_per_dispatch: int) -> None:
        self._state = state
        self._growth_tokens = growth_tokens
        self._steps = steps_per_dispatch
        self._issued: dict[int, tuple[tuple[_Issued, ...], ...]] = {}

    def ready(self, group: Group, firsts: tuple[SampledToken, ...], step: int, deadline: float) -> CopyPages | None:
        """All KV of the group is in its pages and its first tokens are known: its children may run, atomically.

        Returns the copies of the shared last page to issue before any step of theirs. Children that the first token already
        ends are ended here.
        """
        group.handoff = group.handoff.move(HandoffEvent.ALL_INSERTED, deadline)
        tokens = {first.child: first for first in firsts}
        keys = {key for child in group.alive for key in self._state.ledgers[group.rank].pages(child.key)}
        copies = tuple(copy for copy in group.copies if copy[2] in keys)
        group.handoff = group.handoff.move(HandoffEvent.ADMIT, deadline)
        for child in group.alive:
            first = tokens[child.child]
            child.stage = Stage.READY
            self._accept(child, (first.token,), (first.logprobs,) if first.logprobs else ())
        self._state.release_root(group)
        return CopyPages(step, copies) if copies else None

    def take_over(self, group: Group, generated: tuple[int, ...], deadline: float) -> bool:
        """The group's only child has come from another worker with all its KV and these tokens: it goes on from there. False when it
        is not the one that was expected, or there is no page for its next step."""
        (child,) = group.children
        position = group.prompt_tokens + len(generated) - 1
        ours = tuple(child.generated)
        if generated[: len(ours)] != ours or position >= child.limit or self._state.cover(group, position + 1) is None:
            return False
        group.handoff = group.handoff.move(HandoffEvent.ALL_INSERTED, deadline).move(HandoffEvent.ADMIT, deadline)
        child.generated, child.accepted = list(generated), len(generated)
        child.stage = Stage.READY
        self._state.release_root(group)
        return True

    def runnable(self) -> bool:
        """Whether a plan would hold any step."""
        held = [child for slots in self._state.slots for child in slots if child is not None and not child.frozen]
        return any(child.issued_position < child.limit for child in held) or bool(self._ready())

    def _ready(self) -> list[Sequence]:
        return [child for child in self._state.sequences(stage=Stage.READY) if not child.frozen]

    def next_step(self, step: int, quiet: bool) -> DecodeSteps | None:
        """The next dispatch, or None. `quiet`: nothing waits beside it, so that several steps may run at once."""
        ready = self._ready()
        running = self._state.sequences(stage=Stage.RUNNING)
        wanted = max((child.limit - child.issued_position for child in running), default=1)
        steps = max(1, min(self._steps, wanted)) if quiet and not ready else 1
        grows = self._grow_running(steps)
        admits = [admit for child in self._ready() if (admit := self._admit(child))]
        if admits:
            steps = 1
        slots: list[tuple[int, ...]] = []
        issued: list[tuple[_Issued, ...]] = []
        for rank_slots in self._state.slots:
            held = [child for child in rank_slots if child is not None and not child.frozen]
            active = [child for child in held if child.issued_position < child.issued_limit]
            slots.append(tuple(child.slot for child in active))
            issued.append(tuple(self._issue(child, steps) for child in active))
        if not any(slots):
            return None
        self._issued[step] = tuple(issued)
        sampling = [row.sequence.group.request.sampling for rows in issued for row in rows]
        return DecodeSteps(
            step=step,
            steps=steps,
            slots=tuple(slots),
            shaped=any(params.shaped for params in sampling),
            sampled=any(not params.greedy for params in sampling),
            admits=tuple(admits),
            grows=tuple(grows),
        )

    def apply(self, result: DecodeResult) -> list[Group]:
        """Accepts what was read back; news goes to the state. Returns the groups whose logits are not finite, for the caller to end."""
        broken: list[Group] = []
        for rank, rows in enumerate(self._issued.pop(result.step)):
            for row, issued in enumerate(rows):
                if issued.sequence.stage is not Stage.RUNNING:
                    continue
                if BROKEN_TOKEN in result.tokens[rank][row]:
                    broken.append(issued.sequence.group)
                    continue
                tokens = tuple(token for token in result.tokens[rank][row] if token != NO_TOKEN)
                assert len(tokens) == issued.tokens, f"step {result.step}: {len(tokens)} tokens came back, {issued.tokens} were due"
                logprobs = result.logprobs[rank][row] if result.logprobs else ()
                self._accept(issued.sequence, tokens, tuple(entry for entry in logprobs if entry is not None))
        return broken

    def forget_all_issued(self) -> None:
        self._issued.clear()

    def _accept(self, child: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        request, context = child.group.request, child.group.context_tokens
        first_index = len(child.generated)
        finish: FinishReason | None = None
        kept = 0
        for token in tokens:
            child.generated.append(token)
            kept += 1
            finish = request.end_at(len(child.generated) - 1, token, context)
            if finish:
                break
        progress = Progress(child.group.key, child.child, first_index, tokens[:kept], logprobs[:kept])
        if finish:
            self._state.end_child(child, finish, last=progress)
        else:
            self._state.news.append(progress)

    def _grow_running(self, steps: int) -> list[SlotGrow]:
        """Oldest first, and the victim is the youngest: who has grown in this plan is not preempted in it."""
        grows: list[SlotGrow] = []
        for child in self._state.sequences(stage=Stage.RUNNING):
            if child.stage is not Stage.RUNNING or child.frozen or child.issued_position >= child.limit:
                continue
            if child.issued_position + steps > child.issued_limit and child.issued_limit < child.limit and self._grow(child):
                pages = self._state.ledgers[child.rank].pages(child.key)
                child.issued_limit = min(child.limit, len(pages) * self._state.limits.page_size)
                grows.append(SlotGrow(child.rank, child.slot, child.issued_limit, pages))
        return grows

    def _grow(self, child: Sequence) -> bool:
        """Extends by a growth step, or by what there is; preempts only when the child could not make a single step."""
        size, ledger = self._state.limits.page_size, self._state.ledgers[child.rank]
        held = len(ledger.pages(child.key))
        wanted = pages_for(min(child.limit, child.issued_position + self._growth_tokens), size) - held
        stuck = child.issued_position >= child.issued_limit
        if not ledger.free_pages and stuck and not self._state.preempt_for(child):
            return False
        count = min(max(wanted, 1), ledger.free_pages)
        return count > 0 and ledger.extend(child.key, count) is not None

    def _admit(self, child: Sequence) -> SlotAdmit | None:
        slots = self._state.slots[child.rank]
        if None not in slots:
            return None
        child.slot = slots.index(None)
        slots[child.slot] = child
        child.stage = Stage.RUNNING
        pages = self._state.ledgers[child.rank].pages(child.key)
        child.issued_position = child.position
        child.issued_limit = min(child.limit, len(pages) * self._state.limits.page_size)
        assert child.position < child.issued_limit, "a reservation covers a step of growth"
        return SlotAdmit(
            sequence=child.key,
            rank=child.rank,
            slot=child.slot,
            token=child.generated[-1],
            position=child.position,
            limit=child.issued_limit,
            pages=pages,
            sample=child.sample_spec(),
        )

    def _issue(self, child: Sequence, steps: int) -> _Issued:
        tokens = min(steps, child.issued_limit - child.issued_position)
        child.issued_position += tokens
        return _Issued(child, tokens)
