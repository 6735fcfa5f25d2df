"""Corrections of predicted times: outcomes of a way move its predictions, and nothing else."""

import random

import pytest

from jdisagg.router.predictor import FEW, FORGOTTEN, NO_CORRECTIONS, LearnedCorrections, PromptWay


def corrected(correction: tuple[float, float], seconds: float) -> float:
    return correction[0] + correction[1] * seconds


def test_nothing_is_corrected_before_the_first_outcome() -> None:
    assert LearnedCorrections().current is NO_CORRECTIONS


def test_one_outcome_changes_the_constant_only() -> None:
    learned = LearnedCorrections()
    learned.observe(PromptWay.PREFILL, 0.010, 0.015)
    constant, factor = learned.current.prefill
    assert factor == pytest.approx(1.0) and constant == pytest.approx(0.005)


def test_an_outcome_below_its_prediction_changes_the_factor_only() -> None:
    learned = LearnedCorrections()
    for _ in range(8):
        learned.observe(PromptWay.PREFILL, 0.020, 0.010)
    constant, factor = learned.current.prefill
    assert constant == 0 and factor == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("constant", "factor"), [(0.008, 1.0), (0.004, 1.6), (0.002, 0.6)])
def test_constant_and_factor_are_found_among_noise(constant: float, factor: float) -> None:
    learned, draw = LearnedCorrections(), random.Random(3)
    for _ in range(40):
        predicted = draw.choice((0.005, 0.02, 0.08))
        noise = draw.choice((0.95, 1.0, 1.0, 1.0, 1.05, 3.0 if draw.random() < 0.3 else 1.0))
        learned.observe(PromptWay.APPEND, predicted, noise * (constant + factor * predicted))
    for predicted in (0.005, 0.02, 0.08):
        wanted = constant + factor * predicted
        assert corrected(learned.current.append, predicted) == pytest.approx(wanted, rel=0.2)


def test_a_way_with_few_outcomes_has_the_correction_of_a_way_with_more() -> None:
    learned = LearnedCorrections()
    for _ in range(FEW):
        learned.observe(PromptWay.APPEND, 0.010, 0.030)
    for _ in range(FEW - 1):
        learned.observe(PromptWay.PREFILL, 0.010, 0.012)
        assert learned.current.prefill == learned.current.fetch == learned.current.append
    learned.observe(PromptWay.PREFILL, 0.010, 0.012)
    assert learned.current.fetch == learned.current.prefill != learned.current.append


def test_while_no_way_has_enough_outcomes_one_correction_fits_them_all() -> None:
    learned = LearnedCorrections()
    learned.observe(PromptWay.PREFILL, 0.010, 0.014)
    learned.observe(PromptWay.APPEND, 0.010, 0.016)
    now = learned.current
    assert now.prefill == now.append == now.fetch
    assert corrected(now.append, 0.010) == pytest.approx(0.015, rel=0.05)


def test_outcomes_of_a_way_that_was_long_not_taken_no_longer_count() -> None:
    learned = LearnedCorrections()
    for _ in range(FEW):
        learned.observe(PromptWay.FETCH, 0.010, 0.500)
    for _ in range(FORGOTTEN - 1):
        learned.observe(PromptWay.PREFILL, 0.010, 0.012)
    assert corrected(learned.current.fetch, 0.010) == pytest.approx(0.5, rel=0.01)
    learned.observe(PromptWay.PREFILL, 0.010, 0.012)
    assert learned.current.fetch == learned.current.prefill
