"""Circuit breakers: a worker that fails repeatedly gets no requests for a while, then one attempt
as a probe, then all again if the probe succeeds.

CLOSED until `FAILURES` failures in a row, then OPEN for a time that doubles up to a bound
(`timeouts.Backoff`), then HALF OPEN: the next attempt is the probe, and the worker gets nothing
else for the same time until the outcome is known. A success removes the breaker. Pure: times are
arguments. Placement reads one number per worker, the time until which it is barred."""

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
    """State of one worker."""

    backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker
    failures: int = 0
    barred_until: float = 0.0
    opened: int = 0  # times in a row

    def state(self, now: float) -> BreakerState:
        if not self.opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.barred_until else BreakerState.HALF_OPEN

    def failed(self, now: float) -> None:
        """Counts a failure of the worker. Attempts that were running when it opened do not count
        again."""
        if self.state(now) is BreakerState.OPEN and self.failures >= FAILURES:
            return
        self.failures += 1
        if self.failures >= FAILURES:
            self._open(now)

    def placed(self, now: float) -> None:
        """An attempt was placed there. In the half-open state it is the probe, and no others are
        placed until its outcome is known."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self.failures = FAILURES - 1
            self.barred_until = now + self.backoff.seconds(self.opened)

    def _open(self, now: float) -> None:
        self.opened += 1
        self.barred_until = now + self.backoff.seconds(self.opened)
