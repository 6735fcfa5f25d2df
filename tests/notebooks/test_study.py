"""The study: the committed page and notebook are what the committed results say, and the notebook
runs."""

import json
from pathlib import Path

import pytest

from benchmarks import study_report
from benchmarks.study_cases import CASES
from benchmarks.study_runs import as_text, from_text
from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.plan_candidates import Candidate
from tests.notebooks.runs import ROOT, code_cells, executed, figures

NOTEBOOK = ROOT / "notebooks" / "study.ipynb"
RESULTS = ROOT / "benchmarks" / "results"


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
    assert study_report.table(case)[2].endswith("| +33 % or so |")
    assert study_report.best_of(a_case({"unified": []}), "unified", "usual") is None


def test_a_candidate_is_written_and_read_back() -> None:
    for candidate in (
        Candidate(Mode.DISAGGREGATED, Layout(dp=4, tp=1, ep=4), 2, 8192, Layout(tp=4), 3),
        Candidate(Mode.CHUNKED, Layout(tp=8), 2, 512),
    ):
        assert from_text(as_text(candidate)) == candidate


def test_the_committed_page_is_what_the_committed_results_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")
    results = json.loads((RESULTS / "study.json").read_text())
    assert set(results["cases"]) <= {case.name for case in CASES}
    page = study_report.page(results, tmp_path, study_report.WORDS.read_text())
    assert page == (RESULTS / "study.md").read_text()
    for picture in tmp_path.iterdir():
        assert (RESULTS / picture.name).exists()


def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small() -> None:
    code = code_cells(NOTEBOOK)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert figures(code) >= 2
    assert NOTEBOOK.stat().st_size < 400_000


@pytest.mark.slow
def test_the_notebook_runs_and_draws_its_figures(tmp_path: Path) -> None:
    code = executed(NOTEBOOK, tmp_path)
    assert figures(code) >= 2
