"""Finds the highest request rate at which a candidate attains the goal in the simulator.

`Measurer` can be pickled to another process. Its result for a candidate does not depend on other
candidates. It accesses the simulator only through `Runner`. Equal seeds give equal results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.simulator.planning.bounds import Bounds, Demand, Goal
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.trials import TOLERANCE, Process, Runner, Trier
from jdisagg.simulator.planning.verdict import Finding, Trial, binding_limit
from jdisagg.simulator.report import Report
from jdisagg.simulator.workloads import Arrival

MOST_RUNS = 14  # simulations of one candidate


@dataclass(frozen=True, slots=True)
class Task:
    """A candidate whose highest rate is to be found.

    Attributes:
      rival_rate: Rate of the best candidate so far, in requests per second. The search stops as
        soon as it is clear that the task's candidate cannot exceed this rate.
      expected: Rate that the stepped cost model found, from which the search starts; 0 if unknown.
      stay_seconds: Expected seconds from arrival to finish of a request near the highest rate; 0 if
        unknown.
      weight: What the candidate spends (`Site.spent`).
    """

    candidate: Candidate
    bounds: Bounds
    kv_tokens: int
    rival_rate: float = 0.0
    expected: float = 0.0
    stay_seconds: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class Measurer:
    goal: Goal
    workload: Sequence[Arrival]
    demand: Demand
    accelerators: int
    runner: Runner
    most_requests: int
    arrivals: Process = "poisson"
    seed: int = 0
    tolerance: float = TOLERANCE

    def trial(self, candidate: Candidate, rate: float, stay_seconds: float = 0.0) -> Trial:
        return self._trier.trial(self.runner, candidate, rate, stay_seconds)

    def report(self, candidate: Candidate, rate: float, stay_seconds: float) -> Report:
        return self._trier.report(self.runner, candidate, rate, stay_seconds)

    @property
    def _trier(self) -> Trier:
        return Trier(
            self.goal, self.workload, self.demand, self.most_requests, self.arrivals, self.seed
        )

    def measured(self, task: Task) -> Finding | None:
        trials: list[Trial] = []
        stay = task.stay_seconds

        def trial(rate: float) -> float:
            nonlocal stay
            found = self.trial(task.candidate, rate, stay)
            trials.append(found)
            if found.lasting_attainment >= self.goal.attainment:
                stay = found.report.latency.mean or 0.0
            return found.lasting_attainment

        above = task.rival_rate * (1 + TOLERANCE)
        if above and trial(above) < self.goal.attainment:
            return None
        # Even if the bound is 0, the simulator may attain the goal at a low rate.
        demand = self.demand
        lowest = 2 / (self.goal.ttft_seconds + demand.steps_mean * self.goal.tpot_seconds)
        guess = task.expected or max(task.bounds.rate, lowest)
        near = bool(task.expected)
        rate = highest_rate(
            trial, guess, self.goal.attainment, above, near=near, tolerance=self.tolerance
        )
        return self._found(task, trials, rate)

    def _found(self, task: Task, trials: Sequence[Trial], rate: float) -> Finding:
        candidate, limits, wanted = task.candidate, task.bounds, self.goal.attainment
        met = [
            item
            for item in trials
            if item.lasting_attainment >= wanted and item.rate <= rate * (1 + 1e-9)
        ]
        shown = (
            max(met, key=lambda item: item.rate) if met else min(trials, key=lambda item: item.rate)
        )
        beyond = [item for item in trials if item.lasting_attainment < wanted]
        nearest = min(beyond, key=lambda item: item.rate, default=None)
        binding = binding_limit(nearest, limits) if nearest else limits.binding[0]
        ranks = candidate.decode_instances * candidate.decode.dp
        held = (
            shown.rate
            * self.demand.steps_mean
            * (shown.report.tpot.mean or 0.0)
            * self.demand.context_mean
        )
        return Finding(
            candidate=candidate,
            bounds=limits,
            rate=rate,
            per_accelerator=rate / self.accelerators,
            trials=tuple(sorted(trials, key=lambda item: item.rate)),
            report=shown.report,
            binding=binding,
            link_share=limits.link_share * rate,
            kv_share=held / (task.kv_tokens * ranks),
            kv_tokens=task.kv_tokens,
            tokens_per_second=rate * float(self.demand.outputs.mean()),
            short=nearest is not None and nearest.short,
            weight=task.weight,
        )


def highest_rate(
    attained: Callable[[float], float],
    guess: float,
    wanted: float,
    carried: float = 0.0,
    *,
    near: bool = False,
    tolerance: float = TOLERANCE,
) -> float:
    """Returns the highest tried rate at which `attained(rate)` is at least `wanted`. The lowest
    tried rate that fails is at most `tolerance` (a fraction) higher.

    Assumes that attainment decreases with the rate. Calls `attained` at most MOST_RUNS times.

    Args:
      guess: Rate to start from; the result is 0 if a hundredth of this rate fails.
      carried: Rate that is known to reach `wanted`, from which the search starts; 0 if no such rate
        is known.
      near: Whether the result is probably within a few percent of `guess`. The search then starts
          with it and widens its steps.
    """
    runs = 0

    def met(rate: float) -> bool:
        nonlocal runs
        runs += 1
        return attained(rate) >= wanted

    # Above a known rate, the result is probably close.
    low, high, step = carried, 0.0, 1 + tolerance if carried or near else 1.3
    rate = step * carried or (guess if near else 0.8 * guess)
    while runs < MOST_RUNS and not (low and high):
        if met(rate):
            rate, low, step = rate * step, rate, min(4.0, step**2 if low else step)
        elif carried:
            high = rate
        elif rate < 0.4 * guess:
            return 0.0
        elif near and rate > 0.6 * guess:
            high, rate, step = rate, rate / step, min(4.0, step**1.5)
        else:
            high, rate = rate, rate / 1.6 if rate > 0.6 * guess else 0.01 * guess
    while low and high > low * (1 + tolerance) and runs < MOST_RUNS:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
