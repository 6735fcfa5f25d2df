"""Estimates the probability that a draft token is accepted. Each prediction is compared with the
tokens that the model then generated, even if no decode step verified the prediction. The counts
decay, so that recent predictions weigh more."""

from dataclasses import dataclass

PRIOR = 0.6  # acceptance rate before any prediction was counted
PRIOR_TRIES = 2.0  # weight of the prior, in predicted tokens
FADE = 0.95  # decay of a sequence's counts at each prediction, so that the estimate adapts
OVERALL_FADE = 0.99  # decay of the counts over all sequences


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of predicted tokens: `tries` counts all of them, `hits` the correct ones.
    Tokens after the first wrong token of a prediction are not counted."""

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
