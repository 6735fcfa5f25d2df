"""Writes the output of all processes of a cluster to one log on stderr. If configured, also writes
one file for each process.

In text format, each line begins with the name of its process. In JSON format, each line is an
object with a `process` field. A line that is not JSON is put into such an object. On a terminal,
the text log scrolls above a live table of the processes. Without a terminal, or in JSON format, a
line with the figures is written periodically in place of the table."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.observe.logs import say
from jdisagg.settings.folders import made_folder

_PLAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of the process table. `status` is the last status that the router reported, or None
    if the process does not serve."""

    name: str
    state: str
    restarts: int
    status: WorkerStatus | None


class ClusterLog:
    """The cluster's log and process table. `close` ends both. `live`: whether to show a live table.
    It is shown only in text format. Raises ConfigError if the folder cannot be created."""

    def __init__(
        self, live: bool, directory: str | None, title: str, log_format: str = "text"
    ) -> None:
        self._title = title
        self._json = log_format == "json"
        self._directory = made_folder("--cluster_log_dir", directory) if directory else None
        self._files: dict[Path, TextIO] = {}
        self._lost = False
        self._width = 11  # width of a process name such as prefill-0.1
        self._console = Console(stderr=True)
        self._live = (
            Live(console=self._console, auto_refresh=False) if live and not self._json else None
        )
        if self._live:
            self._live.start()
        self._shown_at = time.monotonic()
        self._last_figures = ""

    def write(self, name: str, line: str) -> None:
        """Writes a line of a process. If it cannot be written, for example because a disk is full,
        the line is lost, and the cluster continues."""
        self._width = max(self._width, len(name))
        text = json_line(name, line) if self._json else f"{name:<{self._width}} | {line}"
        if self._live:
            with contextlib.suppress(OSError):
                self._console.print(Text(text), soft_wrap=True)
        else:
            say(text, error=True)
        if self._directory:
            at = "" if self._json else f"{time.strftime('%Y-%m-%d %H:%M:%S')} "
            try:
                self._write_file(
                    self._directory / f"{name}.log", f"{at}{text if self._json else line}"
                )
            except OSError as error:
                if not self._lost:
                    self._lost = True
                    self.write("cluster", f"lines of log files are lost: {name}.log: {error}")

    def _write_file(self, path: Path, line: str) -> None:
        file = self._files.pop(path, None) or path.open("a", encoding="utf-8")
        try:
            file.write(f"{line}\n")
            file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                file.close()  # the next line opens it again
            raise
        self._files[path] = file

    def show(self, instances: Sequence[Shown]) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.update(process_table(self._title, instances), refresh=True)
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


def json_line(process: str, line: str) -> str:
    """Converts an output line to a JSON object, as text, with the field `process`. If `line` is a
    JSON object, the field is added to it. If not, `line` is the message of a new object."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        now = time.time()
        utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        fields = {
            "time": f"{utc}.{int(now % 1 * 1000):03d}Z",
            "level": "INFO",
            "logger": "output",
            "message": line,
        }
    return json.dumps({**fields, "process": process}, ensure_ascii=True)


def process_table(title: str, instances: Sequence[Shown]) -> Table:
    """Returns a table of the processes, at most 80 columns wide. Figures are never truncated."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("process", "role", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("layout", overflow="fold")
    for column in ("run", "wait", "moves", "pages", "preempt", "starts"):
        table.add_column(column, justify="right", no_wrap=True)
    for shown in instances:
        status = shown.status
        if status is None:
            role = "router" if shown.name.startswith("router") else ""
            table.add_row(shown.name, role, shown.state, *[""] * 6, str(shown.restarts))
            continue
        figures = (
            f"{status.running}/{status.slots}",
            status.waiting,
            status.handoffs,
            _pages(status),
            status.preemptions,
            shown.restarts,
        )
        layout = status.layout.replace(",ep=1", "")
        table.add_row(
            shown.name, status.role.value, _state(shown, status), layout, *map(str, figures)
        )
    return table


def _state(shown: Shown, status: WorkerStatus) -> str:
    return "draining" if status.draining else shown.state


def _figures(shown: Shown) -> str:
    status = shown.status
    if status is None:
        return f"{shown.name} {shown.state}"
    return (
        f"{shown.name} {status.running} running, {status.waiting} waiting, {_pages(status)} pages"
    )


def _pages(status: WorkerStatus) -> str:
    total = sum(status.total_pages)
    return f"{total - sum(status.free_pages)}/{total}"
