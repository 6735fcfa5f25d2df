"""Admission: refuses new requests that would probably miss their time limit, with a reason and a
retry-after. Does no I/O; times are arguments.

There are four reasons for a refusal: too many requests wait for their first token (`admit`), a
tenant's quota is used up (`Quotas`), the first token would miss its time limit (`placement.decide`,
which adds the wait in this router's queue that `Drain` predicts), and no worker takes requests."""

import bisect
import math
from collections import deque
from collections.abc import Mapping

from jdisagg.errors import OverloadedError, QuotaExceededError
from jdisagg.router.predictor import of_sorted
from jdisagg.spending import MAX_RETRY_SECONDS, Spending, retry_after

UNKNOWN_WAIT_SECONDS = 5.0  # retry-after if the queue is full and no request was served yet
DRAIN_SECONDS = 5.0  # time constant of the mean of the queue's speed
DRAIN_LEAST_SECONDS = 0.25  # waiting time to observe before the speed is used
ERRORS = 64  # number of latest prediction errors that are used
ERRORS_LEAST = 16
ERRORS_SECONDS = 30.0  # age after which an error no longer counts
IN_TIME = 0.9  # share of admitted requests that should meet their limit


def admit(
    waiting_requests: int,
    max_waiting_requests: int,
    seconds_per_request: float | None,
    own_waiting: int | None = None,
    tenants: int = 1,
    lower_waiting: int = 0,
) -> None:
    """Refuses a request if too many requests already wait for their first token.

    Args:
        seconds_per_request: Recent mean time between the first tokens of two successive requests,
            which determines the retry-after. None while it is unknown.
        own_waiting: Number of waiting requests of this tenant. If it is below the tenant's equal
            share among `tenants`, the request is admitted until twice `max_waiting_requests` wait,
            because other tenants filled the queue. Twice the limit is never exceeded, even if many
            tenants arrive one after another.
        lower_waiting: Number of waiting requests of lower priority. They are counted only against
            twice the limit.

    Raises:
        OverloadedError: `max_waiting_requests` requests wait.
    """
    within_share = own_waiting is not None and own_waiting < max_waiting_requests // tenants
    before = waiting_requests - (0 if within_share else lower_waiting)
    most = (2 if within_share else 1) * max_waiting_requests
    if before < most and waiting_requests < 2 * max_waiting_requests:
        return
    known = seconds_per_request is not None
    wait_seconds = retry_after(
        waiting_requests * seconds_per_request if known else UNKNOWN_WAIT_SECONDS
    )
    raise OverloadedError(
        f"{waiting_requests} requests wait for their first token, the limit is"
        f" {max_waiting_requests}; about {wait_seconds:.1f} s to wait: try again then",
        retry_after_seconds=wait_seconds,
    )


def limit_seconds(ttft_slo_seconds: float | None, deadline_seconds: float) -> float:
    """Returns the time limit of a request's first token, in seconds after the request's arrival. It
    is the TTFT objective, or the deadline if that is earlier."""
    return deadline_seconds if ttft_slo_seconds is None else min(ttft_slo_seconds, deadline_seconds)


class Quotas:
    """Token buckets, one per tenant. A request takes as many tokens as its prompt and its expected
    answer have. If this is more than a full bucket has, the request needs a full bucket and leaves
    the bucket negative.

    Args:
        tokens_per_second: Rate of each tenant, in tokens per second. Tenants that are not listed
            have no limit.
    """

    def __init__(
        self,
        tokens_per_second: Mapping[str, float],
        burst_seconds: float,
        spending: Spending | None = None,
    ) -> None:
        self._rates = dict(tokens_per_second)
        self._burst_seconds = burst_seconds
        self._spending = spending or Spending()

    def take(self, tenant: str, tokens: float, now: float) -> None:
        """Takes tokens from a tenant's bucket. Raises QuotaExceededError if the bucket has too few
        tokens."""
        rate = self._rates.get(tenant)
        if rate is None:
            return
        name, full = _bucket_of(tenant), rate * self._burst_seconds
        if wait_seconds := self._spending.wait_seconds(name, tokens, rate, full, now):
            raise QuotaExceededError(
                f"tenant {tenant!r} has used up its {rate:g} tokens per second"
                f" (routing.tenant_quotas); {tokens:g} more are available in {wait_seconds:.1f} s:"
                " try again then",
                retry_after_seconds=wait_seconds,
            )
        self._spending.take(name, tokens)

    def give_back(self, tenant: str, tokens: float) -> None:
        self._spending.take(_bucket_of(tenant), -tokens)


def _bucket_of(tenant: str) -> str:
    return f"tenant {tenant}"


class Drain:
    """Measures the recent speed at which the router's queue is served, in cost (tokens) per second.
    The speed is an exponential moving average over `DRAIN_SECONDS`. Only periods in which requests
    waited are measured."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def busy(self, now: float) -> None:
        self._fade(now)
        self._since = now

    def idle(self, now: float) -> None:
        self._fade(now)
        self._since = None

    def served(self, cost: float, now: float) -> None:
        self._fade(now)
        self._cost += cost

    def seconds(self, cost: float) -> float:
        if not cost or self._seconds < DRAIN_LEAST_SECONDS:
            return 0.0
        return cost * self._seconds / self._cost if self._cost else MAX_RETRY_SECONDS

    def seconds_each(self) -> float | None:
        known = self._cost and self._seconds >= DRAIN_LEAST_SECONDS
        return self._seconds / self._cost if known else None

    def _fade(self, now: float) -> None:
        if self._since is not None:
            passed = now - self._since
            keep = math.exp(-passed / DRAIN_SECONDS)
            self._cost, self._seconds, self._since = (
                self._cost * keep,
                self._seconds * keep + passed,
                now,
            )


class Lateness:
    """Recent errors of predicted times to first token, by which later predictions are corrected.
    Without the correction, the router would admit requests that miss their time limit."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, float]] = deque()
        self._ranked: list[float] = []  # the errors in seconds, ascending

    def observe(self, seconds: float, now: float) -> None:
        """Records measured minus predicted seconds to a first token. The value is negative if the
        token was early."""
        if len(self._errors) == ERRORS:
            self._forget_oldest()
        self._errors.append((now, seconds))
        bisect.insort(self._ranked, seconds)

    def seconds(self, now: float, limit_seconds: float) -> float:
        """Returns the seconds to add to a predicted TTFT. With this addition, the fraction
        `IN_TIME` of the recent first tokens would have arrived within the prediction. Returns 0
        while few errors are recorded. Returns at most half of `limit_seconds`: refused requests
        give no measurements, so a delay that is over could otherwise cause refusals forever."""
        while self._errors and self._errors[0][0] < now - ERRORS_SECONDS:
            self._forget_oldest()
        late = of_sorted(self._ranked, IN_TIME) if len(self._ranked) >= ERRORS_LEAST else 0.0
        return min(max(0.0, late), limit_seconds / 2)

    def _forget_oldest(self) -> None:
        _, seconds = self._errors.popleft()
        del self._ranked[bisect.bisect_left(self._ranked, seconds)]
