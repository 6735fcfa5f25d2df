"""Assigns the slots for recurrent state and sliding-window ring buffers on each rank of one mesh.
Does no I/O.

If the model has neither recurrent state nor ring buffers (`MeshLimits.ring_pages`), no slots are
used and there is always room. The first child of a group (n > 1) uses the group's slot. Each other
child has its own slot, into which the group's state is copied."""

from collections.abc import Sequence

from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.snapshots import Snapshots
from jdisagg.scheduler.window_pages import WindowPages, WindowSnapshots


def snapshots_of(limits: MeshLimits, windows: Sequence[WindowPages] = ()) -> Sequence[Snapshots]:
    if windows and limits.snapshot_tokens:
        return [WindowSnapshots(pages) for pages in windows]
    if not limits.snapshots_per_rank:
        return []
    slots = limits.state_slots_per_rank, limits.snapshots_per_rank
    return [Snapshots(*slots) for _ in range(limits.ranks)]


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

    def take(self, rank: int, owner: int) -> None:
        """Assigns a slot to an owner. The caller must have checked that a slot is free."""
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
        return self._ledgers[rank].pages(owner)[0] if self._each else 0
