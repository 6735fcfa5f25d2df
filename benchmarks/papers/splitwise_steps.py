"""Why Splitwise ranks its designs otherwise than we do: the same comparison with three kinds of
steps, and the planner's answer.

The step times are those of our cost model, those that Splitwise measured, and those that its own
simulator makes of its measurements (`step_table`). All else stays as in `splitwise`, except that
runs are stepped as by the planner, which is a tenth of the work; the simulated rates of `splitwise`
stand beside those of the cost model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers.runs import read
from benchmarks.papers.splitwise import (
    AA,
    BASELINES,
    BUDGET_COST,
    BUDGET_POWER,
    CAP,
    COST,
    HA,
    HH,
    HHCAP,
    REST,
    A,
    Bench,
    Design,
    H,
    Setting,
    Slowdowns,
)
from benchmarks.papers.step_table import MODEL, Rule
from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Best, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.planning.stepped import HandoffLinks, SteppedRun
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.workloads import Arrival

TRACES = ("conversation", "code")
Row = list[object]
STEPS: dict[Rule | None, str] = {
    None: "cost model",
    "sequences": "measured",
    "tokens": "as its simulator reads them",
}
# Designs with the budget that is divided. One kind has the same best division under both.
ASKED: tuple[tuple[Design, str], ...] = (
    (BASELINES[0], "power"),
    (BASELINES[1], "power"),
    (AA, "power"),
    (HH, "power"),
    (HHCAP, "power"),
    (HA, "power"),
    (HA, "cost"),
)
REQUESTS = 2000  # of a run
PLANNED = 200  # requests of a trace, for the planner
DEVICES = 64  # of each kind, for the planner


def kept(trace: str) -> list[tuple[tuple[int, int], float]]:
    """Returns divisions and rates with the cost model, which the study `splitwise` has."""
    tables: Sequence[dict[str, list[list[object]]]] = read("splitwise")["tables"]  # type: ignore[assignment]
    found = []
    for design, unit in ASKED:
        rows = tables[0 if unit == "power" else 1]["rows"]
        (row,) = [row for row in rows if row[:2] == [trace, design.name]]
        first, _, second = str(row[2]).rpartition(" + ")
        found.append(((int(first or 0), int(second)), float(str(row[5]))))
    return found


class SteppedBench(Bench):
    def outcomes(self, fleet: Fleet, arrivals: Sequence[Arrival]) -> Sequence[RequestOutcome]:
        first, devices = fleet.prefill, fleet.decode.devices
        handoff = HandoffLinks(fleet.far, devices, devices) if first else None
        prefill = fleet.costs_of(first) if first else None
        run = SteppedRun(fleet, handoff, prefill, fleet.costs_of(fleet.decode))
        return run.run(arrivals).outcomes


def by_steps(bench: Bench, rule: Rule | None, trace: str) -> list[Row]:
    setting, budgets = Setting(trace=trace, rule=rule), {"power": BUDGET_POWER, "cost": BUDGET_COST}
    found = [
        bench.carried(setting, design, design.divisions(budgets[unit], unit))[:2]
        for design, unit in ASKED
    ]
    return _rows(trace, STEPS[rule], found)


def _rows(trace: str, steps: str, found: Sequence[tuple[tuple[int, int], float]]) -> list[Row]:
    """Returns a row for each design, with its rate per power and per cost over those of
    Baseline-A100."""
    per = [
        [rate / design.spent(division, unit) for unit in ("power", "cost")]
        for (design, _), (division, rate) in zip(ASKED, found, strict=True)
    ]
    rows: list[Row] = []
    for (design, unit), (division, rate), values in zip(ASKED, found, per, strict=True):
        machines = " + ".join(str(count) for count in division if count)
        relative = [value / base for value, base in zip(values, per[0], strict=True)]
        name = f"{design.name}, by {unit}" if design is HA else design.name
        rows.append([trace, steps, name, machines, rate, *relative])
    return rows


def goal_of(trace: str) -> Goal:
    """Returns the paper's limits of nine in ten requests as seconds: its slowdowns of an A100
    machine alone, for a prompt longer than nine in ten and for a sequence of mean length."""
    setting = Setting(trace=trace)
    prompts = np.array([item.prompt_tokens for item in setting.workload])
    outputs = np.array([item.output_tokens for item in setting.workload])
    alone = Slowdowns(setting).alone
    first, _ = alone(int(np.quantile(prompts, 0.9)), 1)
    _, token = alone(int(prompts.mean()), int(outputs.mean()))
    return Goal(3.0 * first, dict(REST)[90] * token)


def planned(trace: str) -> list[Row]:
    """Returns the planner's best of each design, by stepping, per power and per cost over those of
    one pool of A100."""
    cards = {
        "A": replace(A, dollars_per_hour=1.0, watts=400.0),
        "H": replace(H, dollars_per_hour=COST, watts=700.0),
        "cap": replace(H, name="h100-cap", dollars_per_hour=COST, watts=CAP * 700.0),
    }
    one, two = (Mode.CHUNKED,), (Mode.DISAGGREGATED,)
    a, h, cap = (Site(card, DEVICES) for card in cards.values())
    asked = (
        ("Baseline-A100", a, one, "joules"),
        ("Baseline-H100", h, one, "joules"),
        ("Splitwise-AA", a, two, "joules"),
        ("Splitwise-HH", h, two, "joules"),
        ("Splitwise-HHcap", replace(h, decoding=cap), two, "joules"),
        ("Splitwise-HA, by power", replace(h, decoding=a), two, "joules"),
        ("Splitwise-HA, by cost", replace(h, decoding=a), two, "dollars"),
    )
    workload = list(Setting(trace=trace).workload)[:: 2000 // PLANNED]
    shape, goal = replace(geometry(MODEL), context_tokens=16_384), goal_of(trace)

    def best_of(site: Site, modes: tuple[Mode, ...], best: Best) -> Finding:
        search = Search(modes=modes, most_requests=PLANNED, best=best)
        planner = Planner(shape, site, goal, FleetMaker(shape, site).runners, search)
        return planner.stepped(workload)[0]

    found = [
        (name, site, best_of(site, modes, best))  # type: ignore[arg-type]
        for name, site, modes, best in asked
    ]
    per = [
        [item.rate / (site.spent(item.candidate, best) or 1.0) for best in ("joules", "dollars")]
        for _, site, item in found
    ]
    return [
        [trace, name, item.candidate.name, *(x / y for x, y in zip(values, per[0], strict=True))]
        for (name, _, item), values in zip(found, per, strict=True)
    ]


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    bench = SteppedBench(100 if small else REQUESTS)
    rows: list[Row] = []
    for trace in TRACES:
        rows += _rows(trace, "cost model, simulated", kept(trace))
        rows += [row for rule in STEPS for row in by_steps(bench, rule, trace)]
    return [
        {
            "title": "BLOOM-176B: requests per second, per power and per cost over Baseline-A100",
            "columns": ["trace", "steps", "design", "machines (prompt + token)",
                        "requests per second", "per power", "per cost"],
            "rows": rows,
        },
        {
            "title": "The planner, with the cost model: per power and per cost over Baseline-A100",
            "columns": ["trace", "design", "best candidate", "per power", "per cost"],
            "rows": [row for trace in TRACES for row in planned(trace)],
        },
    ], bench.runs  # fmt: skip
