"""Defines the states, events and deadlines of a hand-off: the transfer of a sequence's KV from a
prefill to a decode worker.

The sender's states are COMPUTING -> OFFERED -> ACKED -> FREED. The receiver's states are RESERVED
-> RECEIVING -> COMPLETE -> DECODING -> FREED. ABORTED is reachable from every state but FREED. A
receiver whose sender failed is ORPHANED until another sender takes over.

Invariants: FREED and ABORTED are final; an event that is not listed for a state in `TRANSITIONS`
indicates a bug and raises `HandoffStateError`."""

import enum
from collections.abc import Iterable

from jdisagg.plain import plain


class HandoffStateError(AssertionError):
    """An event that is not allowed in a hand-off's current state. This indicates a bug."""


class HandoffState(enum.Enum):
    COMPUTING = "computing"
    OFFERED = "offered"
    ACKED = "acked"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    ORPHANED = "orphaned"
    COMPLETE = "complete"
    DECODING = "decoding"
    FREED = "freed"
    ABORTED = "aborted"

    __hash__ = object.__hash__  # by identity, which is fast, because lookups are frequent

    @property
    def final(self) -> bool:
        return self is HandoffState.FREED or self is HandoffState.ABORTED


class HandoffEvent(enum.Enum):
    ALL_OFFERED = "all blocks are offered"
    ALL_ACKED = "all blocks are acknowledged"
    GENERATE = "generate took the reservation over"
    SOURCE_LOST = "what is missing will not come from this source"
    NEW_SOURCE = "another source takes over"
    ALL_INSERTED = "all blocks are in their pages"
    ADMIT = "the sequence joined the batch"
    FREE = "what was held is given back"
    ABORT = "one side gave up"

    __hash__ = object.__hash__


S, E = HandoffState, HandoffEvent

TRANSITIONS: dict[tuple[HandoffState, HandoffEvent], HandoffState] = {
    (S.COMPUTING, E.ALL_OFFERED): S.OFFERED,
    (S.OFFERED, E.ALL_ACKED): S.ACKED,
    (S.ACKED, E.FREE): S.FREED,
    (S.RESERVED, E.GENERATE): S.RECEIVING,
    (S.RECEIVING, E.ALL_INSERTED): S.COMPLETE,
    (S.RECEIVING, E.SOURCE_LOST): S.ORPHANED,
    (S.RECEIVING, E.NEW_SOURCE): S.RECEIVING,
    (S.ORPHANED, E.NEW_SOURCE): S.RECEIVING,
    (S.COMPLETE, E.ADMIT): S.DECODING,
    (S.DECODING, E.FREE): S.FREED,
    **{(state, E.ABORT): S.ABORTED for state in HandoffState if not state.final},
}


@plain
class Handoff:
    handoff_id: int
    state: HandoffState
    deadline: float

    def advance(self, event: HandoffEvent, deadline: float) -> "Handoff":
        """Returns the hand-off after `event`. `deadline` is the deadline of the new state."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise HandoffStateError(
                f"hand-off {self.handoff_id}: {event.name} is not possible in state"
                f" {self.state.name}"
            )
        return Handoff(self.handoff_id, state, deadline)

    def renew(self, deadline: float) -> "Handoff":
        """Returns the hand-off after progress. Its deadline becomes `deadline` if that is later. A
        final hand-off is returned unchanged."""
        return self.expect(max(self.deadline, deadline))

    def expect(self, deadline: float) -> "Handoff":
        """Returns the hand-off with a new deadline, which may be earlier than the old one. A final
        hand-off is returned unchanged."""
        return self if self.state.final else Handoff(self.handoff_id, self.state, deadline)


def sweep(handoffs: Iterable[Handoff], now: float) -> tuple[Handoff, ...]:
    """Returns hand-offs whose deadline has passed. The caller must abort them."""
    return tuple(
        [handoff for handoff in handoffs if handoff.deadline < now and not handoff.state.final]
    )
