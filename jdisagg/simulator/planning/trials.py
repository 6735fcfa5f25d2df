"""Decides by simulation whether a candidate can sustain a request rate. A candidate sustains a rate
if it attains the goal for any number of requests. If not, it is overloaded.

Attainment in one run is not enough: the queue of an overloaded candidate grows, but the run may end
before the wait reaches the TTFT limit. A rate therefore counts as sustained only if both conditions
hold:

- Arrivals last `STAYS` times as long as a request takes, so that decode batches have filled within
  the third that is not counted.
- Arrivals last `1 / TOLERANCE` times the TTFT limit. If the queue grows by the fraction TOLERANCE
  of the arrivals, its wait exceeds the TTFT limit within this time. Alternatively, the wait for the
  first token grows by less than `GROWTH` seconds per second, which is the fraction of arrivals by
  which the queue grows.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jdisagg.simulator.planning.bounds import Demand, Goal
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.verdict import Finding, Trial
from jdisagg.simulator.report import (
    Report,
    RequestOutcome,
    SloLimits,
    WorkerUsage,
    summarise,
    utilisation,
)
from jdisagg.simulator.workloads import Arrival, at_rate, names_blocks

TOLERANCE = 0.04  # relative tolerance of a rate at which bisection ends
GROWTH = TOLERANCE / 2
STAYS = 3  # `settled` drops up to a third
MARGIN = 1.05  # factor on the length of runs: a request's time is known from other runs only
EXTENDS = 16
LEAST_REQUESTS = 400
LONGEST_SECONDS = 3600  # virtual


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The result of one simulated run. The id of a request is its index in the arrivals.

    Attributes:
        outcomes: Outcomes of all requests, or of those that had ended if the run was stopped.
    """

    outcomes: tuple[RequestOutcome, ...]
    usage: tuple[WorkerUsage, ...] = ()
    stopped: bool = False


Lost = Callable[[RequestOutcome], bool]
# Simulates a candidate on arrivals. `Lost` is called with each outcome and returns whether to stop.
Runner = Callable[[Candidate, Sequence[Arrival], Lost], TrialRun]


@dataclass(frozen=True, slots=True)
class Runners:
    """The two ways to run a candidate: `simulated` runs live code in virtual time, and `stepped`
    only steps the cost model."""

    simulated: Runner
    stepped: Runner


Process = Literal["poisson", "trace"]


@dataclass(frozen=True, slots=True)
class Trier:
    """Simulates candidates at given rates, with one workload and goal. `most_requests`: cap on the
    number of requests of a run. A run has more requests if `most_requests` are not enough for a
    conclusion."""

    goal: Goal
    workload: Sequence[Arrival]
    demand: Demand
    most_requests: int
    arrivals: Process = "poisson"
    seed: int = 0

    def trial(
        self, runner: Runner, candidate: Candidate, rate: float, stay_seconds: float = 0.0
    ) -> Trial:
        """Repeats the run with more requests while the result is inconclusive. `stay_seconds`:
        expected seconds from arrival to finish of a request; 0 if unknown."""
        goal = self.goal
        filling = goal.ttft_seconds + self.demand.steps_mean * goal.tpot_seconds
        count = self._count(rate, filling, min(filling, stay_seconds))
        most = max(count, EXTENDS * self.most_requests)
        while True:
            arrivals = requests_at(self.workload, rate, count, self.arrivals, self.seed)
            loss = Loss(goal, arrivals, filling)
            run = runner(candidate, arrivals, loss)
            if run.stopped:
                return _judged(rate, run, loss.judged, goal)
            judged = settled(run.outcomes, filling)
            trial = _judged(rate, run, judged, goal)
            if trial.attainment < goal.attainment:
                return trial
            last = len(arrivals) < count or count >= most
            seconds = arrivals[-1].at_seconds - arrivals[0].at_seconds
            stay = min(filling, _mean_stay(judged))  # if the goal is attained, at most `filling`
            growth, doubt = (
                wait_growth(judged) if seconds < goal.ttft_seconds / TOLERANCE else (0.0, 0.0)
            )
            if growth > GROWTH + doubt and seconds >= stay:
                return replace(trial, overload=True)
            filled = seconds >= STAYS * stay
            if filled and growth <= GROWTH:
                return trial
            if last:
                conclusive = filled and doubt <= TOLERANCE
                return replace(trial, overload=conclusive, short=not conclusive)
            if seconds < STAYS / 2 * stay:  # batches that are still filling shorten the stay
                stay = (stay + filling) / 2
            longer = 2 * count if filled else max(count + 1, int(MARGIN * STAYS * stay * rate))
            count = min(most, longer)

    def report(
        self, runner: Runner, candidate: Candidate, rate: float, stay_seconds: float
    ) -> Report:
        """Simulates the candidate at `rate` requests per second, and returns the latencies of the
        requests that arrive after `stay_seconds`, the time that a request takes."""
        goal = self.goal
        filling = min(stay_seconds, goal.ttft_seconds + self.demand.steps_mean * goal.tpot_seconds)
        count = min(
            self._count(rate, filling, filling), max(LEAST_REQUESTS, int(2 * filling * rate))
        )
        arrivals = requests_at(self.workload, rate, count, self.arrivals, self.seed)
        run = runner(candidate, arrivals, lambda outcome: False)
        return summarise(settled(run.outcomes, filling, 1 / 2), goal.slo)

    def _count(self, rate: float, filling: float, stay: float) -> int:
        most = self.most_requests
        most = max(most, min(MARGIN * STAYS * stay * rate, EXTENDS * most))
        count = np.clip(4 * rate * filling, LEAST_REQUESTS, most)
        return int(min(count, max(50, rate * LONGEST_SECONDS)))


class Loss:
    """Decides when a run can end early because the goal is missed.

    An instance is called with the outcome of each request that ended. It returns True once more
    requests have missed a limit than the goal allows. `begun` counts requests with a late first
    token already before they end."""

    def __init__(self, goal: Goal, arrivals: Sequence[Arrival], filling_seconds: float) -> None:
        first, last = arrivals[0].at_seconds, arrivals[-1].at_seconds
        begin = first + min(filling_seconds, (last - first) / 3)
        counted = [index for index, item in enumerate(arrivals) if item.at_seconds >= begin]
        self._ended: list[RequestOutcome] = []
        self._late: dict[str, RequestOutcome] = {}  # late and not ended
        self._slo, self._ttft, self._from = goal.slo, goal.ttft_seconds, counted[0]
        # One more than allowed, because rounding decides whether the first request is judged.
        self._may_miss = (1 - goal.attainment) * len(counted) + 1
        self._missed = 0

    def __call__(self, outcome: RequestOutcome) -> bool:
        if int(outcome.request_id) < self._from:
            return False
        self._ended.append(outcome)
        if self._late.pop(outcome.request_id, None) is None:
            self._missed += not self._slo.attained(outcome)
        return self._missed > self._may_miss

    def begun(self, outcome: RequestOutcome) -> bool:
        assert outcome.ttft is not None
        if outcome.ttft <= self._ttft or int(outcome.request_id) < self._from:
            return False
        self._late[outcome.request_id] = outcome
        self._missed += 1
        return self._missed > self._may_miss

    @property
    def judged(self) -> list[RequestOutcome]:
        return [*self._ended, *self._late.values()]


def _judged(rate: float, run: TrialRun, judged: Sequence[RequestOutcome], goal: Goal) -> Trial:
    report = summarise(judged, goal.slo)
    assert report.attainment is not None, "there are limits"
    first, tokens = SloLimits(ttft_seconds=goal.ttft_seconds), goal.tpot_seconds
    finished = [item for item in judged if item.end == "finished"]
    reasons = Counter([item.reason for item in judged if item.end != "finished"])
    return Trial(
        rate=rate,
        attainment=report.attainment,
        late_first=sum([not first.attained(item) for item in finished]) / len(judged),
        late_tokens=sum([(item.tpot or 0.0) > tokens for item in finished]) / len(judged),
        unfinished=1 - len(finished) / len(judged),
        report=replace(report, utilisation=utilisation(run.outcomes or judged, run.usage)),
        reason=max(reasons, key=lambda reason: reasons[reason], default=""),
    )


def requests_needed(found: Finding) -> int:
    return int(MARGIN * STAYS * (found.report.latency.mean or 0.0) * found.rate)


def requests_at(
    workload: Sequence[Arrival], rate: float, count: int, arrivals: Process, seed: int
) -> list[Arrival]:
    """Returns the first `count` requests of the workload, with new arrival times at `rate` requests
    per second. A workload with fewer requests is repeated, unless its blocks have names: repeated
    names would add cache hits. In that case the result has fewer than `count` requests."""
    if names_blocks(workload):
        count = min(count, len(workload))
    if arrivals == "trace" and len(workload) > 1:
        return at_rate(workload[:count], rate)
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    gaps[0] = 0.0
    # Scaled to the exact mean: a few hundred draws may be off by a tenth.
    times = np.cumsum(gaps) * (count - 1) / max(gaps.sum(), 1e-9) / rate
    repeated = itertools.islice(itertools.cycle(workload), count)
    return [item.at(seconds) for item, seconds in zip(repeated, times.tolist(), strict=True)]


def settled(
    outcomes: Sequence[RequestOutcome], filling_seconds: float, part: float = 1 / 3
) -> list[RequestOutcome]:
    """Returns the outcomes of requests that arrived after the first `filling_seconds`, or after the
    fraction `part` of the time between first and last arrival if that is shorter."""
    arrivals = [item.arrival for item in outcomes]
    first, last = min(arrivals), max(arrivals)
    begin = first + min(filling_seconds, part * (last - first))
    return [item for item in outcomes if item.arrival >= begin]


def wait_growth(outcomes: Sequence[RequestOutcome]) -> tuple[float, float]:
    """Returns the growth of the wait for the first token, in seconds per second of arrivals, and
    the uncertainty of the growth. Compares the mean waits of the earlier and the later half.

    Waits in a queue that never empties are a random walk. The slope over n requests of similar
    length has a standard error of about sqrt(2 / n); the uncertainty is twice that."""
    waits = sorted((item.arrival, item.ttft) for item in outcomes if item.ttft is not None)
    half = len(waits) // 2
    if not half:
        return 0.0, 0.0
    earlier, later = np.mean(waits[:half], axis=0), np.mean(waits[half:], axis=0)
    seconds, grown = later - earlier
    return (float(grown / seconds) if seconds > 0 else 0.0), 2 * (2 / len(waits)) ** 0.5


def _mean_stay(outcomes: Sequence[RequestOutcome]) -> float:
    return sum(item.latency for item in outcomes) / len(outcomes)
