"""Who goes next when requests wait at the router: tenants by weighted virtual time, each tenant's
own by urgency. A pure queue.

Between tenants: start-time fair queueing (Goyal et al., SIGCOMM'96) over the tokens of a request,
as VTC counts them (Sheng et al., OSDI'24: prompt + 2 x answer). A tenant's virtual time grows by
cost / weight with each request served; the one that is least far is served next; who was idle
begins at the present virtual time, so that idleness saves nothing up. The present goes on with all
that is served, by cost / the weights of all that wait (as in Parekh and Gallager, 1993) and not, as
there, by who is served alone: tenants that come one after another, each for the first time, would
else all begin at one instant, before everybody who was served since. A tenant with requests waiting
is therefore served after at most the others' head requests and their share: nobody starves,
whatever the others send.

Within a tenant: by the instant by which the first token is wanted, moved forward by
`PRIORITY_SECONDS` for each step of priority (at most `MOST_PRIORITY` steps): an old request of low
priority comes before young ones of high priority in the end."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

PRIORITY_SECONDS = 5.0
MOST_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. `due`: when its first token is wanted; `cost` in tokens."""

    key: int
    tenant: str
    due: float
    cost: float
    priority: int = 0

    @property
    def urgency(self) -> tuple[float, int]:
        """Smaller is sooner."""
        steps = max(-MOST_PRIORITY, min(MOST_PRIORITY, self.priority))
        return self.due - PRIORITY_SECONDS * steps, self.key


@dataclass(slots=True)
class _Tenant:
    """`passed`: its virtual time. `cost`: of all that waits, `count` requests."""

    passed: float
    cost: float = 0.0
    count: int = 0
    waiting: list[tuple[tuple[float, int], Ticket]] = field(default_factory=list)


class FairQueue:
    """`weights` by tenant; 1 where none is given."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        # of equals who came first, whatever they are called
        self._order: list[tuple[float, int, str]] = []
        self._turns = 0
        self._tickets: dict[int, Ticket] = {}
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

    def head(self) -> Ticket | None:
        """Who is next; stays until it is removed or served."""
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

    def serve(self) -> Ticket:
        """Takes the head off, and counts it to its tenant."""
        ticket = self.head()
        assert ticket is not None, "nobody waits"
        tenant = self._tenants[ticket.tenant]
        weights = sum(self._weight(name) for name, other in self._tenants.items() if other.count)
        heapq.heappop(tenant.waiting)
        self._drop(ticket, tenant)
        self._passed = max(self._passed, tenant.passed) + ticket.cost / weights
        tenant.passed += ticket.cost / self._weight(ticket.tenant)
        heapq.heapreplace(self._order, self._turn(ticket.tenant, tenant))
        self.head()  # forgets a tenant that nobody waits of
        return ticket

    def remove(self, key: int) -> None:
        """It was refused, or waits no more: nobody is charged. Idempotent."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._drop(ticket, self._tenants[ticket.tenant])

    def ahead(self, tenant: str, cost: float, due: float, priority: int = 0) -> float:
        """Cost that would be served before a request that came now, if nobody else came."""
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
                # whole requests
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
        tenant.cost -= ticket.cost
        tenant.count -= 1

    def _idle(self, name: str, tenant: _Tenant) -> None:
        """Nobody waits of this tenant; how far it is, is kept while that is ahead of the others."""
        del self._tenants[name]
        self._ends = (
            {other: end for other, end in self._ends.items() if end > self._passed}
            if len(self._ends) > 1024
            else self._ends
        )
        if tenant.passed > self._passed:
            self._ends[name] = tenant.passed
