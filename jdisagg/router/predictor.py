"""Learns from answers: predicts their length for reservations, placement and fairness, and corrects
predicted times to first token by the errors of earlier predictions (`LearnedCorrections`).

`LearnedLengths` predicts a quantile of the recent lengths in the same class. A class is the tenant
and the prompt's length, rounded to a power of two. If a class has too few samples, all answers of
the tenant are used. If these are too few, the answers of all tenants are used. The request's
max_tokens is the upper bound of all predictions. Does no I/O."""

import bisect
import enum
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

from jdisagg.messages.registry import AnswerLength, RouterUse
from jdisagg.plain import plain

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


OUTCOMES = 32  # number of latest outcomes of a way that are used
FEW = 3  # smallest number of outcomes for which a way has a correction of its own
FORGOTTEN = 256  # number of later outcomes of other ways after which a way's outcomes are dropped
PRIOR = 1.0  # weight of the factor 1, in outcomes
SMALLEST, LARGEST = 0.2, 5.0  # bounds of a factor


class PromptWay(enum.Enum):
    """How a prompt is served: a prefill worker computes it, a prefill worker fetches cached KV from
    another worker first, or the decode worker computes it."""

    PREFILL = "prefill"
    FETCH = "fetch"
    APPEND = "append"


@plain
class Corrections:
    """Corrections of predicted seconds to first token, as (constant, factor) of each way."""

    prefill: tuple[float, float] = (0.0, 1.0)
    fetch: tuple[float, float] = (0.0, 1.0)
    append: tuple[float, float] = (0.0, 1.0)


NO_CORRECTIONS = Corrections()


class LearnedCorrections:
    """Fits a correction of predicted times to the outcomes of each way. A way with fewer than `FEW`
    outcomes uses the correction of the first other way, in the order of `PromptWay`, that has
    enough. If no way has enough, all ways use one correction that fits all outcomes.

    A constant and a factor are fitted to the latest predictions and outcomes, separately for each
    way to serve a prompt (`PromptWay`). Errors are relative, and the factor is regularised towards
    1, so that a single outcome changes only the constant.

    The first request of a way is often slow for temporary reasons. Such an outcome must not keep
    later requests away from the worker that now has their prefix cached. A way with few outcomes
    therefore uses the correction of another way."""

    def __init__(self) -> None:
        self._outcomes: dict[PromptWay, deque[tuple[float, float]]] = {
            way: deque(maxlen=OUTCOMES) for way in PromptWay
        }
        self._since = dict.fromkeys(PromptWay, 0)
        self._current = NO_CORRECTIONS

    def observe(self, way: PromptWay, predicted_seconds: float, seconds: float) -> None:
        """Records an uncorrected prediction and the measured time, both in seconds and positive."""
        self._outcomes[way].append((predicted_seconds, seconds))
        for other in PromptWay:
            self._since[other] = 0 if other is way else self._since[other] + 1
            if self._since[other] >= FORGOTTEN:
                self._outcomes[other].clear()
        fitted = {one: _fitted(of) for one, of in self._outcomes.items() if len(of) >= FEW}
        every = itertools.chain.from_iterable(self._outcomes.values())
        usual = next(iter(fitted.values())) if fitted else _fitted(every)
        self._current = Corrections(*(fitted.get(one, usual) for one in PromptWay))

    @property
    def current(self) -> Corrections:
        return self._current


def _fitted(outcomes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    each = [(1.0 / seconds, predicted / seconds) for predicted, seconds in outcomes]
    uu = sum(u * u for u, _ in each)
    uv = sum(u * v for u, v in each)
    vv = sum(v * v for _, v in each) + PRIOR
    u, v = sum(u for u, _ in each), sum(v for _, v in each) + PRIOR
    factor = (v * uu - u * uv) / (vv * uu - uv * uv)
    constant = (u - factor * uv) / uu
    if constant < 0:
        constant, factor = 0.0, v / vv
    bounded = min(LARGEST, max(SMALLEST, factor))
    return constant if bounded == factor else max(0.0, (u - bounded * uv) / uu), bounded
