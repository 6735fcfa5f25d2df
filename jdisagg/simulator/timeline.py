"""When the tokens of a simulated mesh came. A synthetic token is the number of the step that made
it, so that whoever has the tokens of a request can look up when each was made, on whichever worker,
without any work for each token on the way.

A token id holds its worker's index and the step's number there; steps of one span have one entry.
Pure."""

from bisect import bisect_right
from collections.abc import Sequence

from jdisagg.simulator.step_costs import Pace

NUMBER_BITS = 36
NUMBERS = (1 << NUMBER_BITS) - 1


class Timeline:
    """The steps of one mesh, in the order in which their spans ended."""

    def __init__(self, index: int, worker: str = "") -> None:
        self.worker = worker
        self._base = index << NUMBER_BITS
        self._next = 0
        self._numbers: list[int] = []  # of each span's first step
        self._starts: list[float] = []
        self._paces: list[Pace] = []
        # when its first and its last step ended, and how many there are
        self._spans: list[tuple[float, float, int]] = []

    def add(self, start: float, pace: Pace, steps: int) -> tuple[int, ...]:
        """The tokens of a span that began at `start`."""
        first = self._next
        self._next += steps
        self._numbers.append(first)
        self._starts.append(start)
        self._paces.append(pace)
        self._spans.append((start + pace.first, start + pace.seconds(steps), steps))
        return tuple(range(self._base + first, self._base + first + steps))

    def spans(self, token: int, count: int) -> list[tuple[float, float, int]]:
        """(when the first came, when the last came, how many) by span, of `count` tokens of this
        mesh from `token` on."""
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
    """The gaps between a request's tokens as runs of (seconds, how many): within a span all gaps
    count as its mean, and spans that follow each other without a pause and at the same pace (within
    1 %) are one run. The first gap is a run of its own."""
    gaps: list[tuple[float, int]] = []
    before: float | None = None
    seconds, times = 0.0, 0  # the run under way
    for begin, end, count in _spans(timelines, tokens):
        if before is not None:
            gap = begin - before
            if times and gaps and -(near := 0.01 * seconds) <= gap - seconds <= near:
                # No pause: the whole span goes at one pace.
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
    """Of tokens that may come from several meshes one after the other. Numbers of one mesh need not
    follow each other without a gap: a prefill's token is one of its own."""
    spans: list[tuple[float, float, int]] = []
    at, total = 0, len(tokens)
    while at < total:
        count = _consecutive(tokens, at)
        spans += timelines[tokens[at] >> NUMBER_BITS].spans(tokens[at], count)
        at += count
    return spans


def _consecutive(tokens: Sequence[int], at: int) -> int:
    """How many tokens from `at` on are numbered one after the other (bisection: numbers rise on one
    mesh)."""
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
