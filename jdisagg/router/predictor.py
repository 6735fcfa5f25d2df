"""Predicts the length of answers for reservations, placement and fairness.

`LearnedLengths` predicts a quantile of the recent lengths in the same class. A class is the tenant
and the prompt's length, rounded to a power of two. If a class has too few samples, all answers of
the tenant are used. If these are too few, the answers of all tenants are used. The request's
max_tokens is the upper bound of all predictions. Does no I/O."""

import bisect
import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TypeVar

import msgspec

from jdisagg.messages.registry import AnswerLength, RouterUse

Value = TypeVar("Value", int, float)


def quantile(values: Sequence[float], at: float) -> float:
    """Returns the smallest of the values such that at least the fraction `at` of all values is less
    than or equal to it. Returns 0 if there are no values."""
    return of_sorted(sorted(values), at) if values else 0.0


def of_sorted(ascending: Sequence[Value], at: float) -> Value:
    """Returns `quantile` of a non-empty ascending sequence."""
    return ascending[max(0, math.ceil(at * len(ascending)) - 1)]


Key = TypeVar("Key", bound=Hashable)

WINDOW = 256
FEWEST = 16
# Prediction while there are too few samples. The max_tokens of clients is mostly far too high for
# this.
COLD_TOKENS = 512
SHARED = 64  # largest number of answers in a report to other routers; older ones are left out
MOST_ROUTERS = 64  # routers whose counts are stored; after a restart a router counts as another one


class LearnedLengths:
    """Predicts a quantile of the lengths of past answers, and shares these lengths with other
    routers through the workers, as `Spending` shares amounts spent. Each router reports its last
    answers and their total number. A router records new answers of other routers without passing
    them on.

    Args:
        quantile: Share of answers that should not exceed the prediction.
        classes: Largest number of stored classes. The least recently observed class is evicted.
    """

    def __init__(self, quantile: float = 0.75, classes: int = 4096) -> None:
        self._quantile = quantile
        self._most = classes
        self._all = _Lengths()
        self._tenants: dict[str, _Lengths] = {}
        self._classes: dict[tuple[str, int], _Lengths] = {}
        self._own: deque[AnswerLength] = deque(maxlen=SHARED)
        self._count = 0
        self._counts: dict[int, int] = {}  # answers counted by each other router, the latest last

    def predict(self, tenant: str, prompt_tokens: int, most_tokens: int) -> int:
        """Predicts the number of tokens of an answer, which is at most `most_tokens`."""
        for lengths in (
            self._classes.get((tenant, prompt_tokens.bit_length())),
            self._tenants.get(tenant),
            self._all,
        ):
            if lengths is not None and len(lengths) >= FEWEST:
                return max(1, min(most_tokens, lengths.quantile(self._quantile)))
        return min(most_tokens, COLD_TOKENS)

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        answer = tenant, prompt_tokens, output_tokens
        self._own.append(answer)
        self._count += 1
        self._record(*answer)

    def exchange(self, uses: Sequence[RouterUse], own: RouterUse) -> RouterUse:
        """Records the answers of other routers. Returns `own` with this router's last answers."""
        for use in uses:
            more = use.answered - self._counts.pop(use.router, 0)
            self._counts[use.router] = use.answered - min(0, more)
            for answer in use.answers[-more:] if more > 0 and use.router != own.router else ():
                self._record(*answer)
        while len(self._counts) > MOST_ROUTERS:
            del self._counts[next(iter(self._counts))]
        return msgspec.structs.replace(own, answered=self._count, answers=tuple(self._own))

    @property
    def typical_tokens(self) -> float:
        return self._all.mean

    def _record(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self._all.add(output_tokens)
        _kept(self._tenants, tenant, self._most).add(output_tokens)
        _kept(self._classes, (tenant, prompt_tokens.bit_length()), self._most).add(output_tokens)


class _Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def mean(self) -> float:
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
    lengths = known[key] = known.pop(key, None) or _Lengths()
    if len(known) > most:
        del known[next(iter(known))]
    return lengths
