"""Models decode through pipeline stages: which sequences form batches, and the fullest batch.

With m stages m batches run, each in another stage, and a batch starts its next step when it leaves
the last stage. Batches do not overtake, so all cycle at the pace of the slowest batch. A new
sequence joins an empty batch if there is one, else the batch whose turn is next. Since other
batches follow the slowest one closely, most new sequences arrive before the slowest batch's turn
and join it, so that batches stay uneven.

A new sequence's arrival within a cycle is taken from multiples of the golden ratio, which are
evenly spread without randomness. Pure; independent of requests."""

from collections.abc import Callable, Collection, Iterable, Sequence

GOLDEN = 0.6180339887498949

# Seconds of a batch's step in all stages, and in the host while no stage works on the batch.
Parts = tuple[float, float]


# Number of sequences in a step, sum of their contexts, longest context, all after the step.
Load = tuple[int, int, int]


def load_of(slots: Collection[int], positions: Sequence[int]) -> Load:
    """Returns the load of a decode step of the sequences in `slots`."""
    held = [positions[slot] for slot in slots]
    return len(held), len(held) + sum(held), max(held, default=-1) + 1


class Turns:
    """The batches of one dp rank. `step_parts(*load)` returns the `Parts` of a batch's step."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._phase = 0.0

    def fullest(
        self, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> Load:
        """Assigns admitted slots to batches; returns the load of the largest batch. `admitted`: new
        sequences' slots, a part of `slots`."""
        new = set(admitted)
        stay = set(slots) - new
        for batch in self._batches:
            batch &= stay
        for slot in slots:
            if slot in new:
                self._batches[self._next(positions)].add(slot)
        return max(load_of(batch, positions) for batch in self._batches)

    def _parts(self, positions: Sequence[int]) -> list[Parts]:
        return [
            self._step_parts(*load_of(batch, positions)) if batch else (0.0, 0.0)
            for batch in self._batches
        ]

    def _next(self, positions: Sequence[int]) -> int:
        """Returns the index of the batch that a new sequence joins."""
        for index, batch in enumerate(self._batches):
            if not batch:
                return index
        stages, parts = len(self._batches), self._parts(positions)
        longest = before = max(range(stages), key=lambda index: sum(parts[index]))
        self._phase = (self._phase + GOLDEN) % 1.0
        left = self._phase * sum(parts[longest])
        for step in range(1, stages):
            index = (longest + step) % stages
            left -= max(parts[before][1], parts[index][0] / stages)
            if left < 0:
                return index
            before = index
        return longest
