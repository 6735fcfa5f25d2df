"""Gives the pages of a decode worker to waiting and swapped-out sequences, and preempts sequences
for requests of higher priority.

`scheduler/reservations.py` and `scheduler/priorities.py` make the decisions, and
`worker/spilled_kv.py` swaps sequences out and in. A sequence cannot be swapped out if host memory
is off or full, or if recomputing is faster. It then ends as preempted, and another attempt
recomputes it. In both cases its stream continues at the next token."""

from collections.abc import Callable, Mapping

from jdisagg.messages.worker_status import PriorityLoad
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.reservations import Reservations
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage
from jdisagg.scheduler.spills import SPILLS_AT_ONCE
from jdisagg.telemetry import Counters
from jdisagg.worker.migration import MigrationSender
from jdisagg.worker.spilled_kv import SpilledKv

Granted = Callable[[SequenceGroup], None]


class PageGrants:
    def __init__(
        self,
        state: DecodeState,
        batches: DecodeBatches,
        reservations: Reservations,
        spilled: SpilledKv,
        migration: MigrationSender,
        now: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._state = state
        self._batches = batches
        self._reservations = reservations
        self._spilled = spilled
        self._migration = migration
        self._now = now
        self._counters = counters

    def give_free(self, lease_seconds: float, granted: Granted) -> None:
        """Gives free pages to swapped-out sequences and waiting requests, in their common order."""
        spills, lease_until = self._spilled.spills, self._now() + lease_seconds
        while (spill := spills.next()) is not None:
            for group in self._reservations.grant(lease_until, spill.order):
                granted(group)
            if not spill.written or self._reservations.waits(spill.order):
                return
            if spills.returning() >= SPILLS_AT_ONCE:
                return
            back = self._reservations.take_back(spill)
            if back is None:
                return
            spill.child.came_back(self._now())
            self._spilled.bring_back(spill, *back)
        for group in self._reservations.grant(lease_until):
            granted(group)

    def make_room(self, lease_seconds: float, granted: Granted) -> None:
        """Preempts no more if too many copies are in flight; then the next call continues."""
        ready = self._state.ready and not self._state.one_priority
        for last in self._batches.yielding_slots() if ready else ():
            if not self._preempt(last):
                return
        while (waiting := self._reservations.pressing()) is not None:
            spill = self._spilled.spills.next()
            if spill is not None and spill.child.group.request.priority >= waiting.priority:
                return  # this sequence gets room first
            group = self._reservations.grant_one(waiting, self._now() + lease_seconds)
            if group is not None:
                granted(group)
                continue
            last_ones = self._reservations.to_preempt(waiting, self._spilled.coming_pages())
            if not last_ones or not all([self._preempt(one) for one in last_ones]):
                return

    def _preempt(self, child: Sequence) -> bool:
        self._migration.abort(child.group.key, "the sequence yields to a higher priority")
        if child.stage is Stage.RESERVED:
            self._counters.add("sequences_yielded", len(child.group.alive))
            self._state.end_group(child.group, preempted=True)
        elif child.stage in (Stage.READY, Stage.RUNNING):
            if self._spilled.spills.refusal(child) == "busy":
                return False
            self._counters.add("sequences_yielded")
            child.yielded_at = self._now()
            if not self._state.spill(child):
                self._state.end_child(child, preempted=True)
        return True

    def loads(self, queued: Mapping[int, int]) -> tuple[PriorityLoad, ...]:
        held, waiting = self._state.priorities(), self._reservations.priorities()
        for spill in self._spilled.spills:
            if spill.child.group.suspended_until is None:
                priority = spill.child.group.request.priority
                waiting[priority] = waiting.get(priority, 0) + 1
        return tuple(
            [
                PriorityLoad(one, *held.get(one, (0, 0)), waiting.get(one, 0), queued.get(one, 0))
                for one in sorted({*held, *waiting, *queued})
            ]
        )
