"""The notebook runs from top to bottom, in a process of its own, and what is committed is what it shows."""

from pathlib import Path

from tests.notebooks.runs import ROOT, code_cells, executed, figures

NOTEBOOK = ROOT / "notebooks" / "first_steps.ipynb"


def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small() -> None:
    code = code_cells(NOTEBOOK)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert figures(code) == 4
    assert NOTEBOOK.stat().st_size < 300_000


def test_the_notebook_runs_and_draws_its_figures(tmp_path: Path) -> None:
    code = executed(NOTEBOOK, tmp_path)
    assert figures(code) == 4
    said = [output.text for cell in code for output in cell.outputs if output.output_type == "stream" and output.name == "stderr"]
    assert not said, "no warning reaches the reader"
