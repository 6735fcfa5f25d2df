"""Holds the state of a decode worker: the page ledgers and batch slots of each data-parallel rank,
the sequence groups that own them, and progress to report.

A freed page or slot may be reused at once, although a step in flight may still write to it.
Commands run in order, so this write precedes every use by a later command.

Invariants (tests/scheduler/test_decode_batches.py): an ended child owns no slot and no pages; a
group whose children have all ended owns nothing; after all groups have ended, all pages are
free."""

import bisect
from collections import Counter
from dataclasses import replace

from jdisagg.request import FinishReason
from jdisagg.scheduler.block_names import Tail
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState, sweep
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.scheduler.prompt_room import AdapterTable, PromptRoom, snapshots_of
from jdisagg.scheduler.residency import BlockNames, Chain, Residency
from jdisagg.scheduler.sequences import ChildProgress, Sequence, SequenceGroup, Stage


class DecodeState:
    """The page ledgers, batch slots and sequence groups of one decode mesh.

    Args:
        names: Object that computes the hashes (names) of cached blocks; None disables the prefix
            cache.

    Attributes:
        news: Progress of sequences that the worker has not reported to callers yet.
    """

    def __init__(
        self,
        limits: MeshLimits,
        names: BlockNames | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.limits = limits
        self.ledgers = [PageLedger(limits.pages_per_rank) for _ in range(limits.ranks)]
        self.room = PromptRoom(limits)
        self.states = self.room.states
        snapshots = snapshots_of(limits, self.room.windows)
        self.residency = Residency(self.ledgers, limits.page_size, names, snapshots)
        self.slots: list[list[Sequence | None]] = [
            [None] * limits.slots_per_rank for _ in range(limits.ranks)
        ]
        self.groups: dict[int, SequenceGroup] = {}
        self.ready: list[Sequence] = []  # READY, in the order in which they get slots
        # RUNNING sequences of each rank, in order of their slots
        self.running: list[list[Sequence]] = [[] for _ in range(limits.ranks)]
        self.frozen: list[Sequence] = []
        self.masked = 0  # number of running sequences with a grammar
        self.living = [0] * limits.ranks  # number of unfinished children
        # keys of children that will need more pages than they have
        self.growing: list[set[int]] = [set() for _ in range(limits.ranks)]
        self._priorities: Counter[int] = Counter()  # number of groups by priority
        self.news: list[ChildProgress] = []
        self.ended: list[int] = []  # keys of groups
        self.preemptions = 0
        self.cut: list[int] = []  # owners of pages for other workers that sequences needed
        self.adapters = adapters or AdapterTable(limits.adapters)
        self._last_key = 0

    @property
    def continues(self) -> bool:
        """Whether sequences that gave way may go on with a decode step. Recurrent state and ring
        buffers are as after the steps in flight, so those of tails are not cached."""
        return self.residency.keeps_answers and not self.states.on

    def new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    def add_group(self, group: SequenceGroup) -> None:
        self.groups[group.key] = group
        self.living[group.rank] += len(group.children)
        for child in group.children:
            self.note_pages(child)
        self._priorities[group.request.priority] += 1

    def advance(self, group: SequenceGroup, event: HandoffEvent, deadline: float) -> None:
        """The transfer is aborted if it stays in the new state after `deadline`."""
        group.handoff = group.handoff.advance(event, deadline)

    def overdue(self, now: float) -> list[SequenceGroup]:
        late = sweep([group.handoff for group in self.groups.values()], now)
        return [self.groups[handoff.handoff_id] for handoff in late]

    def become_ready(self, child: Sequence) -> None:
        child.stage = Stage.READY
        bisect.insort(self.ready, child, key=lambda ready: ready.order)

    def freeze(self, child: Sequence) -> None:
        child.frozen = True
        self.frozen.append(child)

    def thaw(self, child: Sequence) -> None:
        if child.frozen:
            child.frozen = False
            self.frozen.remove(child)

    def take_slot(self, child: Sequence, slot: int) -> None:
        self.ready.remove(child)
        self.slots[child.rank][slot] = child
        child.slot, child.stage = slot, Stage.RUNNING
        bisect.insort(self.running[child.rank], child, key=lambda one: one.slot)
        self._count_masked(child, 1)

    def _count_masked(self, child: Sequence, change: int) -> None:
        self.masked += change * (child.group.request.sampling.grammar is not None)

    def note_pages(self, child: Sequence) -> None:
        if self.ledgers[child.rank].count(child.key) * self.limits.page_size < child.limit:
            self.growing[child.rank].add(child.key)
        else:
            self.growing[child.rank].discard(child.key)

    def contexts(self) -> tuple[int, ...]:
        contexts = [0] * self.limits.ranks
        for group in self.groups.values():
            prompt_tokens = group.prompt_tokens
            for child in group.children:
                if child.stage is not Stage.ENDED:
                    contexts[group.rank] += prompt_tokens + len(child.generated)
        return tuple(contexts)

    def reserved_pages(self) -> tuple[int, ...]:
        pages: list[set[int]] = [set() for _ in self.ledgers]
        for group in self.groups.values():
            for child in group.children if group.root_held else ():
                if child.stage is Stage.RESERVED:
                    pages[group.rank].update(self.ledgers[group.rank].pages(child.key))
        return tuple(map(len, pages))

    @property
    def one_priority(self) -> bool:
        return len(self._priorities) <= 1

    @property
    def lowest_priority(self) -> int | None:
        return min(self._priorities, default=None)

    def priorities(self) -> dict[int, tuple[int, int]]:
        """Returns, for each priority, the number of sequences that have pages and the number of
        these pages."""
        keys: dict[int, list[list[int]]] = {}  # keys of children by priority and rank
        for group in self.groups.values():
            priority = group.request.priority
            for child in group.children:
                if child.stage is Stage.ENDED:
                    continue
                if priority not in keys:
                    keys[priority] = [[] for _ in self.ledgers]
                keys[priority][group.rank].append(child.key)
        return {
            priority: (sum(map(len, ranks)), sum(map(PageLedger.count_all, self.ledgers, ranks)))
            for priority, ranks in keys.items()
        }

    def take_news(self) -> list[ChildProgress]:
        news, self.news = self.news, []
        return news

    def take_cut(self) -> list[int]:
        cut, self.cut = self.cut, []
        return cut

    def cover(self, group: SequenceGroup, tokens: int) -> tuple[int, ...] | None:
        """Returns the pages for positions [0, tokens) of a group, or None if too few pages are
        free. Reserves more pages if needed, because a migrated sequence may have grown on its
        previous worker after pages were reserved here."""
        ledger, size = self.ledgers[group.rank], self.limits.page_size
        owner = group.children[0].key if len(group.children) == 1 else group.key
        count = pages_for(tokens, size)
        missing = count - ledger.count(owner)
        if missing > 0:
            if ledger.extend(owner, missing) is None:
                return None
            for child in group.alive:
                self.note_pages(child)
        return ledger.pages(owner)[:count]

    def end_child(
        self,
        child: Sequence,
        finish: FinishReason | None = None,
        preempted: bool = False,
        moved: bool = False,
        yielded: bool = False,
        awaited: bool = False,
    ) -> None:
        """Ends a finished, aborted or preempted child. Frees its slot and pages, and reports its
        last tokens and the reason for its end. Its full blocks stay in the prefix cache, where
        another attempt finds them. `awaited`: whether one will follow, as after a preemption.
        Idempotent."""
        if child.stage is Stage.ENDED:
            return
        self._vacate(child, preempted or awaited)
        self.states.free(child.rank, child.key)
        child.stage = Stage.ENDED
        self.preemptions += preempted
        last = self.untold(child)
        last = replace(last, finish=finish, preempted=preempted, moved=moved, yielded=yielded)
        self.news.append(last)
        if not child.group.alive:
            self._forget(child.group)

    def _vacate(self, child: Sequence, returns: bool) -> None:
        chain = self.chain_to_keep(child)
        tail = self._tail_to_keep(child, chain) if returns else None
        if child.stage is Stage.RUNNING:
            self.slots[child.rank][child.slot] = None
            self.running[child.rank].remove(child)
            self._count_masked(child, -1)
            child.slot, child.ngrams = -1, None
        elif child.stage is Stage.READY:
            self.ready.remove(child)
        self.living[child.rank] -= 1
        self.growing[child.rank].discard(child.key)
        self.residency.let_go(child.rank, child.key, chain, awaited=returns, tail=tail)

    def chain_to_keep(self, child: Sequence) -> Chain:
        """Returns the hashes of the full blocks of a child that stay in the prefix cache when the
        child releases its pages. The newest token is excluded because its KV is not written yet.
        Steps in flight write only to positions after these blocks."""
        group = child.group
        if not self._cacheable(child):
            return ()
        if not self.residency.keeps_answers:
            return group.chain
        tokens = group.request.prompt_token_ids + tuple(child.generated)
        return self.residency.chain(group.request, tokens[: child.position], group.chain)

    def _tail_to_keep(self, child: Sequence, chain: Chain) -> Tail | None:
        if not self._cacheable(child) or not self.continues:
            return None
        kept, request = self.residency, child.group.request
        tail = kept.tail(request, chain, child.position, child.generated)
        if tail is not None:
            kept.sessions.noted_tail(request, tail.name)
        return tail

    def _cacheable(self, child: Sequence) -> bool:
        current = child.group.epoch == self.residency.epoch
        return self.residency.on and child.stage is not Stage.RESERVED and current

    def untold(self, child: Sequence) -> ChildProgress:
        first, logprobs = child.told, tuple(child.held_logprobs)
        child.told = len(child.generated)
        child.held_logprobs.clear()
        tokens = tuple(child.generated[first:])
        return ChildProgress(child.group.key, child.child, first, tokens, logprobs)

    def end_group(
        self,
        group: SequenceGroup,
        preempted: bool = False,
        yielded: bool = False,
        awaited: bool = False,
    ) -> None:
        finish = None if preempted else FinishReason.CANCELLED
        for child in group.alive:
            self.end_child(child, finish, preempted, yielded=yielded, awaited=awaited)

    def release_root(self, group: SequenceGroup) -> None:
        """Releases the pages that the group itself owns. Pages that its children own, too, stay in
        use."""
        if group.root_held:
            group.root_held = False
            heir = next((child.key for child in group.alive), None)
            self.residency.release_root(group.rank, group.key, heir)
            self.states.free(group.rank, group.key)

    def preempt_for(self, needy: Sequence) -> bool:
        """Frees at least one page on the rank of `needy`. Pages of cached blocks that are being
        sent to other workers are freed first; the worker must end the transfers in `cut`. If there
        are none, the youngest sequence of the lowest priority is preempted. Returns False if this
        sequence is `needy` itself.

        If the preempted child's KV is still arriving, its whole group is ended."""
        ledger = self.ledgers[needy.rank]
        while not ledger.free_pages:
            if (owner := self.residency.release_newest(needy.rank)) is not None:
                self.cut.append(owner)
                continue
            victim = max(
                (
                    child
                    for group in self.groups.values()
                    if group.rank == needy.rank
                    for child in group.alive
                ),
                key=lambda child: child.precedence,
            )
            if victim.stage is Stage.RESERVED:
                self.end_group(victim.group, preempted=True)
            else:
                self.end_child(victim, preempted=True)
            if victim is needy:
                return False
        return True

    def _forget(self, group: SequenceGroup) -> None:
        self.release_root(group)
        del self.groups[group.key]
        self.ended.append(group.key)
        priority = group.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        # breaks a reference cycle, so that memory is freed without the garbage collector
        group.children = []
        decoding = group.handoff.state is HandoffState.DECODING
        event = HandoffEvent.FREE if decoding else HandoffEvent.ABORT
        self.advance(group, event, group.handoff.deadline)
