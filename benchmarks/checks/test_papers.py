"""Replications of published studies (benchmarks/papers): pages match their results, some results
match the code, and the search agrees with closed forms."""

import json
from collections.abc import Callable

import pytest

from benchmarks import sensitivity
from benchmarks.papers import splitwise
from benchmarks.papers.__main__ import STUDIES
from benchmarks.papers.runs import RESULTS, TOLERANCE, highest, page, read, words
from benchmarks.papers.step_table import StepTable
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
    found = splitwise.Slowdowns(setting).kept(outcomes, setting.rest)
    for percent, most in splitwise.FIRST:
        assert found[f"TTFT P{percent}"] * most == pytest.approx(1.0, abs=0.05)
    for percent, most in setting.rest:
        assert found[f"E2E P{percent}"] * most == pytest.approx(1.0, abs=0.05)


def test_measured_steps_are_interpolated_and_those_of_the_papers_simulator_ignore_the_batch() -> (
    None
):
    """An A100 machine: 65.38 and 96.58 ms for 32 and 64 sequences of 512 tokens, 49.31 ms for one,
    51.30 ms for one of 8,192; 540.4 ms for 2,048 tokens of prompt."""
    table = StepTable("a100-80gb", "sequences")
    assert table.decode(48, 48 * 512, 1).first == pytest.approx((65.38e-3 + 96.58e-3) / 2, abs=1e-4)
    longer = table.decode(1, 8192, 1).first - table.decode(1, 512, 1).first
    assert longer == pytest.approx(51.30e-3 - 49.31e-3, abs=1e-4)
    assert table.prefill([(1024, 0), (1024, 0)])[0] == pytest.approx(0.5286, abs=0.013)
    one, many = (StepTable("a100-80gb", "tokens").decode(n, 512 * n, 1).first for n in (1, 64))
    assert many == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("case", sensitivity.CASES, ids=lambda case: case.model)
def test_a_committed_verdict_on_two_pools_is_what_the_planner_gives(case: sensitivity.Case) -> None:
    """Prompts of 8,000 tokens over InfiniBand: two pools win for the dense model, one pool for the
    mixture of experts."""
    committed = json.loads((RESULTS / "sensitivity.json").read_text())[case.name]["cells"]
    known = committed["8000/250 over infiniband-ndr"]
    found = sensitivity.cell_of(case, 8000, "infiniband-ndr")
    assert found.verdict == known["verdict"]
    assert found.two / found.one == pytest.approx(known["two_over_one"], rel=0.02)
