"""DistServe's engine with pipeline stages, whose single loop does everything in turn, simulated
turn by turn.

Batches have fixed turns. In its turn a batch's tokens are read, newcomers are admitted, and the
batch is issued; then the loop waits for the next batch. The KV of newcomers is fetched behind the
steps that are already issued: the loop waits for all running batches, and issues nothing meanwhile.
Newcomers therefore cost a pipeline more than their bytes, and the batch that they join depends on
the position of the loop at their arrival.

A cycle is one turn of every batch and begins when batch 0 has been read. A sequence that arrives
within a cycle, before another batch was handled, joins that batch in its next turn. That is one
cycle later than in the real loop, once in a request's life. An empty batch takes the next newcomer.
Knows slots and seconds, no requests. Pure."""

from collections.abc import Callable, Iterable, Sequence

from jdisagg.simulator.turns import load_of

# Seconds of a batch's step in all stages, and in the host while no stage works on the batch.
Parts = tuple[float, float]

EMPTY_TURN_SECONDS = 0.003  # sleep of the loop in the turn of an empty batch


class SerialLoop:
    """The batches of one dp rank. `step_parts(*load)` returns the seconds of a batch's step; half
    of the host's part precedes its issue."""

    def __init__(self, stages: int, step_parts: Callable[[int, int, int], Parts]) -> None:
        self._batches: list[set[int]] = [set() for _ in range(stages)]
        self._step_parts = step_parts
        self._came: list[tuple[int, float, float]] = []
        self._looked = [0.0] * stages  # when each batch was last handled
        self._free = [0.0] * stages  # when each stage becomes free
        self._back = [0.0] * stages  # when each batch has passed all stages
        self._now = 0.0

    def came(self, at: float, tokens: int, fetch_seconds: float) -> None:
        """Records a sequence of `tokens` tokens that waits for admission from `at` on."""
        self._came.append((tokens, at, fetch_seconds))

    def cycle(
        self, at: float, slots: Sequence[int], admitted: Iterable[int], positions: Sequence[int]
    ) -> float:
        """Returns the seconds of a cycle from `at` on in which these slots step. `admitted`: the
        new ones among them."""
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
        """Returns (arrival, seconds to fetch) of the first recorded sequence with `tokens` tokens,
        and drops those before it, which were never admitted."""
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
        """Returns the batch that admits a sequence: an empty one, or the first that was not handled
        since its arrival."""
        for index, batch in enumerate(self._batches):
            if not batch:
                return index
        stages = len(self._batches)
        return next(
            (index % stages for index in range(1, stages) if since <= self._looked[index]), 0
        )

    def _parts(self, batch: set[int], positions: Sequence[int]) -> Parts:
        return self._step_parts(*load_of(batch, positions))
