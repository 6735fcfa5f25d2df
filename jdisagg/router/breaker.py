"""Circuit breakers: a worker that fails repeatedly gets no requests for a while, and then one
attempt as a probe. If the probe succeeds, the worker gets requests again.

A breaker is CLOSED until `most_failures` failures in a row. It is then OPEN for a time that doubles
with each opening up to a bound (`timeouts.Backoff`). Afterwards it is HALF OPEN: the next attempt
is the probe. The worker gets no other attempt until the probe's outcome is known or the back-off
time has passed again. A success removes the breaker. Does no I/O; times are arguments."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, Backoff

FAILURES = 3


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(slots=True)
class Breaker:
    backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker
    failures: int = 0
    barred_until: float = 0.0
    opened: int = 0  # number of times in a row that the breaker opened
    most_failures: int = FAILURES  # failures in a row that open the breaker

    def state(self, now: float) -> BreakerState:
        if not self.opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.barred_until else BreakerState.HALF_OPEN

    def failed(self, now: float) -> None:
        """Counts a failure of the worker. Does nothing while the breaker is open, because these are
        failures of attempts that were already running when it opened."""
        if self.state(now) is BreakerState.OPEN and self.failures >= self.most_failures:
            return
        self.failures += 1
        if self.failures >= self.most_failures:
            self._open(now)

    def placed(self, now: float) -> None:
        """Records that an attempt was placed on the worker. In the half-open state the attempt is
        the probe, so no other attempt is placed on the worker until its outcome is known."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self.failures = self.most_failures - 1
            self.barred_until = now + self.backoff.seconds(self.opened)

    def _open(self, now: float) -> None:
        self.opened += 1
        self.barred_until = now + self.backoff.seconds(self.opened)


class PairBreakers:
    """Circuit breakers of pairs (prefill worker, decode worker), for transfers of KV. One failed
    transfer opens a breaker, because the decode worker has already tried each block of the transfer
    several times. A pair's breaker is removed when one of its workers registers again."""

    def __init__(self, backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker) -> None:
        self._backoff = backoff
        self._breakers: dict[tuple[str, str], tuple[tuple[int, int], Breaker]] = {}

    def failed(self, pair: tuple[str, str], lives: tuple[int, int], now: float) -> None:
        """Counts a failed transfer. `lives` has the registration numbers of the two workers."""
        known, breaker = self._breakers.get(pair, (lives, None))
        if breaker is None or known != lives:
            breaker = Breaker(self._backoff, most_failures=1)
            self._breakers[pair] = lives, breaker
        breaker.failed(now)

    def succeeded(self, pair: tuple[str, str]) -> None:
        self._breakers.pop(pair, None)

    def placed(self, pair: tuple[str, str], now: float) -> None:
        if pair in self._breakers:
            self._breakers[pair][1].placed(now)

    def broken(self, life: Callable[[str], int], now: float) -> frozenset[tuple[str, str]]:
        """Returns the pairs that should get no request now. `life` is a function that returns the
        number of a worker's present registration."""
        if not self._breakers:
            return frozenset()
        self._breakers = {
            pair: (lives, breaker)
            for pair, (lives, breaker) in self._breakers.items()
            if lives == (life(pair[0]), life(pair[1]))
        }
        return frozenset(
            pair for pair, (_, breaker) in self._breakers.items() if now < breaker.barred_until
        )
