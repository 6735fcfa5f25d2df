"""Retention of cached blocks: in which order pages, host memory and disk evict them.

A client can ask that the KV of a prompt is retained (`Hints`). A retained block counts as used
later than it was, by a multiple of the seconds that are left of its retention. This decays with the
block's age, and each use renews it. It is a weight and not a pin: a block that is evicted always
exists, and at most half of a tier is retained. While more is, blocks go by their last use alone.

Invariants (each is a test of the same name in tests/scheduler/test_retention.py):
- the_block_of_least_worth_goes_first
- without_retention_the_least_recently_used_goes_first
- a_tier_of_retained_blocks_gives_room
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

from jdisagg.prompt.hints import Retention
from jdisagg.request import Request

MOST_RETAINED = 1 << 18  # names of retained blocks that a worker remembers

K = TypeVar("K")


def worth(last_use: float, retention: Retention | None, age: float) -> float:
    """Returns the time as whose last use the last use of a block counts. The block with the
    smallest time is evicted first.

    Args:
        age: Seconds since the last use.
    """
    if retention is None or age >= retention.seconds:
        return last_use
    return last_use + retention.weight * (retention.seconds - age)


class Retained:
    """The retention of blocks by name, for all tiers of a worker, and the time of its last turn."""

    def __init__(self, most: int = MOST_RETAINED) -> None:
        self._most = most
        self._by_name: OrderedDict[bytes, Retention] = OrderedDict()  # longest unasked first
        self.now = 0.0

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def advance(self, now: float) -> None:
        self.now = max(self.now, now)

    def of(self, name: bytes) -> Retention | None:
        return self._by_name.get(name)

    def forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._by_name.pop(name, None)

    def asked(self, request: Request, chain: Iterable[bytes], block_tokens: int) -> None:
        """Notes what a request asks for its blocks. A block that several requests retain keeps the
        retention that begins with the greatest worth."""
        hints = request.hints
        if hints is None or hints.retention is None:
            return
        retention, by_name = hints.retention, self._by_name
        most = hints.retained_tokens // block_tokens if hints.retained_tokens else None
        for count, name in enumerate(chain):
            if most is not None and count >= most:
                break
            known = by_name.pop(name, retention)
            by_name[name] = max(known, retention, key=_at_first)
        while len(by_name) > self._most:
            by_name.popitem(last=False)


class EvictionOrder(Generic[K]):
    """The order in which keys are evicted: those of blocks, or of their pages.

    Args:
        retained: Retention of blocks by name; None if no key is retained.
        name_of: Function that returns the name of a key's block.
        most_retained: Number of retained keys above which retention does not count.
    """

    def __init__(
        self,
        retained: Retained | None = None,
        name_of: Callable[[K], bytes] | None = None,
        most_retained: int = 0,
    ) -> None:
        self._retained = retained
        self._name_of = name_of
        self._most_retained = most_retained
        # Keys with their last use, least recently used first, for each retention. As `worth` grows
        # with the last use, the first key of some queue has the least worth.
        self._plain: OrderedDict[K, float] = OrderedDict()
        self._queues: dict[Retention, OrderedDict[K, float]] = {}
        self._ended: dict[Retention, OrderedDict[K, float]] = {}  # keys whose retention has ended
        self._queue_of: dict[K, OrderedDict[K, float]] = {}  # queues of keys that are not plain

    def __len__(self) -> int:
        return len(self._plain) + len(self._queue_of)

    def __contains__(self, key: K) -> bool:
        return key in self._plain or key in self._queue_of

    def __iter__(self) -> Iterator[K]:
        """Iterates in the order of eviction."""
        if not self._queue_of:
            return iter(self._plain)
        weighed = [self._weighed(*one) for one in self._all_queues()]
        return map(itemgetter(1), heapq.merge(*weighed, key=itemgetter(0)))

    def add(self, key: K) -> None:
        """Adds a key, or moves it, as the most recently used one."""
        retained = self._retained
        if not retained and not self._queue_of:
            self._plain[key] = 0.0 if retained is None else retained.now
            self._plain.move_to_end(key)
            return
        self.discard(key)
        assert retained is not None and self._name_of is not None, "no key is retained without them"
        retention = retained.of(self._name_of(key))
        if retention is None:
            self._plain[key] = retained.now
        else:
            queue = self._queue_of[key] = self._queues.setdefault(retention, OrderedDict())
            queue[key] = retained.now

    def add_first(self, key: K) -> None:
        """Adds a key as the one that is evicted first."""
        self._plain[key] = -math.inf
        self._plain.move_to_end(key, last=False)

    def is_first(self, key: K) -> bool:
        """Returns whether a key was added by `add_first`, and not used since."""
        return self._plain.get(key) == -math.inf

    def discard(self, key: K) -> None:
        if key in self._plain:
            del self._plain[key]
        elif (queue := self._queue_of.pop(key, None)) is not None:
            del queue[key]

    def pop(self) -> K:
        """Removes the key that is evicted first, and returns it. Raises KeyError if there is
        none."""
        if not self._queue_of:
            return self._plain.popitem(last=False)[0]
        first = [next(self._weighed(*one)) for one in self._all_queues()]
        _, key = min(first, key=itemgetter(0))
        self.discard(key)
        return key

    def clear(self) -> None:
        self._queue_of.clear()
        for queues in ((self._plain,), self._queues.values(), self._ended.values()):
            for queue in queues:
                queue.clear()

    def _all_queues(self) -> list[tuple[Retention | None, OrderedDict[K, float]]]:
        """Returns the queues that have keys, each with the retention that counts for its keys."""
        self._end_retentions()
        counts = sum(map(len, self._queues.values())) <= self._most_retained
        queues = [
            (retention if counts else None, queue) for retention, queue in self._queues.items()
        ]
        ended = [(None, queue) for queue in (self._plain, *self._ended.values())]
        return [one for one in (*queues, *ended) if one[1]]

    def _end_retentions(self) -> None:
        now = self._now
        for retention, queue in self._queues.items():
            while queue:
                key, last_use = next(iter(queue.items()))
                if now - last_use < retention.seconds:
                    break
                del queue[key]
                ended = self._queue_of[key] = self._ended.setdefault(retention, OrderedDict())
                ended[key] = last_use

    def _weighed(
        self, retention: Retention | None, queue: OrderedDict[K, float]
    ) -> Iterator[tuple[float, K]]:
        now = self._now
        for key, last_use in queue.items():
            yield worth(last_use, retention, now - last_use), key

    @property
    def _now(self) -> float:
        return 0.0 if self._retained is None else self._retained.now


def _at_first(retention: Retention) -> float:
    return worth(0.0, retention, 0.0)
