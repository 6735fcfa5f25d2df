"""Weighted fair queueing: shares, no starvation, urgency within a tenant, and the prediction of
what is ahead."""

import random
from collections import Counter

import pytest

from jdisagg.router.admission import FairQueue, Ticket
from jdisagg.scheduler.sequences import MOST_PRIORITY, PRIORITY_SECONDS


def fill(queue: FairQueue, tenant: str, count: int, cost: float = 100.0, first: int = 0) -> None:
    for number in range(count):
        queue.add(Ticket(first + number, tenant, float(number), cost))


def served(queue: FairQueue, count: int) -> list[Ticket]:
    return [queue.serve() for _ in range(count)]


def test_tenants_that_always_wait_are_served_by_their_weights() -> None:
    queue = FairQueue({"gold": 3.0})
    fill(queue, "gold", 1000)
    fill(queue, "free", 1000, first=10_000)
    shares = Counter(ticket.tenant for ticket in served(queue, 400))
    assert shares == {"gold": 300, "free": 100}


def test_shares_are_of_cost_and_not_of_requests() -> None:
    queue = FairQueue()
    fill(queue, "long", 400, cost=900.0)
    fill(queue, "short", 4000, cost=100.0, first=10_000)
    cost = Counter()
    for ticket in served(queue, 1000):
        cost[ticket.tenant] += int(ticket.cost)
    assert abs(cost["long"] - cost["short"]) <= 900


def test_a_newcomer_waits_for_no_flood() -> None:
    """At most what each other tenant has at its head comes first, however much waits."""
    queue = FairQueue()
    fill(queue, "flood", 5000)
    served(queue, 100)
    queue.add(Ticket(99_999, "small", 0.0, 100.0))
    assert "small" in [ticket.tenant for ticket in served(queue, 2)]


def test_idleness_saves_nothing_up() -> None:
    queue = FairQueue()
    fill(queue, "busy", 500)
    served(queue, 200)
    fill(queue, "idle", 500, first=10_000)
    assert Counter(ticket.tenant for ticket in served(queue, 100)) == {"busy": 50, "idle": 50}


def test_leaving_for_a_moment_gains_nothing() -> None:
    """A tenant whose queue runs empty between its requests gets its share, not more."""
    queue, counts, key = FairQueue(), Counter(blinking=0), 0
    fill(queue, "steady", 5000, first=100_000)
    for _ in range(400):
        if counts["blinking"] == key:  # none of it waits
            queue.add(Ticket(key, "blinking", 0.0, 100.0))
            key += 1
        counts[queue.serve().tenant] += 1
    assert abs(counts["blinking"] - 200) <= 1


def test_newcomers_without_end_do_not_starve_who_was_served_before() -> None:
    """Each of twenty that wait is there for the first time, always: a share is a twenty-first."""
    queue = FairQueue()
    fill(queue, "known", 1)
    queue.serve()
    fill(queue, "known", 100, first=1_000_000)
    for key in range(20):
        queue.add(Ticket(key, f"first {key}", 0.0, 100.0))
    served_known = 0
    for key in range(20, 1000):
        if queue.serve().tenant == "known":
            served_known += 1
        else:
            queue.add(Ticket(key, f"first {key}", 0.0, 100.0))
    assert served_known == pytest.approx(980 / 21, abs=3)


def test_within_a_tenant_the_most_urgent_goes_first_and_priority_is_worth_seconds() -> None:
    queue = FairQueue()
    queue.add(Ticket(1, "t", due=10.0, cost=1.0))
    queue.add(Ticket(2, "t", due=4.0, cost=1.0))
    queue.add(Ticket(3, "t", due=9.0 + 2 * PRIORITY_SECONDS, cost=1.0, priority=2))
    assert [ticket.key for ticket in served(queue, 3)] == [2, 3, 1]


def test_the_highest_priority_does_not_starve_the_lowest() -> None:
    queue, now = FairQueue(), 0.0
    queue.add(Ticket(0, "t", due=0.0, cost=1.0, priority=-(10**9)))
    for number in range(1, 1000):
        now = number * 1.0
        queue.add(Ticket(number, "t", due=now, cost=1.0, priority=10**9))
        if queue.serve().key == 0:
            break
    assert now == 2 * MOST_PRIORITY * PRIORITY_SECONDS, "the earlier one of two alike"


def test_what_is_removed_is_not_served_nor_charged() -> None:
    queue = FairQueue()
    fill(queue, "a", 10)
    fill(queue, "b", 10, first=100)
    for key in range(5):
        queue.remove(key)
        queue.remove(key)
    assert len(queue) == 15
    assert Counter(ticket.tenant for ticket in served(queue, 10)) == {"a": 5, "b": 5}
    assert queue.head() is not None
    assert len(served(queue, 5)) == 5
    assert queue.head() is None
    assert not len(queue)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ahead_is_what_is_then_served_before(seed: int) -> None:
    draw = random.Random(seed)
    queue = FairQueue({"a": 2.0, "b": 0.5})
    for key in range(60):
        queue.add(
            Ticket(
                key,
                draw.choice("abcd"),
                draw.random() * 20,
                float(draw.randrange(1, 9)),
                draw.randrange(-2, 3),
            )
        )
        if draw.random() < 0.3:
            queue.serve()
        if draw.random() < 0.1:
            queue.remove(draw.randrange(key + 1))
    tenant = draw.choice("abcde")
    cost = 5.0
    due = draw.random() * 20
    priority = draw.randrange(-2, 3)
    predicted = queue.ahead(tenant, cost, due, priority)
    queue.add(Ticket(1000, tenant, due, cost, priority))
    before = 0.0
    while (ticket := queue.serve()).key != 1000:
        before += ticket.cost
    assert before == pytest.approx(predicted, abs=9 * 5), "up to a request of each tenant"


def test_of_many_tenants_whole_requests_are_ahead() -> None:
    """Forty that begin at one instant, each with more than a newcomer asks for; who came first goes
    first, by whatever name."""
    queue = FairQueue()
    for number in range(40):
        queue.add(Ticket(number, f"{number}", 0.0, 10.0 * number + 1))
    served(queue, 40)
    for number in range(40):
        queue.add(Ticket(100 + number, f"{number}", 0.0, 1000.0))
    predicted = queue.ahead("!", 10.0, 0.0)
    queue.add(Ticket(1000, "!", 0.0, 10.0))
    before = 0.0
    while (ticket := queue.serve()).key != 1000:
        before += ticket.cost
    assert before == predicted == 40_000
