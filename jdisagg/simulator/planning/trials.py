"""One rate tried: how many requests are sent, which of them count, and whether the cluster carried
them or only began to drown.

The workload's requests in their order, Poisson arrivals (the same random numbers at every rate, so
that curves do not jump) or the trace's own, stretched; requests that arrive while the empty cluster
fills, at most a third, are served but not judged.

Attainment alone calls an overload carried where a run ends before its queue has grown to the TTFT
limit. So a rate is carried only where

- arrivals go on for `STAYS` times as long as a request stays, so that decode batches have filled
  within that third, and
- they go on for `1 / TOLERANCE` TTFT limits, in which a queue that grows by TOLERANCE of the
  arrivals passes the limit, or the wait for the first token does not grow: by `GROWTH` seconds a
  second, which is the part of the arrivals that stays behind.

A run whose goal is lost is not run to its end: when more of the judged requests have missed it than
may, the rest cannot mend that.

A run that can tell neither is made again with more requests, up to `EXTENDS` times `most_requests`.
Where the workload has no more of them, or that is too few still, the trial is `short`, and its rate
is not taken as carried.

Knows the simulator only as a `Runner`; decides nothing about which rates to try. Deterministic by
seed."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jdisagg.simulator.planning.bounds import Demand, Goal
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.verdict import Trial
from jdisagg.simulator.report import RequestOutcome, WorkerUsage, attainment, summarise
from jdisagg.simulator.workloads import Arrival, at_rate

TOLERANCE = 0.04  # of a rate, where bisection ends
GROWTH = TOLERANCE / 2
STAYS = 3  # `settled` leaves out a third
EXTENDS = 8
LEAST_REQUESTS = 400
LONGEST_SECONDS = 3600  # of virtual time


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What the simulator gives back of one run. `stopped`: it was ended when its goal was lost; the
    outcomes are of the requests that had ended, and their ids are places among the arrivals."""

    outcomes: tuple[RequestOutcome, ...]
    usage: tuple[WorkerUsage, ...] = ()
    stopped: bool = False


Lost = Callable[[RequestOutcome], bool]
# of a candidate, its arrivals, and what says after each outcome whether the goal is lost
Runner = Callable[[Candidate, Sequence[Arrival], Lost], TrialRun]
Process = Literal["poisson", "trace"]


@dataclass(frozen=True, slots=True)
class Trier:
    """Tries rates of one workload against one goal. `most_requests`: of a run that can tell."""

    goal: Goal
    workload: Sequence[Arrival]
    demand: Demand
    most_requests: int
    arrivals: Process = "poisson"
    seed: int = 0

    def trial(self, runner: Runner, candidate: Candidate, rate: float) -> Trial:
        """At `rate` requests a second, in one run or, where that cannot tell, in longer ones."""
        goal = self.goal
        filling = goal.ttft_seconds + self.demand.steps_mean * goal.tpot_seconds
        # Long enough to settle, and no days of idling at a low rate.
        count = int(
            min(
                np.clip(4 * rate * filling, LEAST_REQUESTS, self.most_requests),
                max(50, rate * LONGEST_SECONDS),
            )
        )
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
            stay = min(filling, _mean_stay(judged))  # a goal that is attained bounds it
            growth, doubt = (
                wait_growth(judged) if seconds < goal.ttft_seconds / TOLERANCE else (0.0, 0.0)
            )
            if growth > GROWTH + doubt and seconds >= stay:
                return replace(trial, overload=True)
            filled = seconds >= STAYS * stay
            if filled and growth <= GROWTH:
                return trial
            if last:
                told = filled and doubt <= TOLERANCE
                return replace(trial, overload=told, short=not told)
            count = min(most, max(2 * count, 0 if filled else int(1.1 * STAYS * stay * rate)))


class Loss:
    """Whether a run's goal is lost for certain: more of its `judged` missed it than may."""

    def __init__(self, goal: Goal, arrivals: Sequence[Arrival], filling_seconds: float) -> None:
        first, last = arrivals[0].at_seconds, arrivals[-1].at_seconds
        begin = first + min(filling_seconds, (last - first) / 3)
        counted = [index for index, item in enumerate(arrivals) if item.at_seconds >= begin]
        self.judged: list[RequestOutcome] = []
        self._slo, self._from = goal.slo, counted[0]
        # One more than may miss: the first of those that count may be rounded to either side.
        self._may_miss = (1 - goal.attainment) * len(counted) + 1
        self._missed = 0

    def __call__(self, outcome: RequestOutcome) -> bool:
        if int(outcome.request_id) < self._from:
            return False
        self.judged.append(outcome)
        self._missed += not self._slo.attained(outcome)
        return self._missed > self._may_miss


def _judged(rate: float, run: TrialRun, judged: Sequence[RequestOutcome], goal: Goal) -> Trial:
    slo = goal.slo
    first, tokens = replace(slo, tpot_seconds=None), replace(slo, ttft_seconds=None)
    finished = [item for item in judged if item.end == "finished"]
    reasons = Counter(item.reason for item in judged if item.end != "finished")
    return Trial(
        rate=rate,
        attainment=attainment(judged, slo),
        late_first=sum(not first.attained(item) for item in finished) / len(judged),
        late_tokens=sum(not tokens.attained(item) for item in finished) / len(judged),
        unfinished=1 - len(finished) / len(judged),
        report=replace(
            summarise(judged, slo), utilisation=summarise(run.outcomes, None, run.usage).utilisation
        ),
        reason=max(reasons, key=lambda reason: reasons[reason], default=""),
    )


def requests_at(
    workload: Sequence[Arrival], rate: float, count: int, arrivals: Process, seed: int
) -> list[Arrival]:
    """`count` requests of the workload from its beginning, over again where it is shorter and names
    no blocks (a repeated block would be a hit that the workload does not have); at `rate` a second.
    """
    if any(item.block_hashes for item in workload):
        count = min(count, len(workload))
    if arrivals == "trace" and len(workload) > 1:
        return at_rate(workload[:count], rate)
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    gaps[0] = 0.0
    # Their mean is what was asked, exactly: a few hundred draws may be off by a tenth.
    times = np.cumsum(gaps) * (count - 1) / max(gaps.sum(), 1e-9) / rate
    return [
        replace(workload[index % len(workload)], at_seconds=float(at))
        for index, at in enumerate(times)
    ]


def settled(outcomes: Sequence[RequestOutcome], filling_seconds: float) -> list[RequestOutcome]:
    """Those that arrived when the cluster had filled: after `filling_seconds`, or a third of the
    time of arrivals where that is less."""
    arrivals = [item.arrival for item in outcomes]
    first, last = min(arrivals), max(arrivals)
    begin = first + min(filling_seconds, (last - first) / 3)
    return [item for item in outcomes if item.arrival >= begin]


def wait_growth(outcomes: Sequence[RequestOutcome]) -> tuple[float, float]:
    """(by how many seconds the wait for a first token grows in a second of arrivals, how far off
    chance may put that), by the mean waits of the earlier and the later half. Of a queue that never
    empties the waits are a random walk: its slope over n requests has a standard error of about
    sqrt(2 / n) where lengths vary little; twice that is doubt."""
    waits = sorted((item.arrival, item.ttft) for item in outcomes if item.ttft is not None)
    half = len(waits) // 2
    if not half:
        return 0.0, 0.0
    earlier, later = np.mean(waits[:half], axis=0), np.mean(waits[half:], axis=0)
    seconds, grown = later - earlier
    return (float(grown / seconds) if seconds > 0 else 0.0), 2 * (2 / len(waits)) ** 0.5


def _mean_stay(outcomes: Sequence[RequestOutcome]) -> float:
    return sum(item.latency for item in outcomes) / len(outcomes)
