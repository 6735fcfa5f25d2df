"""Admission: refuses new requests that would probably miss their time limit, with a reason and a
retry-after, and orders those that wait (`FairQueue`). Does no I/O; times are arguments.

There are four reasons for a refusal: too many requests wait for their first token (`admit`), a
tenant's quota is used up (`Quotas`), the first token would miss its time limit (`placement.decide`,
which adds the wait in this router's queue that `Drain` predicts), and no worker takes requests."""

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdisagg.errors import OverloadedError, QuotaExceededError
from jdisagg.router.predictor import of_sorted
from jdisagg.scheduler.sequences import head_start
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


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue. `due` is the time at which its first token is due. `cost` is its cost
    in tokens."""

    key: int
    tenant: str
    due: float
    cost: float
    priority: int = 0

    @property
    def urgency(self) -> tuple[float, int]:
        """Sort key within a tenant. Requests with smaller keys are served sooner."""
        return self.due - head_start(self.priority), self.key


@dataclass(slots=True)
class _Tenant:
    passed: float
    cost: float = 0.0
    count: int = 0
    waiting: list[tuple[tuple[float, int], Ticket]] = field(default_factory=list)


class FairQueue:
    """Queue that serves tenants in proportion to their weights. `weights` has the weight of each
    tenant. Tenants that are not listed have weight 1.

    Between tenants: start-time fair queueing (Goyal et al., SIGCOMM'96) in which a request costs
    tokens as in VTC (Sheng et al., OSDI'24): prompt + 2 x answer. A tenant's virtual time grows by
    cost / weight with each request served. A tenant that was idle resumes at the queue's current
    virtual time, so idleness earns no credit. The queue's virtual time grows by cost / sum of the
    weights of all waiting tenants (as in Parekh and Gallager, 1993). It does not simply follow the
    virtual time of the tenant served last: otherwise new tenants that arrive one after another
    would all be served before tenants that already wait.

    Within a tenant: requests are ordered by the time at which their first token is due.

    If no worker has room for the first request of the queue (the head), a request of higher
    priority may overtake it (`pressing`), because workers preempt sequences of lower priority for
    such a request."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        # Among equals, the tenant that arrived first is served first.
        self._order: list[tuple[float, int, str]] = []
        self._turns = 0
        self._tickets: dict[int, Ticket] = {}
        self._priorities: Counter[int] = Counter()
        self._passed = 0.0
        self._ends: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            tenant = _Tenant(max(self._passed, self._ends.pop(ticket.tenant, 0.0)))
            self._tenants[ticket.tenant] = tenant
            heapq.heappush(self._order, self._turn(ticket.tenant, tenant))
        heapq.heappush(tenant.waiting, (ticket.urgency, ticket))
        tenant.cost += ticket.cost
        tenant.count += 1
        self._tickets[ticket.key] = ticket
        self._priorities[ticket.priority] += 1

    def overtakes(self, priority: int) -> bool:
        return all(other < priority for other in self._priorities)

    def pressing(self) -> Ticket | None:
        """Returns the most urgent request whose priority is higher than the priority of the queue's
        head. Returns None if there is no such request."""
        head = self.head()
        if head is None or max(self._priorities) <= head.priority:
            return None
        higher = [one for one in self._tickets.values() if one.priority > head.priority]
        return min(higher, key=lambda one: one.urgency)

    def head(self) -> Ticket | None:
        while self._order:
            name = self._order[0][-1]
            tenant = self._tenants.get(name)
            while (
                tenant is not None
                and tenant.waiting
                and tenant.waiting[0][1].key not in self._tickets
            ):
                heapq.heappop(tenant.waiting)
            if tenant is not None and tenant.waiting:
                return tenant.waiting[0][1]
            heapq.heappop(self._order)
            if tenant is not None:
                self._idle(name, tenant)
        return None

    def first(self, most: int) -> list[Ticket]:
        waiting = {
            name: sorted(
                (urgency, ticket.key)
                for urgency, ticket in tenant.waiting
                if ticket.key in self._tickets
            )
            for name, tenant in self._tenants.items()
        }
        passed = {name: tenant.passed for name, tenant in self._tenants.items()}
        turns = {name: turn for _, turn, name in self._order}
        order: list[Ticket] = []
        while len(order) < most and (left := [name for name in waiting if waiting[name]]):
            name = min(left, key=lambda name: (passed[name], turns.get(name, 0)))
            ticket = self._tickets[waiting[name].pop(0)[1]]
            passed[name] += ticket.cost / self._weight(name)
            order.append(ticket)
        return order

    def serve(self, ticket: Ticket | None = None) -> Ticket:
        """Removes a request, by default the head, and charges its cost to its tenant."""
        head = self.head()
        assert head is not None, "nobody waits"
        ticket = ticket or head
        tenant = self._tenants[ticket.tenant]
        weights = sum(self._weight(name) for name, other in self._tenants.items() if other.count)
        self._drop(ticket, tenant)
        self._passed = max(self._passed, tenant.passed) + ticket.cost / weights
        tenant.passed += ticket.cost / self._weight(ticket.tenant)
        if ticket.tenant == head.tenant:
            heapq.heappop(self._order)
        else:
            self._order = [turn for turn in self._order if turn[-1] != ticket.tenant]
            heapq.heapify(self._order)
        heapq.heappush(self._order, self._turn(ticket.tenant, tenant))
        self.head()  # removes tenants without waiting requests
        return ticket

    def remove(self, key: int) -> None:
        """Removes a request without charging its tenant. Idempotent."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._drop(ticket, self._tenants[ticket.tenant])

    def ahead(self, tenant: str, cost: float, due: float, priority: int = 0) -> float:
        """Returns the total cost of the requests that would be served before a request that arrives
        now, provided that no further request arrives."""
        mine = self._tenants.get(tenant)
        passed = mine.passed if mine else max(self._passed, self._ends.get(tenant, 0.0))
        urgency = Ticket(1 << 62, tenant, due, cost, priority).urgency
        before = (
            sum(
                ticket.cost
                for _, ticket in mine.waiting
                if ticket.key in self._tickets and ticket.urgency < urgency
            )
            if mine
            else 0.0
        )
        begins = passed + before / self._weight(tenant)
        others = 0.0
        for name, other in self._tenants.items():
            if name != tenant and other.count and other.passed <= begins:
                mean = other.cost / other.count
                # A request is served as a whole, so at least one counts.
                others += mean * min(
                    other.count, 1 + (begins - other.passed) * self._weight(name) // mean
                )
        return before + others

    def _turn(self, name: str, tenant: _Tenant) -> tuple[float, int, str]:
        self._turns += 1
        return tenant.passed, self._turns, name

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _drop(self, ticket: Ticket, tenant: _Tenant) -> None:
        del self._tickets[ticket.key]
        self._priorities[ticket.priority] -= 1
        if not self._priorities[ticket.priority]:
            del self._priorities[ticket.priority]
        tenant.cost -= ticket.cost
        tenant.count -= 1

    def _idle(self, name: str, tenant: _Tenant) -> None:
        del self._tenants[name]
        self._ends = (
            {other: end for other, end in self._ends.items() if end > self._passed}
            if len(self._ends) > 1024
            else self._ends
        )
        if tenant.passed > self._passed:
            self._ends[name] = tenant.passed
