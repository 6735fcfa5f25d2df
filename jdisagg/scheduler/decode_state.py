"""What a decode worker holds: page ledgers and slots per dp rank, the groups that own them, and the news for listeners.

The two deciders (`reservations.py`: who gets pages; `decode_batches.py`: what runs next) share this one state. Here live the
moves that both need: ending a child, ending a group, and preemption. A freed page or slot may be given at once to commands
issued from now on: commands run in order, so a token that the device writes too much is written before any later use.

Invariants (tests/scheduler/test_decode_batches.py): an ended child owns no slot and no pages; a group without living
children holds nothing; after all groups ended every ledger is full.
"""

from dataclasses import replace

from jdisagg.request import FinishReason
from jdisagg.scheduler.commands import MeshLimits
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.scheduler.sequences import Group, Progress, Sequence, Stage


class DecodeState:
    """Ledgers, slots and groups of one mesh. `news` fills up until the worker takes it."""

    def __init__(self, limits: MeshLimits) -> None:
        self.limits = limits
        self.ledgers = [PageLedger(limits.pages_per_rank) for _ in range(limits.ranks)]
        self.slots: list[list[Sequence | None]] = [[None] * limits.slots_per_rank for _ in range(limits.ranks)]
        self.groups: dict[int, Group] = {}
        self.news: list[Progress] = []
        self.preemptions = 0
        self._last_key = 0

    def new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    def sequences(self, rank: int | None = None, stage: Stage | None = None) -> list[Sequence]:
        """Living children, oldest first."""
        found = [
            child
            for group in self.groups.values()
            if rank is None or group.rank == rank
            for child in group.children
            if child.stage is not Stage.ENDED and (stage is None or child.stage is stage)
        ]
        return sorted(found, key=lambda child: child.age_key)

    def take_news(self) -> list[Progress]:
        news, self.news = self.news, []
        return news

    def cover(self, group: Group, tokens: int) -> tuple[int, ...] | None:
        """The pages that KV for positions [0, tokens) of the group is written to. One that moved here may have grown beyond what
        was reserved; None when there are no pages for that."""
        ledger, size = self.ledgers[group.rank], self.limits.page_size
        owner = group.children[0].key if len(group.children) == 1 else group.key
        count = pages_for(tokens, size)
        missing = count - len(ledger.pages(owner))
        if missing > 0 and ledger.extend(owner, missing) is None:
            return None
        return ledger.pages(owner)[:count]

    def end_child(
        self,
        child: Sequence,
        finish: FinishReason | None = None,
        preempted: bool = False,
        last: Progress | None = None,
        moved: bool = False,
    ) -> None:
        """Frees the child's slot and pages and tells why, together with its `last` tokens. Idempotent."""
        if child.stage is Stage.ENDED:
            return
        if child.slot >= 0:
            self.slots[child.rank][child.slot] = None
            child.slot = -1
        child.stage = Stage.ENDED
        self.ledgers[child.rank].free(child.key)
        last = last or Progress(child.group.key, child.child, len(child.generated))
        self.news.append(replace(last, finish=finish, preempted=preempted, moved=moved))
        if not child.group.alive:
            self._forget(child.group)

    def end_group(self, group: Group, preempted: bool = False) -> None:
        for child in group.alive:
            self.end_child(child, None if preempted else FinishReason.CANCELLED, preempted)

    def reserved_pages(self, rank: int) -> int:
        """Pages of sequences whose KV has not all come."""
        waiting = [child for child in self.sequences(rank) if child.stage is Stage.RESERVED]
        return len({page for child in waiting for page in self.ledgers[rank].pages(child.key)})

    def release_root(self, group: Group) -> None:
        """The children own all they need; the group itself lets go."""
        if group.root_held:
            group.root_held = False
            self.ledgers[group.rank].free(group.key)

    def preempt_for(self, needy: Sequence) -> bool:
        """Takes the youngest holder's pages on the rank until one is free. False when `needy` itself was the youngest.

        A child whose KV is still to come shares its fate with its whole group: nobody would read what arrives.
        """
        ledger = self.ledgers[needy.rank]
        while not ledger.free_pages:
            victim = self.sequences(needy.rank)[-1]
            self.preemptions += 1
            if victim.stage is Stage.RESERVED:
                self.end_group(victim.group, preempted=True)
            else:
                self.end_child(victim, preempted=True)
            if victim is needy:
                return False
        return True

    def _forget(self, group: Group) -> None:
        self.release_root(group)
        del self.groups[group.key]
        event = HandoffEvent.FREE if group.handoff.state is HandoffState.DECODING else HandoffEvent.ABORT
        if not group.handoff.state.final:
            group.handoff = group.handoff.move(event, group.handoff.deadline)
