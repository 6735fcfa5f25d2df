"""Decides from measured times whether decode steps of one batch size and variant have drafts.

A mesh that verifies drafts must not be slower than one without drafts. So drafts begin only after
steps without drafts were measured, and at first only for a trial of a few steps. The time that
drafts may lose is limited by a credit. Without credit no step has drafts, so wrong expectations
cost little.

When the credit is full, drafts are tried again."""

import statistics
from collections import deque
from dataclasses import dataclass, field

LEAST_GAIN = 1.05  # required tokens per second with drafts, relative to steps without
SAMPLES = 9  # measured step times, whose median is used
LEAST_SAMPLES = 3
# Number of first steps with drafts that are not measured. The first runs a new program, and the
# next one is issued while the first runs.
COLD = 2
# Number of steps with drafts after which a step without drafts is measured again.
REMEASURE = 512
# Largest time that drafts may lose, at first and in later trials, in units of a step without
# drafts.
MOST_CREDIT = 8.0
# Largest charge for a step with drafts, in units of a step without drafts. A step with drafts has
# up to 8 rows for a sequence. If it takes longer, other work on the machine is the cause.
MOST_COST = 8.0
LEAST_REST = 64  # least number of steps without drafts between two trials
CREDIT_SHARE = 0.002  # share of the time of steps without drafts that is added to the credit
PREDICTION_SHARE = 0.003  # largest share of time for predictions while they do not pay
RESTS = (8, 256)  # fewest and most steps between predictions while they do not pay
_FADE = 0.95  # decay of expected and accepted drafts at each step
_PRIOR = 4.0  # weight of the prior that drafts are accepted as expected, in drafts
PRIOR = 0.6  # acceptance rate before any prediction was counted
PRIOR_TRIES = 2.0  # weight of the prior, in predicted tokens
FADE = 0.95  # decay of a sequence's counts at each prediction, so that the estimate adapts
OVERALL_FADE = 0.99  # decay of the counts over all sequences


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of predicted tokens: `tries` counts all of them, `hits` those that the model
    then generated, even if no decode step verified them. Tokens after the first wrong token of a
    prediction are not counted."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: int, tries: int, fade: float = FADE) -> None:
        self.hits = self.hits * fade + hits
        self.tries = self.tries * fade + tries

    def estimate(self, prior: float = PRIOR) -> float:
        """Returns the probability that a predicted token is correct, provided that all earlier
        tokens of the prediction are correct. `prior` is the estimate before any prediction was
        counted."""
        return (self.hits + prior * PRIOR_TRIES) / (self.tries + PRIOR_TRIES)


@dataclass(slots=True)
class DraftWorth:
    """Measured times of steps without and with drafts, and the tokens that drafts saved.

    Attributes:
        credit: Time that drafts may lose, in units of a step without drafts.
        cold: Number of further steps with drafts that are not measured, because their program is
            new.
        uncharged: For each step with drafts that is not charged to the credit yet, the number of
            steps that its accepted drafts saved.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    since_plain: int = 0
    rested: int = 0
    credit: float = MOST_CREDIT
    expected: float = 0.0
    accepted: float = 0.0
    cold: int = COLD
    uncharged: list[float] = field(default_factory=list[float])

    def took(
        self, seconds: float, expected: float | None, accepted: int = 0, saved: float = 0.0
    ) -> None:
        """Records a step.

        Args:
            expected: Expected number of accepted drafts. None means a step without drafts.
        """
        if expected is None:
            self.plain.append(seconds)
            self.since_plain = 0
            return
        self.since_plain, self.rested = self.since_plain + 1, 0
        if self.cold:
            self.cold -= 1
            return
        self.drafted.append(seconds)
        self.uncharged.append(saved)
        self.expected = self.expected * _FADE + expected
        self.accepted = self.accepted * _FADE + accepted
        if len(self.drafted) < LEAST_SAMPLES or not self.plain:
            return
        if plain := statistics.median(self.plain):
            cost = min(statistics.median(self.drafted) / plain, MOST_COST)
            self._add_credit(sum(1 + saved - cost for saved in self.uncharged))
        self.uncharged.clear()

    def earn(self, steps: int) -> None:
        self.rested += steps
        self._add_credit(CREDIT_SHARE * steps)

    def _add_credit(self, steps: float) -> None:
        self.credit = max(-MOST_CREDIT, min(self.credit + steps, MOST_CREDIT))

    @property
    def due(self) -> bool:
        rested = self.rested >= LEAST_REST and self.credit >= MOST_CREDIT
        return rested and len(self.drafted) >= LEAST_SAMPLES

    def rest(self, predicting: float) -> int:
        """Returns for how many steps predictions pause after a prediction that did not pay.
        `predicting` is the host's time for one step's predictions, in seconds. Returns 0 until
        steps without drafts are measured."""
        if len(self.plain) < LEAST_SAMPLES:
            return 0
        seconds = statistics.median(self.plain)
        if not seconds:
            return RESTS[0]
        steps = predicting / (PREDICTION_SHARE * seconds)
        return max(RESTS[0], min(int(steps), RESTS[1]))

    def pays(self, gain: float) -> bool:
        if gain <= LEAST_GAIN or len(self.plain) < LEAST_SAMPLES or self.credit <= 0:
            return False
        if len(self.drafted) < LEAST_SAMPLES:
            return True
        if self.since_plain >= REMEASURE:
            return False
        came = (self.accepted + _PRIOR) / (self.expected + _PRIOR)
        plain, drafted = statistics.median(self.plain), statistics.median(self.drafted)
        if (1 + (gain - 1) * came) * plain > LEAST_GAIN * drafted:
            return True
        if self.due:
            self.drafted.clear()
            self.expected = self.accepted = 0.0
            return True
        return False
