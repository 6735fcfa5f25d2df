"""Breakers: a worker that fails again and again gets nothing for a while, then one attempt as a
probe, then all again when that goes well.

CLOSED until `FAILURES` failures in a row; then OPEN for a while that doubles each time up to a
bound (`timeouts.Backoff`); then HALF OPEN: the next attempt is the probe, and until it is known how
it fares nothing else comes for the same while. After a success it is forgotten. Pure: instants are
arguments; what placement sees of it is one number a worker, the instant until which it is barred.
"""

import enum
from dataclasses import dataclass

from jdisagg.timeouts import DEFAULT_TIMEOUTS, Backoff

FAILURES = 3


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(slots=True)
class Breaker:
    """Of one worker. `barred_until` is for placement."""

    backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker
    failures: int = 0
    barred_until: float = 0.0
    opened: int = 0  # times in a row

    def state(self, now: float) -> BreakerState:
        if not self.opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.barred_until else BreakerState.HALF_OPEN

    def failed(self, now: float) -> None:
        """An attempt failed by the worker's fault. One that was under way when it opened says
        nothing new."""
        if self.state(now) is BreakerState.OPEN and self.failures >= FAILURES:
            return
        self.failures += 1
        if self.failures >= FAILURES:
            self._open(now)

    def placed(self, now: float) -> None:
        """An attempt goes there. In the half-open state it is the probe: others wait for its
        news."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self.failures = FAILURES - 1
            self.barred_until = now + self.backoff.seconds(self.opened)

    def _open(self, now: float) -> None:
        self.opened += 1
        self.barred_until = now + self.backoff.seconds(self.opened)
