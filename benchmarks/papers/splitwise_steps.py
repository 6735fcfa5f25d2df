"""Why Splitwise ranks its designs otherwise than we do: the same comparison with three kinds of
steps, and the planner's answer.

The step times are those of our cost model, those that Splitwise measured, and those that its own
simulator makes of its measurements (`step_table`). All else stays as in `splitwise`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers.runs import read
from benchmarks.papers.splitwise import (
    BASELINES,
    BUDGET_COST,
    BUDGET_POWER,
    CAP,
    COST,
    REST,
    A,
    Bench,
    H,
    Setting,
    Slowdowns,
    compared,
)
from benchmarks.papers.step_table import MODEL
from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Best, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.workloads import Arrival

A100 = BASELINES[0].name
STEPS = {"sequences": "measured", "tokens": "as its simulator reads them"}
DEVICES = 64  # of each kind, for the planner
PLANNED = 400  # requests of a trace, for the planner
TRACES = ("conversation", "code")


def kept(unit: str) -> list[list[object]]:
    """Returns the rows of the cost model, which the study `splitwise` has."""
    tables: Sequence[dict[str, object]] = read("splitwise")["tables"]  # type: ignore[assignment]
    rows: list[list[object]] = tables[0 if unit == "power" else 1]["rows"]  # type: ignore[assignment]
    return [["cost model", *row] for row in rows]


def by_steps(bench: Bench, unit: str) -> list[list[object]]:
    rows = kept(unit)
    for rule, said in STEPS.items():
        for trace in TRACES:
            setting = Setting(trace=trace, rule=rule)  # type: ignore[arg-type]
            rows += [[said, *row] for row in compared(bench, setting, unit)[0]]
    return rows


def goal_of(trace: str) -> Goal:
    """Returns the paper's limits of nine in ten requests as seconds: those of the slowdowns of an
    A100 machine alone, for a prompt longer than nine in ten and for a sequence of mean length."""
    setting = Setting(trace=trace)
    prompts = np.array([item.prompt_tokens for item in setting.workload])
    outputs = np.array([item.output_tokens for item in setting.workload])
    alone = Slowdowns(setting).alone
    first, _ = alone(int(np.quantile(prompts, 0.9)), 1)
    _, token = alone(int(prompts.mean()), int(outputs.mean()))
    return Goal(3.0 * first, dict(REST)[90] * token)


def planned(trace: str, best: Best) -> list[tuple[str, Finding]]:
    """Returns the planner's best for each design, and for one pool of each kind, by stepping."""
    per = DEVICES // 8
    cards = {
        "A": replace(A, dollars_per_hour=1.0 / 8, watts=400.0),
        "H": replace(H, dollars_per_hour=COST / 8, watts=700.0),
        "cap": replace(H, name="h100-cap", dollars_per_hour=COST / 8, watts=CAP * 700.0),
    }
    sites = {name: Site(card, 8 * per) for name, card in cards.items()}
    half = {name: replace(site, accelerators=4 * per) for name, site in sites.items()}
    two, one = (Mode.DISAGGREGATED,), (Mode.CHUNKED,)
    asked = (
        ("Baseline-A100", sites["A"], one),
        ("Baseline-H100", sites["H"], one),
        ("Splitwise-AA", sites["A"], two),
        ("Splitwise-HH", sites["H"], two),
        ("Splitwise-HA", replace(half["H"], decoding=sites["A"]), two),
        ("Splitwise-HHcap", replace(half["H"], decoding=sites["cap"]), two),
    )
    workload: list[Arrival] = list(Setting(trace=trace).workload)[:: 2000 // PLANNED]
    shape = replace(geometry(MODEL), context_tokens=16_384)
    found = []
    for name, site, modes in asked:
        maker = FleetMaker(shape, site)
        search = Search(modes=modes, most_requests=PLANNED, best=best)
        planner = Planner(shape, site, goal_of(trace), maker.runners, search)
        found.append((name, planner.stepped(workload)[0]))
    return found


def answers() -> list[list[object]]:
    rows: list[list[object]] = []
    for trace in TRACES:
        for best in ("joules", "dollars"):
            found = planned(trace, best)
            base = dict(found)[A100].value
            rows += [
                [trace, best, name, item.candidate.name, item.value / base] for name, item in found
            ]
    return rows


def tables(small: bool) -> tuple[list[dict[str, object]], int]:
    bench = Bench(100 if small else 800)
    columns = ["steps", "trace", "design", "machines (prompt + token)", "power", "cost",
               "requests per second", "over Baseline-A100", "over Baseline-H100",
               "breaks first"]  # fmt: skip
    return [
        {
            "title": f"The same power, {BUDGET_POWER:g} A100 machines' (BLOOM-176B)",
            "columns": columns,
            "rows": by_steps(bench, "power"),
        },
        {
            "title": f"The same cost, {BUDGET_COST:.1f} A100 machines' (BLOOM-176B)",
            "columns": columns,
            "rows": by_steps(bench, "cost"),
        },
        {
            "title": "The planner, with the cost model: requests per joule and per dollar, over "
            "Baseline-A100",
            "columns": ["trace", "per", "design", "best", "over Baseline-A100"],
            "rows": answers(),
        },
    ], bench.runs  # fmt: skip
