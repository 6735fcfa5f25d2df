"""Costs of prefills and decode steps from times that a worker measured on its own mesh.

Before it serves, a worker measures a few compiled programs (`executor/step_times.py`), and reports
the times with its status. A chunk or batch is padded to the next size for which a program is
compiled, so that its cost is a step function of its size."""

from collections.abc import Iterable

from jdisagg.costs.attention_work import attended_pairs, windowed_share
from jdisagg.costs.cost import Cost
from jdisagg.costs.model_geometry import CostGeometry, dtype_bytes
from jdisagg.plain import Message

# Predicted seconds if the mesh has no such program. Larger than the time of any program.
ABSENT_SECONDS = 1e3


class StepTimes(Message, frozen=True):
    """Measured seconds of the programs of one mesh.

    Attributes:
        chunk_sizes: Numbers of tokens for which prefill programs are compiled, ascending. Empty if
            the mesh does not prefill.
        chunks: (tokens, cached tokens before them, seconds) of prefill chunks of one prompt.
        batch_sizes: Numbers of sequences for which decode programs are compiled, ascending. Empty
            if the mesh does not decode.
        steps: (sequences, context tokens of each, seconds) of decode steps.
    """

    chunk_sizes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int, float], ...] = ()
    batch_sizes: tuple[int, ...] = ()
    steps: tuple[tuple[int, int, float], ...] = ()


class MeasuredCosts:
    """Estimates the duration of prefills and decode steps, with the methods of `CostModel` that
    `Speed` calls. Callers pass the batch of the dp rank with the most work."""

    def __init__(self, geometry: CostGeometry, times: StepTimes, dtype: str = "bfloat16") -> None:
        self.value_bytes = dtype_bytes(dtype)
        self._geometry, self._times = geometry, times
        self._window, self._windowed = windowed_share(geometry)
        self._chunks, self._pair_seconds = _separated(
            [
                (tokens, attended_pairs(geometry, tokens, cached), seconds)
                for tokens, cached, seconds in times.chunks
            ]
        )
        self._steps, self._context_seconds = _separated(
            [
                (sequences, self._seen(sequences, sequences * context), seconds)
                for sequences, context, seconds in times.steps
            ]
        )

    def prefill(self, rows: Iterable[tuple[int, int]]) -> Cost:
        counted = list(rows)
        pairs = sum(attended_pairs(self._geometry, new, cached) for new, cached in counted)
        tokens = sum(new for new, _ in counted)
        return self.prefill_of(tokens, pairs, 0.0, len(counted))

    def prefill_of(self, tokens: int, pairs: float, context_tokens: float, rows: int) -> Cost:
        sizes = self._times.chunk_sizes
        if not sizes:
            return Cost(compute=ABSENT_SECONDS)
        whole, rest = divmod(tokens, sizes[-1])
        seconds = whole * _line(self._chunks, sizes[-1])
        if rest:
            seconds += _line(self._chunks, _padded(sizes, rest))
        return Cost(compute=seconds + pairs * self._pair_seconds)

    def decode_of(self, sequences: int, context_tokens: float, longest: float = 0.0) -> Cost:
        sizes = self._times.batch_sizes
        if not sizes or not sequences:
            return Cost()
        seconds = _line(self._steps, _padded(sizes, sequences))
        return Cost(compute=seconds + self._seen(sequences, context_tokens) * self._context_seconds)

    def _seen(self, sequences: int, context_tokens: float) -> float:
        seen = min(context_tokens, self._window * sequences) if self._windowed else 0.0
        return context_tokens * (1 - self._windowed) + seen * self._windowed


Points = tuple[tuple[int, float], ...]


def _separated(measured: list[tuple[int, float, float]]) -> tuple[Points, float]:
    each, least = 0.0, dict[int, tuple[float, float]]()
    for size, work, seconds in sorted(measured):
        if size not in least:
            least[size] = work, seconds
        elif work > least[size][0]:
            each = max(0.0, seconds - least[size][1]) / (work - least[size][0])
    return tuple(
        (size, max(seconds / 2, seconds - each * work)) for size, (work, seconds) in least.items()
    ), each


def _padded(sizes: tuple[int, ...], size: int) -> int:
    return next((one for one in sizes if one >= size), size)


def _line(points: Points, at: int) -> float:
    (left, low), (right, high) = points[0], points[-1]
    if left == right:
        return low * max(1.0, at / left)
    return low + max(0.0, high - low) * max(0, at - left) / (right - left)
