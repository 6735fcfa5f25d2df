"""The notebook runs from top to bottom, in a process of its own, and what is committed is what it shows."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "notebooks" / "first_steps.ipynb"


def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small() -> None:
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert figures(code) == 4
    assert NOTEBOOK.stat().st_size < 300_000


def test_the_notebook_runs_and_draws_its_figures(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="the notebooks extra is not installed")
    command = [sys.executable, "-m", "tests.notebooks.execute", str(NOTEBOOK), str(tmp_path / "executed.ipynb")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    code = [cell for cell in nbformat.read(tmp_path / "executed.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert figures(code) == 4
    said = [output.text for cell in code for output in cell.outputs if output.output_type == "stream" and output.name == "stderr"]
    assert not said, "no warning reaches the reader"


def figures(cells: list[nbformat.NotebookNode]) -> int:
    outputs = [output for cell in cells for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)
