"""Stores the times between consecutive tokens of a request in compact form, so that the gaps of a
hundred thousand requests fit into memory.

The count, the sum, the first gap, the longest gap and the mean of the longest tenth are exact. All
gaps are counted in a histogram whose bucket bounds grow by 2 %, so that percentiles over many
requests are within 1 % (`merged_percentile`)."""

import math
from collections.abc import Iterable, Sequence

from jdisagg.plain import plain

GROWTH = math.log(1.02)
# Shorter gaps, in seconds, are in the lowest bucket and count as 0: tokens of one message.
SHORTEST = 1e-6


@plain
class Gaps:
    """The times between consecutive tokens of one request, in seconds.

    Attributes:
      slowest_tenth: Mean of the longest 10 % of the gaps, or the longest gap if 10 % is less than
        one gap.
      buckets, counts: Histogram of all gaps: bucket numbers, and number of gaps in each.
    """

    count: int
    total: float
    first: float
    longest: float
    slowest_tenth: float
    buckets: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, runs: Iterable[tuple[float, int]]) -> "Gaps | None":
        listed = [run for run in runs if run[1] > 0]
        if not listed:
            return None
        count, total = 0, 0.0
        found: dict[int, int] = {}
        for seconds, times in listed:
            count, total = count + times, total + seconds * times
            bucket = bucket_of(seconds)
            found[bucket] = found.get(bucket, 0) + times
        ordered = tuple(sorted(found))
        listed_first = listed[0][0]
        return cls(
            count,
            total,
            listed_first,
            max(seconds for seconds, _ in listed),
            _slowest_tenth(listed, count),
            ordered,
            tuple(found[bucket] for bucket in ordered),
        )

    @classmethod
    def of_times(cls, times: Sequence[float]) -> "Gaps | None":
        """Builds a record from the times of the tokens, in seconds; None for less than two."""
        return cls.of(
            (later - earlier, 1) for earlier, later in zip(times, times[1:], strict=False)
        )


def bucket_of(seconds: float) -> int:
    """Returns the histogram bucket of a gap. Bucket 0 has the gaps below SHORTEST, and bucket b > 0
    those in [SHORTEST x 1.02^(b-1), SHORTEST x 1.02^b)."""
    return 0 if seconds < SHORTEST else 1 + int(math.log(seconds / SHORTEST) / GROWTH)


def bucket_seconds(bucket: int) -> float:
    return 0.0 if bucket == 0 else SHORTEST * math.exp((bucket - 0.5) * GROWTH)


def merged_percentile(gaps: Sequence[Gaps], percents: Sequence[float]) -> list[float]:
    """Returns percentiles, in seconds, over the gaps of all requests. Each result is the middle of
    a histogram bucket, or the longest gap if that is shorter."""
    merged: dict[int, int] = {}
    for item in gaps:
        for bucket, count in zip(item.buckets, item.counts, strict=True):
            merged[bucket] = merged.get(bucket, 0) + count
    ordered, whole = sorted(merged), sum(merged.values())
    longest = max(item.longest for item in gaps)
    found = []
    for percent in percents:
        rank, below = max(1, math.ceil(percent / 100 * whole)), 0
        for bucket in ordered:
            below += merged[bucket]
            if below >= rank:
                found.append(min(bucket_seconds(bucket), longest))
                break
    return found


def _slowest_tenth(runs: Sequence[tuple[float, int]], count: int) -> float:
    left = wanted = max(1, round(count / 10))
    total = 0.0
    for seconds, times in sorted(runs, reverse=True):
        taken = min(times, left)
        total, left = total + seconds * taken, left - taken
        if not left:
            break
    return total / wanted
