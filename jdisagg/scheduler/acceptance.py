"""Estimates how many drafts are accepted, from fading counts of verified drafts."""

from dataclasses import dataclass

PRIOR = 0.6  # acceptance of a draft before any was verified
PRIOR_TRIES = 2.0  # weight of the prior, in verified drafts
FADE = 0.95  # of a sequence's counts at each step, so that the estimate follows its text
OVERALL_FADE = 0.999  # of the counts of all sequences, at each verified prediction


@dataclass(slots=True)
class Acceptance:
    """Fading counts of verified drafts: `tries`, and `hits`, the accepted ones. A draft behind a
    rejected one was not tried."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: int, drafts: int, fade: float) -> None:
        self.hits = self.hits * fade + hits
        self.tries = self.tries * fade + min(hits + 1, drafts)

    def rest(self) -> None:
        """Fades the counts of a sequence that takes no drafts, so that it is tried again later."""
        self.hits, self.tries = self.hits * FADE, self.tries * FADE

    def estimate(self, prior: float = PRIOR) -> float:
        """Returns the probability that a draft is accepted if all before it are."""
        return (self.hits + prior * PRIOR_TRIES) / (self.tries + PRIOR_TRIES)
