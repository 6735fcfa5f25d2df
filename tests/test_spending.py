"""Quotas over several routers: a client of all of them gets its rate once. The oracle is counting
over simulated time."""

import contextlib
import random

import pytest

from jdisagg.dispatch.caller import Caller, KeyLimits
from jdisagg.dispatch.client_limits import BURST_SECONDS, KeyUse
from jdisagg.errors import QuotaExceededError
from jdisagg.messages.registry import RouterUse
from jdisagg.router.admission import Quotas
from jdisagg.spending import FORGET_SECONDS, IDLE_SECONDS, PRESENT_SECONDS, Spending

RATE, SECONDS = 3.0, 600.0


def passed_on(routers: list[Spending], uses: list[RouterUse], now: float, workers: int = 2) -> None:
    """A worker's round: it gives each router the latest uses of the others."""
    for at, router in enumerate(routers):
        others = tuple(use for other, use in enumerate(uses) if other != at)
        uses[at] = router.exchange(others, now, workers)


def let_in(routers: list[Spending], pause: float, draw: random.Random) -> int:
    """Counts the requests of one client that sends far too many, each to a router at random."""
    uses, count, next_round = [router.exchange((), 0.0, 2) for router in routers], 0, 0.0
    clients = [KeyUse(router) for router in routers]
    who, now = Caller(key="k", limits=KeyLimits(requests_per_second=RATE)), 0.0
    while now < SECONDS:
        now += draw.expovariate(6 * RATE)
        while next_round < now:
            passed_on(routers, uses, next_round)
            next_round += pause
        with contextlib.suppress(QuotaExceededError), draw.choice(clients).stream(who, 1, now):
            count += 1
    return count


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_client_of_several_routers_gets_its_rate_once(count: int) -> None:
    routers = [Spending(number + 1) for number in range(count)]
    assert let_in(routers, 0.25, random.Random(0)) == pytest.approx(
        RATE * (SECONDS + BURST_SECONDS), rel=0.01
    )


def test_a_tenant_spends_from_one_quota_and_a_refused_request_gives_back_at_all_routers() -> None:
    routers = [Spending(1), Spending(2)]
    uses = [router.exchange((), 0.0, 2) for router in routers]
    passed_on(routers, uses, 0.1)
    one, two = (Quotas({"t": 10.0}, 10.0, router) for router in routers)
    one.take("t", 60.0, 1.0)
    two.take("t", 40.0, 1.0)
    for now in (1.0, 1.1):
        passed_on(routers, uses, now)
    for quotas in (one, two):
        with pytest.raises(QuotaExceededError) as caught:
            quotas.take("t", 10.0, 1.1)
        assert caught.value.retry_after_seconds == pytest.approx(0.9)
    one.give_back("t", 60.0)
    for now in (1.2, 1.3):
        passed_on(routers, uses, now)
    two.take("t", 60.0, 1.3)


def test_streams_count_at_all_routers_until_their_router_is_gone() -> None:
    routers = [Spending(1), Spending(2)]
    uses = [router.exchange((), 0.0, 2) for router in routers]
    who, here, there = Caller(key="k", limits=KeyLimits(streams=1)), *map(KeyUse, routers)
    with here.stream(who, 1, 0.0):
        for now in (0.1, 0.2):
            passed_on(routers, uses, now)
        with pytest.raises(QuotaExceededError, match="1 running streams and may have at most 1"):
            there.stream(who, 1, 0.3).__enter__()
        with there.stream(who, 1, 0.2 + PRESENT_SECONDS):
            pass


def test_a_total_is_taken_once_however_often_and_in_whatever_order_it_comes() -> None:
    one, two = Spending(1), Spending(2)
    two.exchange((one.exchange((), 0.0, 1),), 0.0, 1)
    reports = []
    for now in (1.0, 2.0, 3.0):
        assert one.wait_seconds("limit", 10.0, 0.001, 100.0, now) == 0.0
        one.take("limit", 10.0)
        reports.append(one.exchange((), now, 1))
    for report in (reports[0], reports[2], reports[1], reports[2], reports[0]):
        two.exchange((report,), 3.0, 1)
    assert two.wait_seconds("limit", 70.0, 0.001, 100.0, 3.0) == 0.0
    assert two.wait_seconds("limit", 71.0, 0.001, 100.0, 3.0) > 0.0


def test_totals_that_rest_are_left_out_and_a_router_that_starts_takes_none_of_the_past() -> None:
    assert FORGET_SECONDS < IDLE_SECONDS, "a router that missed the reset of a total forgets it"
    one, two = Spending(1), Spending(2)
    one.wait_seconds("limit", 90.0, 1.0, 100.0, 0.0)
    one.take("limit", 90.0)
    two.exchange((one.exchange((), 0.0, 1),), 0.0, 1)
    assert two.wait_seconds("limit", 100.0, 1.0, 100.0, 0.0) == 0.0
    assert one.exchange((), IDLE_SECONDS, 1).spent == (("limit", 90.0),)
    assert one.exchange((), IDLE_SECONDS + 1, 1).spent == ()


def test_many_workers_share_the_exchanges() -> None:
    router = Spending(1)
    assert [router.exchange((), 0.0, count).again_seconds for count in (0, 4, 50)] == [
        0.25,
        0.25,
        2.5,
    ]
