"""Preempts sequences of a decode worker for requests of higher priority, which wait for pages or
slots.

`scheduler/reservations.py` and `scheduler/priorities.py` make the decisions. A preempted sequence
leaves its full blocks in the prefix cache and returns to the queue of reservations as another
attempt of its request, which continues its stream at the next token."""

from collections.abc import Iterator

from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.reservations import Reservations
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage
from jdisagg.telemetry import Counters
from jdisagg.worker.migration import MigrationSender


class Yields:
    def __init__(
        self,
        state: DecodeState,
        batches: DecodeBatches,
        reservations: Reservations,
        migration: MigrationSender,
        counters: Counters,
    ) -> None:
        self._state = state
        self._batches = batches
        self._reservations = reservations
        self._migration = migration
        self._counters = counters

    def make_room(self, lease_until: float) -> Iterator[SequenceGroup]:
        """Yields the groups of the requests that have pages now."""
        ready = self._state.ready and not self._state.one_priority
        for last in self._batches.yielding_slots() if ready else ():
            self._preempt(last)
        while (waiting := self._reservations.pressing()) is not None:
            group = self._reservations.grant_one(waiting, lease_until)
            if group is not None:
                yield group
                continue
            last_ones = self._reservations.to_preempt(waiting)
            if not last_ones:
                return
            for last in last_ones:
                self._preempt(last)

    def _preempt(self, child: Sequence) -> None:
        self._migration.abort(child.group.key, "the sequence yields to a higher priority")
        if child.stage is Stage.RESERVED:
            self._counters.add("sequences_yielded", len(child.group.alive))
            self._state.end_group(child.group, preempted=True, yielded=True)
        elif child.stage is not Stage.ENDED:
            self._counters.add("sequences_yielded")
            self._state.end_child(child, preempted=True, yielded=True)
