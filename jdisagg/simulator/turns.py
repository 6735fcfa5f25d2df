"""Decode through pipeline stages: which sequences step together, and who is the fullest of those
batches.

With m stages m batches are under way, each in another stage; a batch's turn to step again comes
when it is back from the last stage. All turns make a cycle as long as the longest batch takes
through all stages, for nobody overtakes. A newcomer joins the batch whose turn comes next. The
others follow the longest through its last stage and through the host, one right behind the other:
each is looked for as soon as the host is done with the one before it, and has come back a stage's
time after it. So few newcomers meet a short batch, the fullest gains most, and batches stay uneven.
A batch of nobody takes the next newcomer.

When within a cycle a newcomer came is taken from the golden ratio's multiples, which are spread
evenly: no randomness. Knows slots and seconds, no requests. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence

GOLDEN = 0.6180339887498949

# seconds of devices, through all stages, and of the host, in which no stage works on the batch
Parts = tuple[float, float]


# sequences of a step, their tokens, the tokens of the longest; the step's own among them
Load = tuple[int, int, int]


def load_of(slots: Collection[int], positions: Sequence[int]) -> Load:
    """Of a step of these slots."""
    held = [positions[slot] for slot in slots]
    return len(held), len(held) + sum(held), max(held, default=-1) + 1


class Turns:
    """The batches of one dp rank. `step_parts(*load)`: what a step of a batch takes."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._phase = 0.0

    def fullest(
        self, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> Load:
        """Of the batch that takes longest, when these slots step; the `admitted` among them are new
        there."""
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
        """The batch whose turn comes next when somebody arrives now."""
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
