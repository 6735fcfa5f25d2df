"""Stores the times of simulated tokens in compact form.

The id of a simulated token encodes the index of a worker and the number of the decode step on this
worker. Therefore only the times of steps are recorded, and the time of a token is looked up after
the run."""

from bisect import bisect_right
from collections.abc import Sequence

from jdisagg.simulator.step_costs import Pace

NUMBER_BITS = 36
NUMBERS = (1 << NUMBER_BITS) - 1


class Timeline:
    """Records when the steps of one mesh ran. Consecutive steps are stored as one entry, a span."""

    def __init__(self, index: int, worker: str = "") -> None:
        self.worker = worker
        self._base = index << NUMBER_BITS
        self._next = 0
        self._numbers: list[int] = []  # first step of each span
        self._starts: list[float] = []
        self._paces: list[Pace] = []
        # For each span: end of its first step, end of its last step, number of steps.
        self._spans: list[tuple[float, float, int]] = []

    def add(self, start: float, pace: Pace, steps: int) -> tuple[int, ...]:
        first = self._next
        self._next += steps
        self._numbers.append(first)
        self._starts.append(start)
        self._paces.append(pace)
        self._spans.append((start + pace.first, start + pace.seconds(steps), steps))
        return tuple(range(self._base + first, self._base + first + steps))

    def spans(self, token: int, count: int) -> list[tuple[float, float, int]]:
        """Returns the `count` tokens of this mesh from the id `token` on as spans: (time of the
        first token, time of the last token, number of tokens)."""
        first = token & NUMBERS
        last = first + count - 1
        begin, end = bisect_right(self._numbers, first) - 1, bisect_right(self._numbers, last) - 1
        found = self._spans[begin : end + 1]
        if begin == end:
            return [(self._at(begin, first), self._at(begin, last), count)]
        found[0] = (self._at(begin, first), found[0][1], self._numbers[begin + 1] - first)
        found[-1] = (found[-1][0], self._at(end, last), last - self._numbers[end] + 1)
        return found

    def _at(self, span: int, number: int) -> float:
        return self._starts[span] + self._paces[span].seconds(number - self._numbers[span] + 1)


def gap_runs(timelines: Sequence[Timeline], tokens: Sequence[int]) -> list[tuple[float, int]]:
    """Returns the gaps between a request's tokens as runs of equal gaps, (seconds, number).

    All gaps within a span of consecutive steps count as the span's mean gap. Spans that follow each
    other without a pause, with gaps equal within 1 %, form one run. The first gap is always a
    separate run."""
    gaps: list[tuple[float, int]] = []
    before: float | None = None
    seconds, times = 0.0, 0  # the current run
    for begin, end, count in _spans(timelines, tokens):
        if before is not None:
            gap = begin - before
            if times and gaps and -(near := 0.01 * seconds) <= gap - seconds <= near:
                # Without a pause the whole span has one pace.
                mean = (end - before) / count
                if -near <= mean - seconds <= near:
                    seconds = (seconds * times + mean * count) / (times + count)
                    times += count
                    before = end
                    continue
            if times:
                gaps.append((seconds, times))
            seconds, times = gap, 1
        if count > 1:
            mean = (end - begin) / (count - 1)
            if times and gaps and -(near := 0.01 * seconds) <= mean - seconds <= near:
                seconds, times = (
                    (seconds * times + mean * (count - 1)) / (times + count - 1),
                    times + count - 1,
                )
            else:
                if times:
                    gaps.append((seconds, times))
                seconds, times = mean, count - 1
        before = end
    if times:
        gaps.append((seconds, times))
    return gaps


def _spans(timelines: Sequence[Timeline], tokens: Sequence[int]) -> list[tuple[float, float, int]]:
    spans: list[tuple[float, float, int]] = []
    at, total = 0, len(tokens)
    while at < total:
        count = _consecutive(tokens, at)
        spans += timelines[tokens[at] >> NUMBER_BITS].spans(tokens[at], count)
        at += count
    return spans


def _consecutive(tokens: Sequence[int], at: int) -> int:
    first, low, high = tokens[at], 1, len(tokens) - at
    if tokens[-1] - first == high - 1:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[at + middle - 1] - first == middle - 1:
            low = middle
        else:
            high = middle - 1
    return low
