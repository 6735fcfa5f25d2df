"""Progress bars on stderr, shown only on a terminal."""

import sys
import time
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

from jdisagg.simulator.planning.planner import Told


def counted(label: str, *more: ProgressColumn) -> Progress:
    return progress(TextColumn(label), BarColumn(), MofNCompleteColumn(), *more)


def progress(*columns: ProgressColumn) -> Progress:
    return Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


class Aloud(Told):
    """Prints the planner's preliminary results and their times above a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("", total=None)
        self._began = time.monotonic()

    def progress(self, text: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=text, completed=done, total=total)

    def answer(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(line, highlight=False, markup=False)


@contextmanager
def aloud() -> Iterator[Aloud]:
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with progress(*columns, TextColumn("{task.description}")) as bar:
        yield Aloud(bar)
