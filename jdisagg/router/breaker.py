"""Circuit breakers: a worker that fails repeatedly gets no requests for a while, and then one
attempt as a probe. If the probe succeeds, the worker gets requests again.

A breaker is CLOSED until `FAILURES` failures in a row. It is then OPEN for a time that doubles with
each opening up to a bound (`timeouts.Backoff`). Afterwards it is HALF OPEN: the next attempt is the
probe, and the worker gets no other attempt until the probe's outcome is known or the back-off time
has passed again. A success removes the breaker. Placement reads one number per worker: the time
until which it gets no requests. Pure: times are arguments."""

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
    """Circuit breaker of one worker."""

    backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker
    failures: int = 0
    barred_until: float = 0.0
    opened: int = 0  # number of times in a row that the breaker opened

    def state(self, now: float) -> BreakerState:
        if not self.opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.barred_until else BreakerState.HALF_OPEN

    def failed(self, now: float) -> None:
        """Counts a failure of the worker. Does nothing while the breaker is open: attempts that
        were running when it opened may still fail."""
        if self.state(now) is BreakerState.OPEN and self.failures >= FAILURES:
            return
        self.failures += 1
        if self.failures >= FAILURES:
            self._open(now)

    def placed(self, now: float) -> None:
        """Records that an attempt was placed on the worker. In the half-open state the attempt is
        the probe, so no other attempt is placed on the worker until its outcome is known."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self.failures = FAILURES - 1
            self.barred_until = now + self.backoff.seconds(self.opened)

    def _open(self, now: float) -> None:
        self.opened += 1
        self.barred_until = now + self.backoff.seconds(self.opened)
