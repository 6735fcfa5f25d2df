"""What the studies of this folder share: one run, the highest rate that keeps a goal, and the page
that tells it.

A run is some hundred requests of a workload at a rate, with the same random numbers for all that
are compared; those that arrive while the empty cluster fills are not judged. Knows no paper."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulator_engines.cluster import simulate
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.planning.bounds import Demand, Goal
from jdisagg.simulator.planning.trials import Loss, requests_at, settled
from jdisagg.simulator.report import RequestOutcome, attainment
from jdisagg.simulator.workloads import Arrival

RESULTS = Path(__file__).resolve().parent.parent / "results"
WORDS = Path(__file__).resolve().parent / "words"
TOLERANCE = 0.06  # of a rate, where the search for the highest ends
MOST_RUNS = 10  # of one search
OUTLASTS = round(1 / TOLERANCE)  # limits on the first token that arrivals go on for
LEAST = 300  # requests of a run
Serve = Callable[[Sequence[Arrival], Callable[[RequestOutcome], bool]], Sequence[RequestOutcome]]


@dataclass
class Tally:
    """How many runs a study took."""

    runs: int = 0

    def server(self, fleet: Fleet) -> Serve:
        """What serves arrivals until all have ended or the goal is lost."""

        def serve(
            arrivals: Sequence[Arrival], lost: Callable[[RequestOutcome], bool]
        ) -> Sequence[RequestOutcome]:
            self.runs += 1
            return simulate(fleet, arrivals, enough=lost).outcomes

        return serve


@dataclass(frozen=True)
class Load:
    """A workload under a goal. `requests`: of one run at most; fewer where fewer outlast the limit
    on the first token OUTLASTS times, so that an overload shows, and the stay of a request thrice.
    """

    workload: Sequence[Arrival]
    goal: Goal
    requests: int
    seed: int = 0

    def attained(self, serve: Serve, rate: float) -> float:
        """The part of the judged requests within the limits, at `rate` a second; where the goal is
        lost before the end, of those that had ended."""
        goal = self.goal
        filling = goal.ttft_seconds + Demand.of(self.workload).steps_mean * goal.tpot_seconds
        seconds = max(OUTLASTS * goal.ttft_seconds, 3 * filling)
        count = round(min(max(LEAST, rate * seconds), self.requests))
        arrivals = requests_at(self.workload, rate, count, "poisson", self.seed)
        loss = Loss(goal, arrivals, filling)
        outcomes = serve(arrivals, loss)
        judged = loss.judged if len(outcomes) < len(arrivals) else settled(outcomes, filling)
        return attainment(judged, goal.slo)

    def goodput(self, serve: Serve, guess: float, above: float = 0.0) -> float:
        """Requests a second that `serve` carries at most with the goal kept; 0 where it does not
        carry `above`, or nothing near the guess."""
        wanted = self.goal.attainment
        return highest(lambda rate: self.attained(serve, rate) >= wanted, guess, above)

    def under(self, goal: Goal) -> "Load":
        return Load(self.workload, goal, self.requests, self.seed)


def highest(met: Callable[[float], bool], guess: float, above: float = 0.0) -> float:
    """The highest rate tried that is `met`, within TOLERANCE of one that is not; 0 where none is
    down to a sixteenth of the guess. `above`: a rate that is to be beaten, where the search begins
    and, if it is missed, ends with 0."""
    low = high = 0.0
    runs, rate = 0, above * (1 + TOLERANCE) or guess
    while runs < MOST_RUNS and not (low and high):
        runs += 1
        if met(rate):
            low, rate = rate, rate * (1.25 if above else 1.6)
        elif above and not low:
            return 0.0
        else:
            high, rate = rate, rate / 1.6
            if not low and rate < guess / 16:
                return 0.0
    while runs < MOST_RUNS and high > low * (1 + TOLERANCE):
        runs, middle = runs + 1, (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    return low


def best(
    load: Load, contenders: Mapping[str, tuple[Serve, int]], guess: float
) -> tuple[str, float]:
    """The name and the goodput, a second and device, of the contender that has most of it;
    `contenders`: what serves, and on how many devices. `guess`: a second and device."""
    found, most = "none", 0.0
    for name, (serve, devices) in contenders.items():
        rate = load.goodput(serve, guess * devices, most * devices) / devices
        if rate > most:
            found, most = name, rate
    return found, most


def page(results: Mapping[str, object], words: str) -> str:
    """What is said of a study, by hand, and its tables."""
    machine: Mapping[str, object] = results["machine"]  # type: ignore[assignment]
    tables: Sequence[Mapping[str, object]] = results["tables"]  # type: ignore[assignment]
    lines = [words.strip(), "", "## Figures", ""]
    lines.append(
        f"`python -m benchmarks.papers {results['study']}`, {machine['date']}, commit"
        f" {machine['commit']}, {results['runs']} runs in {results['cpu_seconds']} processor"
        f" seconds ({machine['processor']}, Python {machine['python']}). Seconds are the cost"
        " model's: a faster machine gives the same figures."
    )
    for table in tables:
        columns: Sequence[str] = table["columns"]  # type: ignore[assignment]
        rows: Sequence[Sequence[object]] = table["rows"]  # type: ignore[assignment]
        lines += ["", f"### {table['title']}", "", _row(columns), "|---" * len(columns) + "|"]
        lines += [_row([_shown(cell) for cell in row]) for row in rows]
    return "\n".join(lines) + "\n"


def read(study: str) -> Mapping[str, object]:
    return json.loads((RESULTS / f"papers_{study}.json").read_text())


def words(study: str) -> str:
    return (WORDS / f"{study}.md").read_text()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
