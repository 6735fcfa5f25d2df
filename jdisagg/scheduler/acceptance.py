"""Estimates how many drafts would be accepted, from fading counts of predicted tokens that came or
did not come. A prediction is counted whether or not a step verified it."""

from dataclasses import dataclass

PRIOR = 0.6  # acceptance before any prediction was counted
PRIOR_TRIES = 2.0  # weight of the prior, in predicted tokens
FADE = 0.95  # of a sequence's counts at each prediction, so that the estimate follows its text
OVERALL_FADE = 0.99  # of the counts of all sequences


@dataclass(slots=True)
class Acceptance:
    """Fading counts of predicted tokens: `tries`, and `hits`, those that came. A token behind a
    wrong one is not counted."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: int, tries: int, fade: float = FADE) -> None:
        self.hits = self.hits * fade + hits
        self.tries = self.tries * fade + tries

    def estimate(self, prior: float = PRIOR) -> float:
        """Returns the probability that a predicted token comes if all before it did."""
        return (self.hits + prior * PRIOR_TRIES) / (self.tries + PRIOR_TRIES)
