"""Functions that the studies of this folder share: one run, the search for the highest rate that
attains a goal, and the page with the results.

A run is some hundred requests of a workload at one rate, with the same random numbers for all
compared deployments. Requests that arrive while the empty cluster fills are not counted. Must not
depend on a particular paper."""

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
    """Counts the runs of a study."""

    runs: int = 0

    def server(self, fleet: Fleet) -> Serve:
        """Returns a function that serves arrivals until all have ended or the goal is missed."""

        def serve(
            arrivals: Sequence[Arrival], lost: Callable[[RequestOutcome], bool]
        ) -> Sequence[RequestOutcome]:
            self.runs += 1
            return simulate(fleet, arrivals, enough=lost).outcomes

        return serve


@dataclass(frozen=True)
class Load:
    """A workload with a goal. `requests`: largest number of requests of one run. A run has fewer if
    fewer last OUTLASTS times as long as the TTFT limit (so that an overload becomes visible) and
    three times as long as a request."""

    workload: Sequence[Arrival]
    goal: Goal
    requests: int
    seed: int = 0

    def attained(self, serve: Serve, rate: float) -> float:
        """Returns the fraction of the counted requests within the limits, at `rate` requests per
        second. If the run ended early because the goal was missed, counts the requests that had
        ended."""
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
        """Returns the highest rate, in requests per second, at which `serve` attains the goal.
        Returns 0 if `serve` does not exceed `above`, or if it attains no rate near the guess."""
        wanted = self.goal.attainment
        return highest(lambda rate: self.attained(serve, rate) >= wanted, guess, above)

    def under(self, goal: Goal) -> "Load":
        return Load(self.workload, goal, self.requests, self.seed)


def highest(met: Callable[[float], bool], guess: float, above: float = 0.0) -> float:
    """Returns the highest tried rate that is `met`, within TOLERANCE of one that is not. Returns 0
    if no rate down to a sixteenth of the guess is met. `above`: rate to exceed; the search begins
    there and returns 0 if it is not met."""
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
    """Returns name and goodput, per second and device, of the best contender. `contenders`:
    function that serves, and number of devices. `guess`: rate per second and device."""
    found, most = "none", 0.0
    for name, (serve, devices) in contenders.items():
        rate = load.goodput(serve, guess * devices, most * devices) / devices
        if rate > most:
            found, most = name, rate
    return found, most


def page(results: Mapping[str, object], words: str) -> str:
    """Returns the page of a study: its handwritten text and its tables."""
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
