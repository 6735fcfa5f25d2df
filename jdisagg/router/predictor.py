"""Predicts the length of answers for reservations, placement and fairness.

`LearnedLengths` predicts a quantile of the recent lengths in the same class: the tenant and the
prompt's length, rounded to a power of two. If a class has too few samples, all answers of the
tenant are used. If these are too few, the answers of all tenants are used. `MaxTokens` predicts the
request's max_tokens, the upper bound of all predictions. An answer that max_tokens cut off counts
with the length at the cut. Each call costs O(log n). No clock is used."""

import bisect
from collections import deque
from collections.abc import Hashable
from typing import Protocol, TypeVar

from jdisagg.router.quantiles import of_sorted

Key = TypeVar("Key", bound=Hashable)

WINDOW = 256
FEWEST = 16
# Prediction while there are too few samples: max_tokens of clients is mostly far too high.
COLD_TOKENS = 512


class LengthPredictor(Protocol):
    """Predicts and records lengths of answers, in tokens."""

    def predict(self, tenant: str, prompt_tokens: int, most_tokens: int) -> int: ...

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Records the length of an answer that ended by itself or was cut off at max_tokens."""
        ...

    @property
    def typical_tokens(self) -> float:
        """Mean length of recent answers of all tenants, in tokens."""
        ...


class MaxTokens:
    """Predicts the request's max_tokens as the length of each answer. `typical_tokens` is learned
    from past answers."""

    def __init__(self) -> None:
        self._all = _Lengths()

    def predict(self, tenant: str, prompt_tokens: int, most_tokens: int) -> int:
        return most_tokens

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self._all.add(output_tokens)

    @property
    def typical_tokens(self) -> float:
        return self._all.mean


class LearnedLengths:
    """Predicts a quantile of the lengths of past answers.

    Args:
        quantile: Share of answers that should not exceed the prediction.
        classes: Cap on the number of stored classes. The least recently observed class is evicted.
    """

    def __init__(self, quantile: float = 0.75, classes: int = 4096) -> None:
        self._quantile = quantile
        self._most = classes
        self._all = _Lengths()
        self._tenants: dict[str, _Lengths] = {}
        self._classes: dict[tuple[str, int], _Lengths] = {}

    def predict(self, tenant: str, prompt_tokens: int, most_tokens: int) -> int:
        for lengths in (
            self._classes.get((tenant, prompt_tokens.bit_length())),
            self._tenants.get(tenant),
            self._all,
        ):
            if lengths is not None and len(lengths) >= FEWEST:
                return max(1, min(most_tokens, lengths.quantile(self._quantile)))
        return min(most_tokens, COLD_TOKENS)

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self._all.add(output_tokens)
        _kept(self._tenants, tenant, self._most).add(output_tokens)
        _kept(self._classes, (tenant, prompt_tokens.bit_length()), self._most).add(output_tokens)

    @property
    def typical_tokens(self) -> float:
        return self._all.mean


class _Lengths:
    """The last `WINDOW` lengths of answers, in order of arrival and sorted by size."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def mean(self) -> float:
        """Mean length of the answers, or an assumed length before the first answer."""
        return self._sum / len(self._latest) if self._latest else 256.0

    def add(self, length: int) -> None:
        self._latest.append(length)
        bisect.insort(self._sorted, length)
        self._sum += length
        if len(self._latest) > WINDOW:
            oldest = self._latest.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._sum -= oldest

    def quantile(self, part: float) -> int:
        return of_sorted(self._sorted, part)


def _kept(known: dict[Key, _Lengths], key: Key, most: int) -> _Lengths:
    """Returns the lengths stored under a key, and marks the key as most recently used. Evicts the
    oldest of more than `most` keys."""
    lengths = known[key] = known.pop(key, None) or _Lengths()
    if len(known) > most:
        del known[next(iter(known))]
    return lengths
