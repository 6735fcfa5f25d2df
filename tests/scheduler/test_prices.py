"""Prices of restores against known costs."""

import random

import pytest

from jdisagg.scheduler.prices import PROBE, Prices


def measured(fixed: float, each: float, noise: float = 0.0) -> Prices:
    draw, prices = random.Random(1), Prices()
    for _ in range(60):
        tokens = 128 * draw.randint(1, 100)
        took = fixed + each * tokens
        prices.moved_in(tokens, took * (1 + noise * draw.uniform(-1, 1)))
        prices.computed_in(tokens, 1e-4 * tokens)
    return prices


@pytest.mark.parametrize(("fixed", "each"), [(0.3, 1e-5), (0.0, 2e-5), (0.5, 0.0)])
def test_what_any_fetch_costs_and_what_a_token_costs_are_told_apart(
    fixed: float, each: float
) -> None:
    prices = measured(fixed, each)
    for tokens in (128, 2048, 50_000):
        assert prices.seconds(tokens) == pytest.approx(fixed + each * tokens, rel=1e-6)


def test_short_beginnings_are_computed_and_long_ones_fetched() -> None:
    prices = measured(0.3, 1e-5, noise=0.2)  # even at some 3,300 tokens
    assert not prices.worth(1024, 1024) and prices.worth(8192, 8192)
    assert prices.worth(1024, 1024 + 8192), "it would wait meanwhile anyway"
    assert prices.patience_seconds(2048) == pytest.approx(2048e-4)


def test_what_nobody_has_measured_is_tried_and_what_seemed_too_dear_now_and_then() -> None:
    prices = Prices()
    assert prices.worth(128, 128) and prices.patience_seconds(128) is None
    assert not prices.worth(0, 128)
    prices = measured(10.0, 1e-3)
    assert sum([prices.worth(4096, 4096) for _ in range(4 * PROBE)]) == 4


def test_fetches_of_one_length_say_nothing_of_longer_ones_which_are_tried() -> None:
    prices = Prices()
    for _ in range(5):
        prices.moved_in(512, 0.3)
    prices.computed_in(1000, 0.1)
    assert prices.seconds(512) == prices.seconds(20_480) == pytest.approx(0.3)
    assert not prices.worth(512, 512) and prices.worth(20_480, 20_480)


def test_seconds_are_never_negative() -> None:
    prices = Prices()
    for tokens, seconds in ((1000, 0.01), (2000, 1.0), (1000, 0.02)):
        prices.moved_in(tokens, seconds)
    for tokens in (1, 500, 3000):
        seconds = prices.seconds(tokens)
        assert seconds is not None and seconds > 0


def test_nothing_is_compared_where_it_is_always_fetched() -> None:
    prices = Prices(always=True)
    prices.computed_in(1000, 1e-9)
    prices.moved_in(1000, 1e9)
    assert prices.worth(1, 1) and prices.patience_seconds(1) is None


def test_savings_of_sources_compare_by_seconds_and_by_tokens_where_nothing_is_measured() -> None:
    fast, slow = measured(0.0, 1e-5), measured(0.0, 5e-5)
    assert fast.saving(1024, 1024) == pytest.approx(1024 * 9e-5)
    assert slow.saving(2048, 2048) > fast.saving(1024, 1024) > slow.saving(1024, 1024)
    unmeasured = Prices()
    assert unmeasured.saving(1024, 1024) == 1024
    unmeasured.computed_in(10, 1e-3)
    assert unmeasured.saving(1024, 1024) == pytest.approx(1024e-4), "a restore counts as free"


def test_restores_that_became_cheaper_are_chosen_again() -> None:
    prices = measured(10.0, 1e-3)
    for _ in range(60):
        prices.moved_in(1024, 0.01)
    assert all(prices.worth(1024, 1024) for _ in range(10))
    prices.moved_in(0, 1e9)
    assert prices.worth(1024, 1024), "a restore of no token says nothing"
