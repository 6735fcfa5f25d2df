"""Corrects predicted times to first token by the errors of earlier predictions.

A constant and a factor are fitted to the latest predictions and outcomes, separately for each way
to serve a prompt (`PromptWay`). Errors are relative, and the factor is regularised towards 1, so
that a single outcome changes only the constant.

The first request of a way is often slow for temporary reasons. Such an outcome must not keep later
requests away from the worker that now has their prefix cached. A way with few outcomes therefore
uses the correction of another way."""

import enum
import itertools
from collections import deque
from collections.abc import Iterable

from jdisagg.plain import plain

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
    enough. If no way has enough, all ways use one correction that fits all outcomes."""

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
