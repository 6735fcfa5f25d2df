"""Progress bars of the pages, on stderr, and only where that is a terminal."""

import sys
from collections.abc import Iterator
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


class DescribedBar:
    """A bar whose total and text change, and lines above it that stay."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("", total=None)

    def show(self, said: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=said, completed=done, total=total)

    def line(self, text: str) -> None:
        """Also where stderr is no terminal, and there never folded."""
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, highlight=False, markup=False)


@contextmanager
def described() -> Iterator[DescribedBar]:
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with progress(*columns, TextColumn("{task.description}")) as bar:
        yield DescribedBar(bar)
