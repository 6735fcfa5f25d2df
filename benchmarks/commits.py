"""Which commit a figure is of. Imports nothing heavy, so that what only simulates can ask."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The working tree's, short; "unknown" where there is no repository."""
    return _git("rev-parse", "--short", "HEAD") or "unknown"


def subject(name: str) -> str:
    """Day and first line of a commit's message, by which it is found again where a history was
    written anew and its id is gone; "" where this repository does not know it."""
    return _git("log", "-1", "--format=%cs %s", name)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
