"""Executes a notebook with this Python as its kernel and writes it with its outputs; a failing cell
ends with its traceback.

    python -m tests.notebooks.execute notebooks/first_steps.ipynb [DESTINATION]

Without a destination the notebook is written in place: so its committed outputs are refreshed."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests import time_scale

CELL_SECONDS = time_scale.seconds(600)


def execute(source: Path, destination: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    # The notebook chooses its own number of virtual devices; JAX refuses to be told twice.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    resources = {"metadata": {"path": str(source.parent)}}
    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources
    ).execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    nbformat.write(notebook, destination)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[-1]))
