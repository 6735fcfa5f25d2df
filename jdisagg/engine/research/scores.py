"""Log-probabilities of given tokens, as arrays with one entry per token."""

import math
from dataclasses import dataclass

import numpy as np

from jdisagg.prompt.logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of T given tokens, each predicted from all tokens before it (teacher
    forcing). They are natural logarithms of the model's distribution before bias, penalties,
    temperature and filters.

    Attributes:
        ranks: int32 [T], rank of each token by probability. The most likely token has rank 1.
        top_ids, top_logprobs: int32 and float32 [T, top], the most likely tokens at each position,
            most likely first. -inf if the vocabulary has fewer than `top` tokens.
        logits: float32 [T, V] if requested, else None.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    logits: np.ndarray | None = None

    @classmethod
    def of(
        cls, token_ids: tuple[int, ...], scores: PromptLogprobs, logits: np.ndarray | None
    ) -> "Scores":
        top = (len(token_ids), scores.top)
        return cls(
            token_ids,
            np.frombuffer(scores.logprobs, np.float32),
            np.frombuffer(scores.ranks, np.int32),
            np.frombuffer(scores.top_ids, np.int32).reshape(top),
            np.frombuffer(scores.top_logprobs, np.float32).reshape(top),
            logits,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def total(self) -> float:
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self))
