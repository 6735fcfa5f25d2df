"""Decode through pipeline stages: which sequences step together, and which of these batches is the
fullest.

With m stages m batches run, each in another stage, and a batch steps again when it returns from the
last stage. Batches do not overtake, so a cycle of all turns takes as long as the slowest batch
needs through all stages. A newcomer joins the batch whose turn is next. The other batches follow
the slowest one through its last stage and the host, each one stage time after the previous one. Few
newcomers therefore meet a short batch, the fullest batch gains most, and batches stay uneven. An
empty batch takes the next newcomer.

A newcomer's moment within a cycle is taken from multiples of the golden ratio, which are spread
evenly without randomness. Knows slots and seconds, no requests. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence

GOLDEN = 0.6180339887498949

# Seconds of all stages, and of the host, during which no stage works on the batch.
Parts = tuple[float, float]


# Sequences of a step, their tokens, tokens of the longest; the step's own tokens included.
Load = tuple[int, int, int]


def load_of(slots: Collection[int], positions: Sequence[int]) -> Load:
    """Returns the load of a step of these slots."""
    held = [positions[slot] for slot in slots]
    return len(held), len(held) + sum(held), max(held, default=-1) + 1


class Turns:
    """The batches of one dp rank. `step_parts(*load)` returns the seconds of a batch's step."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._phase = 0.0

    def fullest(
        self, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> Load:
        """Returns the load of the slowest batch when these slots step. `admitted`: the new ones
        among them."""
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
        """Returns the batch that a sequence arriving now joins."""
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
