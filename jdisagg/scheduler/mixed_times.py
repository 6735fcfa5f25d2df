"""Predicts the time of a decode step that runs together with a prefill chunk, from measured times.
Does no I/O.

The predicted time for a chunk size is its fastest recent measurement, because other work on the
machine only adds time. Measurements older than `KEPT_STEPS` commands are dropped, because contexts
grow. The time for a size without measurements is extrapolated from the nearest measured size."""

from collections import deque
from collections.abc import Sequence

SAMPLES = 9
KEPT_STEPS = 256


class _Recent:
    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def add(self, now: int, seconds: float) -> None:
        self._times.append((now, seconds))

    def fastest(self, now: int) -> float | None:
        while self._times and now - self._times[0][0] > KEPT_STEPS:
            self._times.popleft()
        return min([seconds for _, seconds in self._times], default=None)


class MixedTimes:
    """Measured times of decode steps on one mesh, alone and together with a prefill chunk.

    Args:
        batches: Batch sizes of steps, ascending. Steps without a chunk are measured separately for
            each.
    """

    def __init__(self, chunks: Sequence[int], batches: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self._batches = batches
        self._alone = {size: _Recent() for size in batches}
        self._mixed = {size: _Recent() for size in chunks}
        self._now = 0

    def took(self, sequences: int, chunk_tokens: int, seconds: float) -> None:
        """Records the seconds of a step.

        Args:
            chunk_tokens: Padded number of tokens of the chunk, or 0 without a chunk.
        """
        self._now += 1
        if not chunk_tokens:
            self._alone[self._batch(sequences)].add(self._now, seconds)
        elif chunk_tokens in self._mixed:
            self._mixed[chunk_tokens].add(self._now, seconds)

    def alone(self, sequences: int) -> float | None:
        return self._alone[self._batch(sequences)].fastest(self._now)

    def mixed(self, sequences: int) -> tuple[tuple[int, float], ...]:
        """Returns (tokens of a chunk, predicted seconds of a step with this chunk) for each chunk
        size that can be predicted. The smallest size is always included, with 0 seconds if it is
        not measured."""
        alone = self.alone(sequences)
        known = {
            size: seconds
            for size, times in self._mixed.items()
            if (seconds := times.fastest(self._now)) is not None
        }
        if alone is None or not known:
            return ((self.chunks[0], 0.0),)
        found: list[tuple[int, float]] = []
        for size in self.chunks:
            near = min(known, key=lambda one: (abs(one - size), one))
            longer = max(0.0, known[near] - alone) * size / near
            found.append((size, known.get(size, alone + longer)))
        return tuple(found)

    def _batch(self, sequences: int) -> int:
        return next(size for size in self._batches if size >= min(sequences, self._batches[-1]))
