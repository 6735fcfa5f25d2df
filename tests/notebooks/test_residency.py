"""The notebook of KV that stays: what is committed was run, and a run says what is committed."""

import nbformat
import pytest

from tests.notebooks.runs import ROOT, code_cells, executed, figures, printed

NOTEBOOK = ROOT / "notebooks" / "residency.ipynb"


def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small() -> None:
    code = code_cells(NOTEBOOK)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert figures(code) == 3
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> list[nbformat.NotebookNode]:
    return executed(NOTEBOOK, tmp_path_factory.mktemp("notebook"))


@pytest.mark.ci
def test_the_notebook_runs_and_draws_its_figures(fresh: list[nbformat.NotebookNode]) -> None:
    assert figures(fresh) == 3
    assert not any(printed(cell, "stderr") for cell in fresh), "no warning reaches the reader"


@pytest.mark.ci
def test_the_committed_texts_are_what_everybody_gets(fresh: list[nbformat.NotebookNode]) -> None:
    """Where each turn's tokens came from among them. Cells tagged "timings" print what differs from
    run to run."""
    for committed, cell in zip(code_cells(NOTEBOOK), fresh, strict=True):
        if "timings" not in cell.metadata.get("tags", ()):
            assert printed(cell, "stdout") == printed(committed, "stdout"), cell.source
