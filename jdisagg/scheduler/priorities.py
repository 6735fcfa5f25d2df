"""Decides which sequences are preempted for a waiting request of higher priority.

The sequences of the lowest priority are preempted first, and among these the newest. No sequence is
preempted for ("yields to") an equal or lower priority.

Requests are served in order of arrival, but each unit of priority makes a request
`PRIORITY_SECONDS` older, up to `MOST_PRIORITY` units. So requests of low priority do not starve:
after enough time in the queue, a request is served before newer requests of higher priority.

Invariants (each is a test of the same name in tests/scheduler/test_priorities.py):
- only_a_lower_priority_yields_and_not_for_ever
- the_lowest_and_newest_are_preempted_and_no_more_than_needed
"""

from collections.abc import Sequence as Sized

from jdisagg.plain import plain

PRIORITY_SECONDS = 30.0
MOST_PRIORITY = 10


def head_start(priority: int) -> float:
    """Returns by how many seconds a priority makes a request older in the queue. Negative for
    negative priorities."""
    return PRIORITY_SECONDS * max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


def yields(priority: int, aside_seconds: float, to_priority: int) -> bool:
    return aside_seconds < head_start(to_priority) - head_start(priority)


@plain
class YieldingSequence:
    """A sequence that may be preempted, or a prompt that may lose its pages.

    Attributes:
        slots: Number of its batch or state slots, or of its pages of windows.
        computed: Whether all its KV is in pages. If it is not, a preemption loses the part that was
            computed.
    """

    key: int
    priority: int
    newness: tuple[float, int, int]
    pages: int
    computed: bool = True
    slots: int = 1


def to_preempt(
    holders: Sized[YieldingSequence], pages: int, slots: int
) -> list[YieldingSequence] | None:
    """Chooses the sequences that are preempted on one rank, lowest priority first.

    Returns:
        The fewest sequences that suffice, in order of preemption, or None if all together do not
            suffice.
    """
    order = sorted(holders, key=lambda one: one.newness, reverse=True)
    order.sort(key=lambda one: (one.priority, not one.computed))
    chosen: list[YieldingSequence] = []
    for holder in order:
        if pages <= 0 and slots <= 0:
            break
        chosen.append(holder)
        pages, slots = pages - holder.pages, slots - holder.slots
    if pages > 0 or slots > 0:
        return None
    for holder in reversed(chosen):  # a later choice may suffice alone
        if pages + holder.pages <= 0 and slots + holder.slots <= 0:
            chosen.remove(holder)
            pages, slots = pages + holder.pages, slots + holder.slots
    return chosen
