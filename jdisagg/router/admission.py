"""Admission: refuses new requests that would wait in vain, with a reason and a retry-after. Pure.

There are four reasons: too many requests wait for their first token (`admit`), a tenant's quota is
used up (`Quotas`), the first token would miss its limit (`placement.decide`, including the wait in
this router from `Drain`), and no worker takes requests. Times are arguments."""

import bisect
import math
from collections import deque
from collections.abc import Mapping

from jdisagg.errors import OverloadedError, QuotaExceededError
from jdisagg.router.quantiles import of_sorted
from jdisagg.token_bucket import MAX_RETRY_SECONDS, Bucket, retry_after

UNKNOWN_WAIT_SECONDS = 5.0  # retry-after of a full queue from which no request was served yet
DRAIN_SECONDS = 5.0  # time constant of the mean of the queue's speed
DRAIN_LEAST_SECONDS = 0.25  # waiting time to observe before the speed is used
ERRORS = 64  # latest prediction errors that count
ERRORS_LEAST = 16
ERRORS_SECONDS = 30.0  # age after which an error no longer counts
IN_TIME = 0.9  # share of admitted requests that should meet their limit


def admit(
    waiting_requests: int,
    max_waiting_requests: int,
    seconds_per_request: float | None,
    own_waiting: int | None = None,
    tenants: int = 1,
) -> None:
    """Refuses a request if too many requests already wait for their first token.

    Args:
        seconds_per_request: Recent mean time between two first tokens, which determines the
            retry-after. None before the first.
        own_waiting: Waiting requests of this tenant. Below its share among `tenants` a tenant is
            admitted until twice the limit wait, because others filled the queue. The bound of twice
            the limit also holds for many tenants that arrive one after another.

    Raises:
        OverloadedError: `max_waiting_requests` requests wait.
    """
    within_share = own_waiting is not None and own_waiting < max_waiting_requests // tenants
    if waiting_requests < (2 if within_share else 1) * max_waiting_requests:
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
    """Returns the seconds from arrival to the latest first token, at most the deadline."""
    return deadline_seconds if ttft_slo_seconds is None else min(ttft_slo_seconds, deadline_seconds)


class Quotas:
    """Token buckets by tenant. A request costs its prompt and its expected answer. A request that
    costs more than a whole burst needs a full bucket and leaves it negative.

    Args:
        tokens_per_second: Rate of each tenant. Tenants that are not listed have no limit.
        burst_seconds: Seconds of the rate that may be used at once.
    """

    def __init__(self, tokens_per_second: Mapping[str, float], burst_seconds: float) -> None:
        self._rates = dict(tokens_per_second)
        self._burst_seconds = burst_seconds
        self._buckets: dict[str, Bucket] = {}

    def take(self, tenant: str, tokens: float, now: float) -> None:
        """Takes tokens from the tenant's bucket. Raises QuotaExceededError if it holds too few."""
        rate = self._rates.get(tenant)
        if rate is None:
            return
        full = rate * self._burst_seconds
        bucket = self._buckets.setdefault(tenant, Bucket(full, now))
        if wait_seconds := bucket.wait_seconds(tokens, rate, full, now):
            raise QuotaExceededError(
                f"tenant {tenant!r} has used up its {rate:g} tokens a second"
                f" (routing.tenant_quotas); {tokens:g} more are available in {wait_seconds:.1f} s:"
                " try again then",
                retry_after_seconds=wait_seconds,
            )
        bucket.take(tokens)

    def give_back(self, tenant: str, tokens: float) -> None:
        """Puts the tokens of a refused request back into the tenant's bucket."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.give_back(tokens, self._rates[tenant] * self._burst_seconds)


class Drain:
    """Recent speed at which the router's queue is served, in cost per second: an exponential mean
    over `DRAIN_SECONDS` of the time in which requests waited."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def busy(self, now: float) -> None:
        """Records that requests wait at time `now`."""
        self._fade(now)
        self._since = now

    def idle(self, now: float) -> None:
        """Records that no request waits any more."""
        self._fade(now)
        self._since = None

    def served(self, cost: float, now: float) -> None:
        self._fade(now)
        self._cost += cost

    def seconds(self, cost: float) -> float:
        """Returns the seconds to serve `cost`, or 0 while the speed is unknown."""
        if not cost or self._seconds < DRAIN_LEAST_SECONDS:
            return 0.0
        return cost * self._seconds / self._cost if self._cost else MAX_RETRY_SECONDS

    def seconds_each(self) -> float | None:
        """Returns the seconds to serve a cost of 1, or None while the speed is unknown."""
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
    """Recent errors of predicted times to first token. Predictions omit some delays (prompts of
    other dp ranks, a slow mesh). Without a correction, requests would be admitted that miss their
    limit."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, float]] = deque()
        self._ranked: list[float] = []  # the errors in seconds, ascending

    def observe(self, seconds: float, now: float) -> None:
        """Records measured minus predicted seconds to a first token (negative if early)."""
        if len(self._errors) == ERRORS:
            self._forget_oldest()
        self._errors.append((now, seconds))
        bisect.insort(self._ranked, seconds)

    def seconds(self, now: float, limit_seconds: float) -> float:
        """Returns the seconds to add to a prediction so that a share `IN_TIME` of the requests
        comes in time, or 0 with few errors. Returns at most half of the limit, because refused
        requests give no measurement and the delay may be over."""
        while self._errors and self._errors[0][0] < now - ERRORS_SECONDS:
            self._forget_oldest()
        late = of_sorted(self._ranked, IN_TIME) if len(self._ranked) >= ERRORS_LEAST else 0.0
        return min(max(0.0, late), limit_seconds / 2)

    def _forget_oldest(self) -> None:
        _, seconds = self._errors.popleft()
        del self._ranked[bisect.bisect_left(self._ranked, seconds)]
