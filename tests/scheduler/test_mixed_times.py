"""Predicted times of decode steps with a chunk."""

import pytest

from jdisagg.scheduler.turn import KEPT_STEPS, SAMPLES, MixedTimes


def times() -> MixedTimes:
    return MixedTimes((64, 128, 256), (1, 8, 32))


def test_nothing_but_the_smallest_chunk_is_predicted_before_a_measurement() -> None:
    made = times()
    assert made.alone(3) is None
    assert made.mixed(3) == ((64, 0.0),)
    made.took(3, 0, 0.010)
    assert made.alone(3) == made.alone(8) == 0.010
    assert made.alone(1) is None and made.alone(9) is None, "another batch size"
    assert made.mixed(3) == ((64, 0.0),)


def test_other_sizes_follow_from_what_the_chunk_adds_to_a_step() -> None:
    made = times()
    made.took(3, 0, 0.010)
    made.took(3, 64, 0.030)
    predicted = dict(made.mixed(3))
    assert predicted == pytest.approx({64: 0.030, 128: 0.050, 256: 0.090})
    made.took(3, 256, 0.070)
    assert dict(made.mixed(3)) == pytest.approx({64: 0.030, 128: 0.050, 256: 0.070})


def test_the_fastest_of_the_newest_counts_and_old_ones_do_not() -> None:
    made = times()
    for seconds in (0.001, *[0.010, 9.0] * SAMPLES):
        made.took(1, 0, seconds)
    assert made.alone(1) == 0.010
    for seconds in (5.0, 0.020, 0.030):  # a pause of the machine
        made.took(1, 64, seconds)
    assert dict(made.mixed(1))[64] == 0.020
    for _ in range(KEPT_STEPS + 1):
        made.took(40, 128, 0.040)
    assert made.alone(1) is None, "measured too long ago"
    assert made.mixed(1) == ((64, 0.0),), "so the smallest is tried again"


def test_more_sequences_than_the_largest_batch_are_the_largest_batch() -> None:
    made = times()
    made.took(32, 0, 0.030)
    assert made.alone(33) == 0.030
