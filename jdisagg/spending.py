"""Rate limits and quotas of clients that hold across several routers.

Each limit is a token bucket with a name. A router reports the total amount that it has taken from
each bucket. Routers do not call each other: workers pass the totals of each router on to the others
(service/internal/registry.py). A router takes the increase of another router's totals from its own
buckets. A client of several routers therefore gets its rate only once, except for amounts that it
spends before the other routers are notified. The caller passes the current time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.messages.registry import RouterUse

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0
IDLE_SECONDS = 60.0  # a total that did not change for this long is removed and restarts at 0
FORGET_SECONDS = 30.0  # after which a silent router counts as new; must be less than IDLE_SECONDS
PRESENT_SECONDS = 5.0  # after which the streams of a silent router no longer count
CALLS_PER_SECOND = 20.0  # largest rate of exchanges at one router
SOONEST_SECONDS = 0.25  # shortest interval between exchanges with one worker


def retry_after(seconds: float) -> float:
    """Clamps a waiting time to a range that is reasonable for clients."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Bucket:
    """A token bucket. It starts full and refills by `rate` per second. Its level may become
    negative. Amounts may be taken before the first call of `wait_seconds`, which gives rate and
    size."""

    def __init__(self, now: float) -> None:
        self._taken = 0.0  # amount that is missing until the bucket is full
        self._at = now

    def wait_seconds(self, amount: float, rate: float, full: float, now: float) -> float:
        """Returns the seconds until `amount` is available, or until the bucket is full if `amount`
        exceeds its size.

        Returns:
            0 if the amount is available now. Other values are clamped (`retry_after`), because
                clients receive them as retry times.
        """
        self._taken, self._at = max(0.0, self._taken - (now - self._at) * rate), now
        missing = min(amount, full) - (full - self._taken)
        return retry_after(missing / rate) if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        """Takes an amount, or puts a negative one back."""
        self._taken = max(0.0, self._taken + amount)


@dataclass(slots=True)
class _OtherRouter:
    at: float
    heard_at: float
    spent: dict[str, float]
    streams: dict[str, int]


class Spending:
    """The token buckets of one router, its own totals, and the latest totals of other routers."""

    def __init__(self, router: int = 0) -> None:
        self._router = router
        self._buckets: dict[str, Bucket] = {}
        self._totals: dict[str, float] = {}
        self._changed: set[str] = set()
        self._changed_at: dict[str, float] = {}
        self._streams: Counter[str] = Counter()
        self._others: dict[int, _OtherRouter] = {}

    def wait_seconds(self, name: str, amount: float, rate: float, full: float, now: float) -> float:
        return self._bucket(name, now).wait_seconds(amount, rate, full, now)

    def take(self, name: str, amount: float) -> None:
        """Takes an amount from the bucket `name`, and adds it to this router's total. A negative
        amount is put back. Has no effect if `wait_seconds` was never called for the bucket."""
        if name in self._buckets:
            self._buckets[name].take(amount)
            self._totals[name] = self._totals.get(name, 0.0) + amount
            self._changed.add(name)

    def forget(self, name: str) -> None:
        self._buckets.pop(name, None)

    def begin(self, name: str) -> None:
        """Counts one more running stream of the client `name`, until `end` is called."""
        self._streams[name] += 1

    def end(self, name: str) -> None:
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]

    def streams(self, name: str, now: float) -> int:
        present = (other for other in self._others.values() if _age(other, now) < PRESENT_SECONDS)
        return self._streams[name] + sum(other.streams.get(name, 0) for other in present)

    def exchange(self, uses: Sequence[RouterUse], now: float, workers: int) -> RouterUse:
        """Receives totals of other routers, and returns the totals of this router.

        Args:
            uses: Totals of other routers. Totals older than those already received are ignored.
            workers: Number of workers that exchange totals with this router. The more workers, the
                longer the interval that each is asked to wait until its next exchange.
        """
        for router, other in list(self._others.items()):
            if _age(other, now) > FORGET_SECONDS:
                del self._others[router]
        for use in uses:
            self._hear(use, now)
        for name in self._changed:
            self._changed_at[name] = now
        self._changed.clear()
        for name, at in list(self._changed_at.items()):
            if now - at > IDLE_SECONDS:
                del self._changed_at[name], self._totals[name]
        again = max(SOONEST_SECONDS, workers / CALLS_PER_SECOND)
        totals, streams = tuple(self._totals.items()), tuple(self._streams.items())
        return RouterUse(self._router, now, totals, streams, again)

    def _hear(self, use: RouterUse, now: float) -> None:
        before = self._others.get(use.router)
        if use.router == self._router or (before is not None and use.at <= before.at):
            return
        spent = dict(use.spent)
        known = spent if before is None else before.spent
        for name, total in spent.items():
            if more := total - known.get(name, 0.0):
                self._bucket(name, now).take(more)
        self._others[use.router] = _OtherRouter(use.at, now, spent, dict(use.streams))

    def _bucket(self, name: str, now: float) -> Bucket:
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = Bucket(now)
        return found


def _age(other: _OtherRouter, now: float) -> float:
    return now - other.heard_at
