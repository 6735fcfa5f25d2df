"""Fair order of the requests that wait at the router. Tenants are ordered by weighted virtual time,
and the requests of one tenant by urgency.

Between tenants: start-time fair queueing (Goyal et al., SIGCOMM'96) in which a request costs tokens
as in VTC (Sheng et al., OSDI'24): prompt + 2 x answer. A tenant's virtual time grows by cost /
weight with each request served. A tenant that was idle resumes at the queue's current virtual time,
so idleness earns no credit. The queue's virtual time grows by cost / sum of the weights of all
waiting tenants (as in Parekh and Gallager, 1993). It does not simply follow the virtual time of the
tenant served last: otherwise new tenants that arrive one after another would all be served before
tenants that already wait.

Within a tenant: requests are ordered by the time at which their first token is due.

If no worker has room for the first request of the queue (the head), a request of higher priority
may overtake it (`pressing`), because workers preempt sequences of lower priority for such a
request."""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdisagg.scheduler.priorities import head_start


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
    tenant. Tenants that are not listed have weight 1."""

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
