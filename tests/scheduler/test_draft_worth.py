"""When steps have drafts: no mesh becomes slower than one that verifies none."""

from collections import deque
from dataclasses import dataclass

import pytest

from jdisagg.scheduler.draft_worth import (
    COLD,
    CREDIT_SHARE,
    LEAST_REST,
    LEAST_SAMPLES,
    MOST_CREDIT,
    PREDICTION_SHARE,
    REMEASURE,
    RESTS,
    SAMPLES,
    DraftWorth,
)


@dataclass
class Mesh:
    """A mesh on which a step without drafts takes one second, with two steps in flight.

    Attributes:
        cost: Seconds of a step with drafts.
        claimed: Drafts of a step that are expected to be accepted.
        real: Drafts of a step that are accepted.
    """

    cost: float
    claimed: float
    real: float

    def __post_init__(self) -> None:
        self.worth = DraftWorth()
        self.drafted: list[int] = []  # numbers of the steps with drafts
        self.seconds = self.tokens = 0.0
        self._flight: deque[bool] = deque()

    def run(self, steps: int) -> None:
        for number in range(steps):
            drafts = self.worth.pays(1 + self.claimed)
            self.drafted += [number] if drafts else []
            self.worth.earn(not drafts)
            self.tokens += 1 + self.real if drafts else 1
            self.seconds += self.cost if drafts else 1
            self._flight.append(drafts)
            if len(self._flight) > 1:
                had = self._flight.popleft()
                expected = self.claimed if had else None
                self.worth.took(self.cost if had else 1.0, expected, int(self.real), self.real)

    @property
    def trials(self) -> list[int]:
        """Numbers of the first steps of runs with drafts."""
        return [number for number in self.drafted if number - 1 not in self.drafted]


@pytest.mark.parametrize("cost", [1.02, 1.3, 1.9, 3.0])
@pytest.mark.parametrize(("claimed", "real"), [(0.2, 0), (1.5, 0), (1.5, 1), (3.0, 1), (3.0, 3)])
def test_no_mesh_is_slower_than_without_drafts_whatever_is_expected_of_them(
    cost: float, claimed: float, real: float
) -> None:
    mesh = Mesh(cost, claimed, real)
    mesh.run(5000)
    best = max(1.0, (1 + real) / cost)
    assert mesh.drafted, "they were tried"
    lost = mesh.seconds - mesh.tokens
    assert lost < MOST_CREDIT + (CREDIT_SHARE + 0.002) * 5000
    if best > 1.2 and claimed > 0:
        assert mesh.tokens / mesh.seconds > 0.9 * best


@pytest.mark.parametrize("cost", [1.3, 1.6, 2.5])
def test_drafts_that_lose_are_tried_again_when_steps_without_have_made_up_for_them(
    cost: float,
) -> None:
    mesh = Mesh(cost, 0.4, 0)
    mesh.run(8000)
    first, *later = mesh.trials
    assert LEAST_SAMPLES <= first < 2 * LEAST_SAMPLES
    assert len(later) >= 2 and len(mesh.drafted) <= 6 * len(mesh.trials)
    tries = (len(mesh.drafted) - COLD) / len(mesh.trials)  # the first ones are not charged
    for before, after in zip(mesh.trials, later, strict=False):
        assert after - before == pytest.approx((cost - 1) * tries / CREDIT_SHARE, rel=0.1)


def test_while_drafts_pay_a_step_without_is_measured_now_and_then() -> None:
    mesh = Mesh(1.2, 2, 2)
    mesh.run(4 * REMEASURE)
    without = 4 * REMEASURE - len(mesh.drafted)
    assert 3 <= len(mesh.trials) <= 5 and without < 20


def test_drafts_that_begin_to_lose_stop_and_come_back_when_they_pay_again() -> None:
    mesh = Mesh(1.2, 2, 2)
    mesh.run(200)
    assert 199 in mesh.drafted
    mesh.cost = 5.0
    mesh.drafted.clear()
    mesh.run(200)
    assert max(mesh.drafted) < 20
    mesh.cost = 1.2
    mesh.drafted.clear()
    mesh.run(3000)
    assert 2999 in mesh.drafted


@pytest.mark.parametrize("slow", [[0, 1], [5], [9, 30]])
def test_a_few_slow_steps_do_not_end_drafts_that_pay(slow: list[int]) -> None:
    """As when a program runs for the first time, or the machine is busy."""
    worth = DraftWorth()
    for _ in range(LEAST_SAMPLES):
        worth.took(1.0, None)
    for number in range(60):
        assert worth.pays(3.0), number
        worth.took(5e4 if number in slow else 1.2, 2.0, 2, 2.0)


def test_drafts_that_pay_come_back_soon_after_the_machine_was_busy() -> None:
    """Steps without drafts were last measured before, so the times cannot be compared."""
    mesh = Mesh(1.2, 7, 7)
    mesh.run(60)
    mesh.cost = 100.0
    mesh.run(SAMPLES)
    mesh.cost = 1.2
    mesh.drafted.clear()
    mesh.run(2 * LEAST_REST)
    assert 2 * LEAST_REST - 1 in mesh.drafted and 0 not in mesh.drafted


def test_without_an_expected_gain_nothing_is_tried() -> None:
    mesh = Mesh(1.0, 0.01, 0)
    mesh.run(1000)
    assert not mesh.drafted


@pytest.mark.parametrize(
    ("seconds", "predicting"), [(1e-3, 3e-4), (2e-2, 2.5e-3), (1e-4, 4e-5), (5e-2, 4e-5)]
)
def test_predictions_that_do_not_pay_take_a_small_part_of_the_time(
    seconds: float, predicting: float
) -> None:
    worth = DraftWorth()
    assert worth.rest(predicting) == 0
    for _ in range(LEAST_SAMPLES):
        worth.took(seconds, None)
    steps = worth.rest(predicting)
    assert RESTS[0] <= steps <= RESTS[1]
    share = predicting / ((steps + 1) * seconds)
    assert share < PREDICTION_SHARE + 1e-9
