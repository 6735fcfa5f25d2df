"""Each notebook runs from top to bottom in its own process and shows its committed outputs."""

from pathlib import Path

import nbformat
import pytest

from tests.notebooks.runs import ROOT, code_cells, executed, figures, printed

FOLDER = ROOT / "notebooks"
# name -> figures, and the cap on the file's bytes
NOTEBOOKS = {
    "first_steps": (4, 300_000),
    "policy_gradient": (1, 100_000),
    "residency": (3, 200_000),
    "serving": (2, 200_000),
    "study": (8, 400_000),
}
# Slow: they run servers, which compile all their programs unless the cache has them.
SLOW = ("policy_gradient", "residency", "serving", "study")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small(name: str) -> None:
    drawn, most_bytes = NOTEBOOKS[name]
    code = code_cells(FOLDER / f"{name}.ipynb")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert figures(code) == drawn
    assert (FOLDER / f"{name}.ipynb").stat().st_size < most_bytes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.ci)
        for name in NOTEBOOKS
    ],
)
def test_a_run_draws_the_figures_and_prints_the_committed_texts(name: str, tmp_path: Path) -> None:
    """Texts of cells tagged "timings" differ from run to run."""
    if name == "serving":
        pytest.importorskip("openai", reason="the notebooks extra is not installed")
    notebook = FOLDER / f"{name}.ipynb"
    fresh: list[nbformat.NotebookNode] = executed(notebook, tmp_path)
    assert figures(fresh) == NOTEBOOKS[name][0]
    if name == "study":  # its texts come from committed results
        return
    assert not any(printed(cell, "stderr") for cell in fresh), "no warning reaches the reader"
    for committed, cell in zip(code_cells(notebook), fresh, strict=True):
        if "timings" not in cell.metadata.get("tags", ()):
            assert printed(cell, "stdout") == printed(committed, "stdout"), cell.source
