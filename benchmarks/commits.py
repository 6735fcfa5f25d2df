"""Which commit a figure is of. Imports nothing heavy, so that what only simulates can ask."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The working tree's, short; "unknown" where there is no repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
