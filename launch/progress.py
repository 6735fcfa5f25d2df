"""Progress bars of the pages, on stderr, and only where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


def counted(label: str, *more: ProgressColumn) -> Progress:
    """A bar with how many of how many are done, and `more` columns behind."""
    return progress(TextColumn(label), BarColumn(), MofNCompleteColumn(), *more)


def progress(*columns: ProgressColumn) -> Progress:
    return Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


@contextmanager
def described() -> Iterator[Callable[[str, int, int], None]]:
    """A bar whose total and text change: gives what tells it (text, done, total)."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=None)
        yield lambda said, done, total: bar.update(
            task, description=said, completed=done, total=total
        )
