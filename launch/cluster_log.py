"""One log of all processes: each line behind its process's name, on stderr, and in a file of its own for each where asked.

On a terminal the log scrolls above a live table of the instances; else it is plain lines, with a line of figures now and then.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.folders import made_folder

_PLAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Shown:
    """One instance as the table shows it; `status` is what the router knows of it."""

    name: str
    state: str
    restarts: int
    status: WorkerStatus | None


class ClusterLog:
    """`write` lines, `show` instances; `close` when all has ended. Raises ConfigError for a `directory` that cannot be made."""

    def __init__(self, live: bool, directory: str | None, title: str) -> None:
        self._title = title
        self._directory = made_folder("--cluster_log_dir", directory) if directory else None
        self._files: dict[str, TextIO] = {}
        self._width = 10
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if live else None
        if self._live:
            self._live.start()
        self._shown_at = time.monotonic()
        self._last_figures = ""

    def write(self, name: str, line: str) -> None:
        self._width = max(self._width, len(name))
        if self._live:
            self._console.print(Text(f"{name:<{self._width}} | {line}"), soft_wrap=True)
        else:
            print(f"{name:<{self._width}} | {line}", file=sys.stderr, flush=True)
        if self._directory:
            if name not in self._files:
                self._files[name] = (self._directory / f"{name}.log").open("a", encoding="utf-8")
            file = self._files[name]
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
            file.flush()

    def show(self, instances: Sequence[Shown]) -> None:
        if self._live:
            self._live.update(_table(self._title, instances), refresh=True)
        elif time.monotonic() - self._shown_at >= _PLAIN_SECONDS:
            figures = "; ".join(_figures(shown) for shown in instances)
            if figures != self._last_figures:
                self.write("cluster", figures)
            self._shown_at, self._last_figures = time.monotonic(), figures

    def close(self) -> None:
        if self._live:
            self._live.stop()
        for file in self._files.values():
            file.close()


def _table(title: str, instances: Sequence[Shown]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("instance", "state", "layout"):
        table.add_column(column)
    for column in ("running", "waiting", "slots", "hand-offs", "pages used", "preempted", "restarts"):
        table.add_column(column, justify="right")
    for shown in instances:
        status = shown.status
        if status is None:
            table.add_row(shown.name, shown.state, *[""] * 7, str(shown.restarts))
            continue
        figures = (status.running, status.waiting, status.slots, status.handoffs, _pages(status), status.preemptions, shown.restarts)
        table.add_row(shown.name, _state(shown, status), status.layout, *map(str, figures))
    return table


def _state(shown: Shown, status: WorkerStatus) -> str:
    if status.draining:
        return "draining"
    return f"{shown.state}, loads" if status.loading_seconds else shown.state


def _figures(shown: Shown) -> str:
    status = shown.status
    if status is None:
        return f"{shown.name} {shown.state}"
    return f"{shown.name} {status.running} running, {status.waiting} waiting, {_pages(status)} pages"


def _pages(status: WorkerStatus) -> str:
    total = sum(status.total_pages)
    return f"{total - sum(status.free_pages)}/{total}"
