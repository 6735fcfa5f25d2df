"""An engine whose one loop does everything in turn, for several pipeline stages: DistServe's, moved
turn by turn.

Batches have fixed turns. In its turn a batch's tokens are read, then those who came meanwhile are
let in, then it is issued; then the loop waits for the next batch in turn. Who is let in has KV to
be fetched, and the workers do that behind the steps that they already have: the loop waits until
all batches under way are through, and nothing is issued meanwhile. So newcomers cost a pipeline
more than their bytes, and which batch they join depends on where the loop stood when they came.

A cycle is one turn of every batch; it begins when batch 0 has been read. Who came in the midst of a
cycle, but before another batch was looked after, joins that batch in its next turn: a cycle later
than the real loop, which is once in a request's life. A batch of nobody takes the next newcomer.
Knows slots and seconds, no requests. Pure."""

from collections.abc import Callable, Iterable, Sequence

from jdisagg.simulator.turns import Parts, load_of

EMPTY_TURN_SECONDS = 0.003  # that the loop sleeps in the turn of a batch of nobody


class SerialLoop:
    """The batches of one dp rank. `step_parts(*load)`: what a step of a batch takes; half of the
    host's part is before it is issued."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._came: list[tuple[int, float, float]] = []
        self._looked = [0.0] * stages  # when each batch was last looked after
        self._free = [0.0] * stages  # from when on each stage is
        self._back = [0.0] * stages  # when each batch is through all of them
        self._now = 0.0

    def came(self, at: float, tokens: int, fetch_seconds: float) -> None:
        """Somebody who holds so many tokens waits from `at` on to be let in."""
        self._came.append((tokens, at, fetch_seconds))

    def cycle(
        self, at: float, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> float:
        """Seconds of a cycle from `at` on, in which these slots step. The `admitted` among them are
        new there, and are let in."""
        new, stages = set(admitted), len(self._batches)
        stay = set(slots) - new
        for batch in self._batches:
            batch &= stay
        fetching = [0.0] * stages
        for slot in slots:
            if slot in new:
                since, seconds = self._let_in(positions[slot], at)
                index = self._turn_of(since)
                self._batches[index].add(slot)
                fetching[index] += seconds
        now = self._now = max(self._now, at)
        for index, batch in enumerate(self._batches):
            if fetching[index]:
                now = max(now, *self._free) + fetching[index]
            if batch:
                device, host = self._parts(batch, positions)
                now = self._issued(index, now + host / 2, device)
            else:
                now += EMPTY_TURN_SECONDS
            following = (index + 1) % stages
            now = max(now, self._back[following])
            self._looked[following] = now
            if self._batches[following]:
                now += self._parts(self._batches[following], positions)[1] / 2
        begun, self._now = self._now, now
        return now - begun

    def _let_in(self, tokens: int, at: float) -> tuple[float, float]:
        """(since when, seconds to fetch) of the first who came with so many tokens; who came before
        and was not let in never will be."""
        for index, (held, since, seconds) in enumerate(self._came):
            if held == tokens:
                del self._came[: index + 1]
                return since, seconds
        return at, 0.0

    def _issued(self, index: int, now: float, device: float) -> float:
        through = now
        for stage in range(len(self._free)):
            through = self._free[stage] = max(through, self._free[stage]) + device / len(self._free)
        self._back[index] = through
        return now

    def _turn_of(self, since: float) -> int:
        """The batch that is looked after first when somebody has come: one of nobody, or the first
        that was not looked after since then."""
        for index, batch in enumerate(self._batches):
            if not batch:
                return index
        stages = len(self._batches)
        return next(
            (index % stages for index in range(1, stages) if since <= self._looked[index]), 0
        )

    def _parts(self, batch: set[int], positions: Sequence[int]) -> Parts:
        return self._step_parts(*load_of(batch, positions))
