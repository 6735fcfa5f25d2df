"""How many tokens an answer will have: what reservations, placement and fairness count on before it
is known.

`LearnedLengths` keeps the lengths seen lately, per tenant and class of prompt (its length, by
powers of two), and answers with a quantile of them; where a class has been seen too seldom, the
tenant's, then everybody's. `MaxTokens` believes the client. A prediction is never above what the
client asked for. Answers that were cut at their limit count as so long: they were at least that.
O(log n) a call; no clock."""

import bisect
from collections import deque
from collections.abc import Hashable
from typing import Protocol, TypeVar

from jdisagg.router.quantiles import of_sorted

Key = TypeVar("Key", bound=Hashable)

WINDOW = 256
FEWEST = 16
# of an answer while too few have been seen; clients ask for far more than they use
COLD_TOKENS = 512


class LengthPredictor(Protocol):
    """`most_tokens`: what the answer may have at most."""

    def predict(self, tenant: str, prompt_tokens: int, most_tokens: int) -> int: ...

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer has ended by itself or at its limit."""
        ...

    @property
    def typical_tokens(self) -> float:
        """Mean length of answers lately, of all tenants."""
        ...


class MaxTokens:
    """The longest that was asked for. `typical_tokens` is still learned: nobody states it."""

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
    """The `quantile` of what was seen. At most `classes` classes are kept; the one that was not
    seen for longest makes room."""

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
    """The last `WINDOW` lengths, in order of arrival and of size."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def mean(self) -> float:
        """Of none yet: a usual length."""
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
        """The smallest length that at least this part of all do not exceed."""
        return of_sorted(self._sorted, part)


def _kept(known: dict[Key, _Lengths], key: Key, most: int) -> _Lengths:
    """The lengths under a key, which is now the latest of all."""
    lengths = known[key] = known.pop(key, None) or _Lengths()
    if len(known) > most:
        del known[next(iter(known))]
    return lengths
