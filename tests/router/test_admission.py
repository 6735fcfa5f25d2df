"""Quotas, the speed of the queue, breakers, and learned lengths: small pure parts of admission and
placement."""

import itertools
import random
from collections import Counter

import pytest

from jdisagg.config import RoutingConfig
from jdisagg.errors import ConfigError, OverloadedError
from jdisagg.messages.registry import RouterUse
from jdisagg.router.admission import (
    UNKNOWN_WAIT_SECONDS,
    Drain,
    Lateness,
    Quotas,
    admit,
    limit_seconds,
)
from jdisagg.router.candidates import FAILURES, Breaker
from jdisagg.router.predictor import COLD_TOKENS, FEWEST, MOST_ROUTERS, SHARED, LearnedLengths
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

BACKOFF = DEFAULT_TIMEOUTS.request.breaker


def test_a_quota_lets_its_rate_through_and_says_when_there_is_more() -> None:
    quotas = Quotas({"free": 100.0}, burst_seconds=2.0)
    quotas.take("free", 150, 0.0)
    with pytest.raises(OverloadedError, match="tenant 'free'.*100 tokens") as caught:
        quotas.take("free", 150, 0.0)
    assert caught.value.retry_after_seconds == pytest.approx(1.0)
    with pytest.raises(OverloadedError):
        quotas.take("free", 150, 0.99)
    quotas.take("free", 150, 1.0)
    quotas.take("other", 10**9, 1.0)


def test_what_was_taken_for_a_refused_request_is_given_back() -> None:
    quotas = Quotas({"t": 10.0}, burst_seconds=1.0)
    for _ in range(5):
        quotas.take("t", 10, 0.0)
        quotas.give_back("t", 10)
    quotas.take("t", 10, 0.0)


def test_over_a_long_time_a_quota_is_its_rate() -> None:
    quotas, draw, used = Quotas({"t": 50.0}, burst_seconds=4.0), random.Random(0), 0
    for step in range(20_000):
        tokens = draw.randrange(1, 30)
        try:
            quotas.take("t", tokens, step * 0.05)
        except OverloadedError:
            continue
        used += tokens
    assert used == pytest.approx(50.0 * 1000 + 200, rel=0.01)


def test_a_request_larger_than_a_whole_burst_waits_for_a_full_bucket() -> None:
    quotas = Quotas({"t": 10.0}, burst_seconds=1.0)
    quotas.take("t", 100, 0.0)
    with pytest.raises(OverloadedError):
        quotas.take("t", 1, 1.0)
    quotas.take("t", 1, 9.2)


def test_the_limit_of_a_first_token_is_the_objective_or_the_deadline() -> None:
    assert limit_seconds(None, 7.0) == 7.0 and limit_seconds(2.0, 7.0) == 2.0
    assert limit_seconds(9.0, 7.0) == 7.0


def test_the_queue_is_as_fast_as_it_was_lately_while_somebody_waited() -> None:
    drain = Drain()
    assert drain.seconds(1000.0) == 0.0 and drain.seconds_each() is None, "nothing is known"
    drain.busy(0.0)
    for step in range(1, 101):
        drain.served(50.0, step * 0.1)
    assert drain.seconds(1000.0) == pytest.approx(2.0, rel=0.05)
    drain.idle(10.0)
    drain.busy(1000.0)
    assert drain.seconds(1000.0) == pytest.approx(2.0, rel=0.05), "idle time says nothing about it"
    for step in range(1, 301):
        drain.served(5.0, 1000.0 + step * 0.1)
    assert drain.seconds(1000.0) == pytest.approx(20.0, rel=0.1)


def test_a_breaker_opens_after_failures_in_a_row_and_a_probe_heals_it() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.barred_until == 0.0
    breaker.failed(0.0)
    assert breaker.barred_until == BACKOFF.first_seconds
    breaker.failed(0.5)
    assert breaker.barred_until == BACKOFF.first_seconds, "what was under way says nothing new"
    breaker.placed(1.0)
    assert breaker.barred_until == 2.0, "one probe at a time"
    breaker.failed(1.2)
    assert breaker.barred_until == pytest.approx(1.2 + 2 * BACKOFF.first_seconds), "twice as long"


def test_a_breaker_tries_again_for_ever_and_not_too_seldom() -> None:
    breaker, now, waits = Breaker(), 0.0, []
    for _ in range(12):
        for _ in range(FAILURES):
            breaker.failed(now)
        waits.append(breaker.barred_until - now)
        now = breaker.barred_until
        breaker.placed(now)
    assert waits == sorted(waits) and waits[-1] == BACKOFF.most_seconds
    for _ in range(2000):  # a day of probes that fail
        now = breaker.barred_until
        breaker.placed(now)
        breaker.failed(now)
    assert breaker.barred_until == now + BACKOFF.most_seconds


def test_lengths_are_learned_by_tenant_and_class_of_prompt() -> None:
    predictor, draw = LearnedLengths(0.75), random.Random(0)
    assert predictor.predict("a", 100, 500) == 500
    assert predictor.predict("a", 100, 10**6) == COLD_TOKENS, "nothing was seen"
    seen = [draw.randrange(1, 400) for _ in range(200)]
    for length in seen:
        predictor.observe("a", 100, length)
        predictor.observe("a", 5000, 20)
    enough = min(
        length for length in seen if sum(other <= length for other in seen) >= 0.75 * len(seen)
    )
    assert predictor.predict("a", 100, 10**6) == enough
    assert predictor.predict("a", 120, 10**6) == enough, "the same power of two"
    assert predictor.predict("a", 5000, 10**6) == 20
    assert predictor.predict("a", 100, 30) == 30, "never more than was asked for"
    both = predictor.predict("a", 700, 10**6)
    assert 20 <= both <= 400, "the tenant's, where the class is new"


def test_of_lengths_whose_quantile_falls_on_one_of_them_it_is_that_one() -> None:
    predictor = LearnedLengths(0.75)
    for length in range(1, 257):
        predictor.observe("a", 100, length)
    assert predictor.predict("a", 100, 10**6) == 192, "192 of 256 are not longer"


def test_lengths_forget_what_is_long_past() -> None:
    predictor = LearnedLengths(0.5)
    for length in [1000] * 300 + [10] * 300:
        predictor.observe("t", 50, length)
    assert predictor.predict("t", 50, 10**6) == 10 and predictor.typical_tokens == 10


def test_a_thousand_tenants_do_not_grow_it_without_bound() -> None:
    predictor = LearnedLengths(0.5, classes=8)
    for tenant in range(1000):
        for _ in range(FEWEST):
            predictor.observe(str(tenant), 50, tenant)
    assert predictor.predict("999", 50, 10**6) == 999
    assert predictor.predict("0", 50, 10**6) != 0, "forgotten: it is like everybody's"


def test_routers_predict_from_the_answers_of_all_and_record_each_once_in_whatever_order() -> None:
    """The oracle is one predictor that observes all answers. The third router starts last."""
    draw, whole, reports = random.Random(0), LearnedLengths(0.5), list[RouterUse]()
    routers = [LearnedLengths(0.5) for _ in range(3)]
    for turn in range(60):
        for number, router in enumerate(routers[: 2 if turn < 40 else 3]):
            answer = draw.choice("ab"), draw.choice((50, 5000)), draw.randrange(1, 100)
            router.observe(*answer)
            whole.observe(*answer)
            late = reports[-9:]  # some of them its own
            reports.append(router.exchange(draw.sample(late, len(late)), RouterUse(number)))
    for number, router in enumerate(routers):
        router.exchange(reports[-3:], RouterUse(number))
        assert sorted(router._all._latest) == sorted(whole._all._latest)
        for tenant, prompt in itertools.product("ab", (50, 5000)):
            assert router.predict(tenant, prompt, 10**6) == whole.predict(tenant, prompt, 10**6)


def test_a_router_that_missed_many_answers_records_the_last_and_only_those() -> None:
    one, two = LearnedLengths(0.5), LearnedLengths(0.5)
    for length in range(1, 1 + 10 * SHARED):
        one.observe("t", 50, length)
    report = one.exchange((), RouterUse(1))
    assert (report.answered, len(report.answers)) == (10 * SHARED, SHARED)
    for _ in range(2):
        assert two.exchange((report,), RouterUse(2)).answers == (), "it does not pass them on"
    assert list(two._all._latest) == [*range(9 * SHARED + 1, 10 * SHARED + 1)]
    for restarted in range(3, 3 + 2 * MOST_ROUTERS):
        two.exchange((RouterUse(restarted, answered=1, answers=(("t", 50, 7),)),), RouterUse(2))
    assert len(two._counts) == MOST_ROUTERS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tenant_weights": "gold"}, "gold"),
        ({"tenant_weights": "gold=much"}, "gold=much"),
        ({"tenant_quotas": "free=0"}, "free"),
        ({"local_gain": 1.0}, "local_gain"),
        ({"ttft_slo_seconds": -1.0}, "ttft_slo_seconds"),
    ],
)
def test_wrong_routing_settings_are_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RoutingConfig(**wrong)  # type: ignore[arg-type]
    assert RoutingConfig(tenant_weights="gold=4, free=0.5").weights() == {"gold": 4.0, "free": 0.5}


@pytest.mark.parametrize("limit", [1, 8, 100])
def test_at_most_twice_the_limit_wait_however_many_tenants_come_one_after_another(
    limit: int,
) -> None:
    waiting: Counter[str] = Counter()
    for number in range(5 * limit):
        tenant = f"t{number}"
        with pytest.raises(OverloadedError, match=f"the limit is {limit}"):
            while True:
                admit(waiting.total(), limit, 0.1, waiting[tenant], len({*waiting, tenant}))
                waiting[tenant] += 1
    assert limit <= waiting.total() <= 2 * limit
    with pytest.raises(OverloadedError) as fresh:
        admit(limit, limit, None)
    assert fresh.value.retry_after_seconds == UNKNOWN_WAIT_SECONDS, "nothing was served yet"


def test_what_came_late_lately_is_counted_on_and_never_bars_the_way_for_good() -> None:
    lateness = Lateness()
    for number in range(15):
        lateness.observe(0.2, float(number) / 10)
    assert lateness.seconds(2.0, 1.0) == 0.0, "too few to say"
    for number in range(20):
        lateness.observe(-0.1 if number % 2 else 0.3, 2.0)
    assert lateness.seconds(3.0, 1.0) == pytest.approx(0.3), "nine of ten come no later"
    assert lateness.seconds(3.0, 0.4) == pytest.approx(0.2), (
        "half the limit: some get in and show whether it is over"
    )
    assert lateness.seconds(40.0, 1.0) == 0.0, "long ago"
    early = Lateness()
    for _ in range(20):
        early.observe(-0.5, 0.0)
    assert early.seconds(1.0, 1.0) == 0.0, "nothing is promised that is not predicted"
