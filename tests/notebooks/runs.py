"""What the tests of all notebooks share: the cells of one as it is committed, of one that was
executed anew, and what they drew."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent


def code_cells(notebook: Path) -> list[nbformat.NotebookNode]:
    return [
        cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"
    ]


def executed(notebook: Path, folder: Path) -> list[nbformat.NotebookNode]:
    """Runs it in a process of its own, from top to bottom, and keeps the result in `folder`; skips
    where the extra is not installed."""
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="the notebooks extra is not installed")
    command = [
        sys.executable,
        "-m",
        "tests.notebooks.execute",
        str(notebook),
        str(folder / "executed.ipynb"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return code_cells(folder / "executed.ipynb")


def figures(cells: list[nbformat.NotebookNode]) -> int:
    outputs = [output for cell in cells for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def printed(cell: nbformat.NotebookNode, stream: str) -> str:
    return "".join(
        output.text
        for output in cell.outputs
        if output.output_type == "stream" and output.name == stream
    )
