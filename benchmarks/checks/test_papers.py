"""Replications of published studies (benchmarks/papers): pages match their results, some results
match the code, and the search agrees with closed forms."""

from collections.abc import Callable

import pytest

from benchmarks.papers import splitwise
from benchmarks.papers.__main__ import STUDIES
from benchmarks.papers.runs import RESULTS, TOLERANCE, highest, page, read, words
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival


def row(study: str, table: int, *begins: object) -> list[object]:
    """Returns the one row of a study's table that starts with these cells."""
    tables = read(study)["tables"]
    rows: list[list[object]] = tables[table]["rows"]  # type: ignore[index]
    (found,) = [one for one in rows if one[: len(begins)] == list(begins)]
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_the_committed_page_is_what_the_results_give(study: str) -> None:
    assert (RESULTS / f"papers_{study}.md").read_text() == page(read(study), words(study))


def crosses(attained: Callable[[float], float], rate: float, wanted: float) -> bool:
    """Returns whether the committed rate attains the goal and one beyond the search's tolerance
    does not."""
    return attained(rate) >= wanted > attained(rate * (1 + 2 * TOLERANCE))


def test_a_committed_rate_of_splitwise_is_what_the_code_gives() -> None:
    found = row("splitwise", 0, "code", "Baseline-H100")
    bench = splitwise.Bench(800)

    def kept(rate: float) -> float:
        setting, design = splitwise.Setting(trace="code"), splitwise.BASELINES[1]
        limits = bench.limits(setting, design, (0, int(str(found[2]))), rate)
        return float(max(limits.values()) <= 1)

    assert crosses(kept, float(found[5]), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("guess", [0.5, 3.0, 20.0])
def test_the_highest_rate_that_is_met_is_found_within_the_tolerance(guess: float) -> None:
    found = highest(lambda rate: rate <= 3.3, guess)
    assert 3.3 / (1 + TOLERANCE) <= found <= 3.3
    assert highest(lambda rate: rate <= 3.3, guess, above=3.0) >= 3.0 * (1 + TOLERANCE)
    assert highest(lambda rate: rate <= 3.3, guess, above=3.2) == 0.0


@pytest.mark.parametrize("unit", ["power", "cost"])
def test_every_division_of_a_design_keeps_within_its_budget(unit: str) -> None:
    budget = splitwise.BUDGET_POWER if unit == "power" else splitwise.BUDGET_COST
    for design in (*splitwise.TOLD, splitwise.HH):
        for division in design.divisions(budget, unit):
            assert budget - 2.2 < design.spent(division, unit) <= budget + 1e-9


def test_a_request_alone_on_an_a100_machine_is_not_slowed() -> None:
    """Each slowdown is 1, divided by the allowed slowdown. The first step, which is issued behind
    no other, and rounded contexts leave a few percent."""
    setting, design = splitwise.Setting(), splitwise.BASELINES[0]
    outcomes = simulate(setting.fleet(design, (0, 1)), [Arrival(0.0, 1500, 200)]).outcomes
    found = splitwise.Slowdowns(setting.model).kept(outcomes, setting.rest)
    for percent, most in splitwise.FIRST:
        assert found[f"TTFT P{percent}"] * most == pytest.approx(1.0, abs=0.05)
    for percent, most in setting.rest:
        assert found[f"E2E P{percent}"] * most == pytest.approx(1.0, abs=0.05)
