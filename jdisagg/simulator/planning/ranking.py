"""First level of the planner's search: ranks all candidates by stepping the cost model.

Candidates are stepped in the order of their ceilings, highest first. With an objective other than
the rate, ceilings and rates are divided by what a candidate spends. Candidates are of the same kind
if they have the same mode and if both or neither have pipeline stages. A candidate is dropped after
one trial if it does not reach nearly the best rate of its kind so far. It is also dropped if an
earlier candidate has the same layouts and a rate at least as high."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import Bounds, Goal
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.measure import TOLERANCE, Measurer, Task
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.workloads import names_blocks

# The rate of a candidate is searched only if it exceeds this fraction of the best rate of its kind
# by the search's tolerance.
KEPT = 0.95
# Candidates whose bound is below this fraction of the best rate of their kind are not stepped.
HOPELESS = 0.85
# Number of requests of a stepped run; a run that decides nothing gets more.
STEPPED_REQUESTS = 4000
# Candidates of each kind that are stepped in one round. Rounds begin small, because candidates are
# compared with the best of earlier rounds.
ROUNDS = (1, 1, 1, 1, 2, 4, 8)
RESOLUTION = 0.01  # relative tolerance of the stepped rates of candidates that are nearly equal

Priced = tuple[Candidate, Bounds]
Kind = tuple[Mode, bool]  # mode, and whether instances have pipeline stages
Layouts = tuple[Mode, Layout | None, Layout]  # of prefill and decode instances
Spread = Callable[[Measurer, Sequence[Task]], Iterator[tuple[int, Finding | None]]]


def ranked_by_stepping(
    priced: Sequence[Priced],
    measurer: Measurer,
    rooms: Mapping[Layout, int],
    spread: Spread,
    progress: Callable[[str, int, int], None],
    weigh: Callable[[Candidate], float],
) -> list[Finding]:
    # Bounds ignore cached prefixes, so that they bound nothing if there are any.
    hopeless = 0.0 if names_blocks(measurer.workload) else HOPELESS
    left: dict[Kind, list[Priced]] = {}
    for item in priced:
        left.setdefault(_kind(item[0]), []).append(item)
    best: dict[Kind | Layouts, float] = {}
    found: list[Finding] = []
    done = 0
    for most in (*ROUNDS, len(priced)):
        tasks: list[Task] = []
        for kind, items in left.items():
            rival, stay = best.get(kind, 0.0), _stay_of_best(found, kind)
            taken, left[kind] = items[:most], items[most:]
            tasks += [
                Task(
                    candidate,
                    bounds,
                    rooms[candidate.decode],
                    max(KEPT * rival, best.get(_layouts(candidate), 0.0)) * weight,
                    stay_seconds=stay,
                    weight=weight,
                )
                for candidate, bounds in taken
                if bounds.rate >= hopeless * rival * (weight := weigh(candidate))
            ]
        for _, finding in spread(measurer, tasks) if tasks else ():
            done += 1
            progress("candidates by stepping the cost model", done, len(priced))
            if finding is None:
                continue
            for group in (_kind(finding.candidate), _layouts(finding.candidate)):
                best[group] = max(best.get(group, 0.0), finding.value)
            found.append(replace(finding, simulated=False))
    return sorted(found, key=lambda item: (-item.value, -item.bounds.rate, str(item.candidate)))


def _stay_of_best(found: Sequence[Finding], kind: Kind) -> float:
    alike = [item for item in found if _kind(item.candidate) == kind]
    best = max(alike, key=lambda item: (item.value, str(item.candidate)), default=None)
    return (best.report.latency.mean or 0.0) if best else 0.0


def _kind(candidate: Candidate) -> Kind:
    return candidate.mode, candidate.staged


def _layouts(candidate: Candidate) -> Layouts:
    return candidate.mode, candidate.prefill, candidate.decode


def resolved(measurer: Measurer, ranked: Sequence[Finding]) -> list[Finding]:
    """Determines the rates of the best findings more exactly and returns all findings in the new
    order. Findings that may have the highest stepped rate get a rate that is exact within
    RESOLUTION."""
    near = [item for item in ranked if item.value * (1 + TOLERANCE) >= ranked[0].value]
    finer = [replace(item, rate=_finer(measurer, item)) for item in near]
    return [*sorted(finer, key=lambda item: -item.value), *ranked[len(near) :]]


def _finer(measurer: Measurer, found: Finding) -> float:
    wanted, low = measurer.goal.attainment, found.rate
    high = min((item.rate for item in found.trials if item.rate > low), default=low)
    stay = found.report.latency.mean or 0.0
    while low and high > low * (1 + RESOLUTION):
        middle = (low * high) ** 0.5
        trial = measurer.trial(found.candidate, middle, stay)
        low, high = (middle, high) if trial.lasting_attainment >= wanted else (low, middle)
    return low


def rate_with_error(measurer: Measurer, stepped: Finding, factor: float) -> float:
    """Returns by what factor the stepped rate of a finding's candidate changes if every step takes
    `factor` times the predicted time.

    It is equivalent to divide the latency limits by `factor` instead, and to divide the rate that
    results by `factor` too."""
    goal = measurer.goal
    scaled = Goal(goal.ttft_seconds / factor, goal.tpot_seconds / factor, goal.attainment)
    task = Task(stepped.candidate, stepped.bounds, stepped.kv_tokens, expected=stepped.rate)
    found = replace(measurer, goal=scaled).measured(task)
    assert found is not None, "a task without a rival has a finding"
    return found.rate / factor / stepped.rate
