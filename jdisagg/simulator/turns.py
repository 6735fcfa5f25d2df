"""Models decode with pipeline stages: which sequences form a batch, and which batch is the largest.

With m stages, m batches run at the same time, each in another stage. A batch starts its next step
when it leaves the last stage. Batches cannot overtake each other, so all run as slowly as the
slowest batch. A new sequence joins an empty batch if one exists, else the next batch to enter the
first stage. Other batches wait behind the slowest batch, so the next batch to enter is most often
the slowest. New sequences then join the slowest batch, and batches stay uneven.

The moment within a cycle at which a new sequence arrives is computed from multiples of the golden
ratio, which are evenly spread without randomness. Pure; must not depend on requests."""

from collections.abc import Callable, Collection, Iterable, Sequence

GOLDEN = 0.6180339887498949

# Seconds of a batch's step in all stages, and in the host while no stage works on the batch.
Parts = tuple[float, float]


# Number of sequences in a step, sum of their contexts, longest context, all after the step.
Load = tuple[int, int, int]


def load_of(slots: Collection[int], positions: Sequence[int]) -> Load:
    """Returns the load of a decode step for the sequences in `slots`: their number, the sum of
    their contexts, and the longest context."""
    held = [positions[slot] for slot in slots]
    return len(held), len(held) + sum(held), max(held, default=-1) + 1


class Turns:
    """Assigns the sequences of one dp rank to pipeline batches. `step_parts(*load)` returns the
    device and host seconds of a batch's step."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._phase = 0.0

    def fullest(
        self, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> Load:
        """Assigns new sequences to batches and returns the load of the largest batch. `slots`:
        slots of all sequences. `admitted`: slots of the new sequences."""
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
