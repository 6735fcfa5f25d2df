"""The study: its choice of runs, and the committed page follows from the committed results."""

import json
from pathlib import Path

import pytest

from benchmarks import study_report
from benchmarks.study_cases import CASES
from benchmarks.study_runs import LADDER, as_text, from_text, next_rung
from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.candidates import Candidate

RESULTS = Path(__file__).resolve().parents[1] / "results"


def a_case(rates: dict[str, list[tuple[float, float]]]) -> dict[str, object]:
    return {
        "limits": {"usual": [1.0, 0.05, None]},
        "curves": {
            f"{mode}: {mode}-{index}": {
                "mode": mode,
                "name": f"{mode}-{index}",
                "runs": [
                    {"per_accelerator": rate, "attainment": {"usual": met}} for rate, met in points
                ],
            }
            for index, (mode, points) in enumerate(rates.items())
        },
    }


def test_goodput_lies_where_the_curve_crosses_ninety_percent_and_says_when_it_never_does() -> None:
    case = a_case(
        {
            "unified": [(1, 1.0), (2, 0.8)],
            "chunked": [(1, 0.5), (2, 0.1)],
            "disaggregated": [(1, 1.0), (2, 0.95)],
        }
    )
    found = {mode: study_report.best_of(case, mode, "usual") for mode in study_report.MODES}
    assert [best.shown for best in found.values() if best] == ["1.5", "0", "> 2"]
    assert study_report.table(case)[2].endswith("| +33 % or so (unified) |")
    assert study_report.best_of(a_case({"unified": []}), "unified", "usual") is None


@pytest.mark.parametrize("crossing", [0.01, 0.07, 0.4, 0.97, 9.0])
@pytest.mark.parametrize("estimate", [0.0, 0.3, 1.2])
def test_of_a_curve_the_rungs_on_both_sides_of_its_crossing_are_run_and_few_besides(
    crossing: float, estimate: float
) -> None:
    runs: list[dict[str, object]] = []
    while (part := next_rung(runs, "usual", estimate)) is not None:
        runs.append({"part": part, "attainment": {"usual": 0.97 if part <= crossing else 0.4}})
    kept = max((part for part in LADDER if part <= crossing), default=None)
    missed = min((part for part in LADDER if part > crossing), default=None)
    assert {kept, missed} - {None} <= {run["part"] for run in runs}
    assert len(runs) <= len(LADDER) and len({run["part"] for run in runs}) == len(runs)
    if kept and estimate == 0.3 and crossing == 0.4:
        assert len(runs) <= 3


@pytest.mark.slow
def test_every_layout_and_chunk_of_one_pool_is_a_rival_and_the_best_under_each_limit_are_run() -> (
    None
):
    """Llama on 16 H100, Azure's conversation: tp4 carries most, and tp8 stands beside it with the
    chunk that is best for it under each limit."""
    chosen = CASES[0].candidates
    chunked = [item for item in chosen if item.mode is Mode.CHUNKED]
    assert {item.decode for item in chunked} == {Layout(tp=4), Layout(tp=8)}
    modes = {item.mode for item in chosen}
    assert modes == {Mode.UNIFIED, Mode.CHUNKED, Mode.DISAGGREGATED}
    assert CASES[0].maker.fused


def test_a_candidate_is_written_and_read_back() -> None:
    for candidate in (
        Candidate(Mode.DISAGGREGATED, Layout(dp=4, tp=1, ep=4), 2, 8192, Layout(tp=4), 3),
        Candidate(Mode.CHUNKED, Layout(tp=8), 2, 512),
    ):
        assert from_text(as_text(candidate)) == candidate


@pytest.mark.ci
def test_the_committed_page_is_what_the_committed_results_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")
    results = json.loads((RESULTS / "study.json").read_text())
    assert set(results["cases"]) <= {case.name for case in CASES}
    page = study_report.page(results, tmp_path, study_report.WORDS.read_text())
    assert page == (RESULTS / "study.md").read_text()
    for picture in tmp_path.iterdir():
        assert (RESULTS / picture.name).exists()
