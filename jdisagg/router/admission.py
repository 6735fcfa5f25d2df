"""Whether a new request is let in: refused at once, with a reason and a hint when to try again,
where it would wait for nothing. Pure.

Four reasons: too many wait for their first token (`admit`), a tenant's quota is used up (`Quotas`),
the first token would come after its limit (`placement.decide`, with what it would wait in this
router from `Drain`), and no worker takes requests. Instants are arguments."""

import bisect
import math
from collections import deque
from collections.abc import Mapping

from jdisagg.errors import OverloadedError, QuotaExceededError
from jdisagg.router.quantiles import of_sorted
from jdisagg.token_bucket import MAX_RETRY_SECONDS, Bucket, retry_after

UNKNOWN_WAIT_SECONDS = 5.0  # of a full queue of which nothing has been served yet
DRAIN_SECONDS = 5.0  # over how long the speed of the queue is averaged
DRAIN_LEAST_SECONDS = 0.25  # what must have been seen of it
ERRORS = 64  # of predictions, the latest that count
ERRORS_LEAST = 16
ERRORS_SECONDS = 30.0  # and for how long
IN_TIME = 0.9  # of those that are let in


def admit(
    waiting_requests: int,
    max_waiting_requests: int,
    seconds_per_request: float | None,
    own_waiting: int | None = None,
    tenants: int = 1,
) -> None:
    """Raises OverloadedError when `max_waiting_requests` wait for their first token already.

    A tenant of which fewer wait (`own_waiting`) than its share among `tenants` is let in all the
    same, until twice the limit wait: it was others who filled the queue. Without that end tenants
    that come one after another, each to a smaller share, would fill it without bound.
    `seconds_per_request` is the recent mean time between two first tokens, None before the first:
    it makes the predicted wait."""
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
    """Until when after its arrival a request's first token must come: its deadline at the
    latest."""
    return deadline_seconds if ttft_slo_seconds is None else min(ttft_slo_seconds, deadline_seconds)


class Quotas:
    """Token buckets: a tenant may use `tokens_per_second`, of which `burst_seconds` at once. A
    request costs its prompt and its expected answer; one that costs more than a whole burst waits
    for a full bucket and leaves it in debt."""

    def __init__(self, tokens_per_second: Mapping[str, float], burst_seconds: float) -> None:
        self._rates = dict(tokens_per_second)
        self._burst_seconds = burst_seconds
        self._buckets: dict[str, Bucket] = {}

    def take(self, tenant: str, tokens: float, now: float) -> None:
        """Raises QuotaExceededError where the tenant has used its share up. Tenants without a quota
        are not bounded."""
        rate = self._rates.get(tenant)
        if rate is None:
            return
        full = rate * self._burst_seconds
        bucket = self._buckets.setdefault(tenant, Bucket(full, now))
        if wait_seconds := bucket.wait_seconds(tokens, rate, full, now):
            raise QuotaExceededError(
                f"tenant {tenant!r} has used up its {rate:g} tokens a second"
                f" (routing.tenant_quotas); {tokens:g} more are there in {wait_seconds:.1f} s: try"
                " again then",
                retry_after_seconds=wait_seconds,
            )
        bucket.take(tokens)

    def give_back(self, tenant: str, tokens: float) -> None:
        """They were taken for a request that was then refused."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.give_back(tokens, self._rates[tenant] * self._burst_seconds)


class Drain:
    """How fast the router's queue has drained lately, in cost a second: a mean that fades over
    `DRAIN_SECONDS` of waiting."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def busy(self, now: float) -> None:
        """Somebody waits from now on, or still."""
        self._fade(now)
        self._since = now

    def idle(self, now: float) -> None:
        """Nobody waits any more."""
        self._fade(now)
        self._since = None

    def served(self, cost: float, now: float) -> None:
        self._fade(now)
        self._cost += cost

    def seconds(self, cost: float) -> float:
        """To serve so much; 0 while nothing is known."""
        if not cost or self._seconds < DRAIN_LEAST_SECONDS:
            return 0.0
        return cost * self._seconds / self._cost if self._cost else MAX_RETRY_SECONDS

    def seconds_each(self) -> float | None:
        """To serve a cost of one; None while nothing is known."""
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
    """By how much first tokens come later than was predicted, lately: what a prediction leaves out
    (prompts of other dp ranks, a mesh that is slower than it should be) would let in requests that
    come too late, and with them all that wait for their limit."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, float]] = deque()
        self._ranked: list[float] = []  # their seconds

    def observe(self, seconds: float, now: float) -> None:
        """A first token came so much later than was predicted when its workers were chosen; sooner:
        negative."""
        if len(self._errors) == ERRORS:
            self._forget_oldest()
        self._errors.append((now, seconds))
        bisect.insort(self._ranked, seconds)

    def seconds(self, now: float, limit_seconds: float) -> float:
        """What to count on beyond a prediction, so that `IN_TIME` of all do come by then; 0 while
        little is known. Half the limit at most: who is refused shows nothing, and what made others
        late may be over."""
        while self._errors and self._errors[0][0] < now - ERRORS_SECONDS:
            self._forget_oldest()
        late = of_sorted(self._ranked, IN_TIME) if len(self._ranked) >= ERRORS_LEAST else 0.0
        return min(max(0.0, late), limit_seconds / 2)

    def _forget_oldest(self) -> None:
        _, seconds = self._errors.popleft()
        del self._ranked[bisect.bisect_left(self._ranked, seconds)]
