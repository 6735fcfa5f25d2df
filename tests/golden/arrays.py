"""Reads the arrays of a fixture."""

from pathlib import Path

import numpy as np


def arrays_of(file: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file, which is closed."""
    with np.load(file) as found:
        return dict(found)
