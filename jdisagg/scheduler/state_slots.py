"""Who holds which slot of state on the ranks of one mesh: a sequence has one, from before its
prefill until it ends. Of a model that keeps no state, on a mesh without rings of pages
(`MeshLimits.ring_pages`), nobody holds any, and there is always room. Pure.

Several owners may hold a slot: the group that it is written for, and the first of its children; the
others have slots of their own, into which it is copied."""

from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger


class StateSlots:
    def __init__(self, limits: MeshLimits) -> None:
        self._each = int(limits.kv_spec.has_state or limits.ring_pages > 0)
        self._ledgers = [PageLedger(limits.state_slots_per_rank) for _ in range(limits.ranks)]
        self._totals = tuple([ledger.total_pages for ledger in self._ledgers])

    @property
    def on(self) -> bool:
        return bool(self._each)

    def free_slots(self, rank: int) -> int:
        return self._ledgers[rank].free_pages

    def free_by_rank(self) -> tuple[int, ...]:
        if not self._each:
            return self._totals
        return tuple([ledger.free_pages for ledger in self._ledgers])

    def total_by_rank(self) -> tuple[int, ...]:
        return self._totals

    def has_room(self, rank: int, sequences: int) -> bool:
        return not self._each or self.free_slots(rank) >= sequences

    def take(self, rank: int, owner: int) -> None:
        """The caller has seen that there is room."""
        if not self._each:
            return
        taken = self._ledgers[rank].reserve(owner, self._each)
        assert taken is not None, "room was checked"

    def share(self, rank: int, owner: int, new_owner: int) -> None:
        if self._each:
            self._ledgers[rank].share(owner, new_owner, self._each)

    def free(self, rank: int, owner: int) -> None:
        if self._each:
            self._ledgers[rank].free(owner)

    def slot(self, rank: int, owner: int) -> int:
        """Where an owner's state lies; 0 where there is none."""
        return self._ledgers[rank].pages(owner)[0] if self._each else 0
