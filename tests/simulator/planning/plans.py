"""What plans are made of."""

from collections.abc import Callable, Sequence

from jdisagg.config import Mode
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Candidate, Site
from jdisagg.simulator.planning.planner import Plan
from jdisagg.simulator.planning.trials import Lost, Runner, Runners, TrialRun
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.report import RequestOutcome, WorkerUsage
from jdisagg.simulator.workloads import Arrival, Fixed, mean_rate, poisson
from tests.costs.named import H100

Capacity = Callable[[Candidate], float]
SITE = Site(H100, 8)
GOAL = Goal(0.5, 0.05)
WORKLOAD = poisson(5.0, 200, Fixed(900, 100), seed=1)


class Servers:
    """Serves up to `capacity(candidate)` requests per second in time and all above that late.
    Records the candidates that were run."""

    def __init__(self, capacity: Capacity, late: str = "ttft") -> None:
        self._capacity, self._late = capacity, late
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate, arrivals: Sequence[Arrival], lost: Lost) -> TrialRun:
        self.asked.append(candidate)
        in_time = min(1.0, self._capacity(candidate) / mean_rate(arrivals))
        outcomes = []
        for index, item in enumerate(arrivals):
            good = (index * 0.618034) % 1 < in_time
            first = item.at_seconds + (0.1 if good or self._late != "ttft" else 9.0)
            finish = first + (item.output_tokens - 1) * (
                0.01 if good or self._late != "tpot" else 0.9
            )
            end = "finished" if good or self._late != "refused" else "refused"
            reason = "" if end == "finished" else "no pages"
            outcomes.append(
                RequestOutcome(
                    str(index),
                    item.at_seconds,
                    finish,
                    item.prompt_tokens,
                    item.output_tokens,
                    first,
                    end=end,
                    reason=reason,
                )  # type: ignore[arg-type]
            )
        return TrialRun(
            tuple(outcomes),
            (WorkerUsage("a", "prefill", 4, 1.0), WorkerUsage("b", "decode", 4, 9.0)),
        )


def both(runner: Runner) -> Runners:
    """Takes the runner for simulated and for stepped runs."""
    return Runners(runner, runner)


def best_of(found: Plan, mode: Mode) -> Finding | None:
    return next((item for item in found.findings if item.candidate.mode is mode), None)
