"""The rows of one part. Each row is run, measured and written to the file at once, even if it
fails."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdisagg.node.accelerators import accelerators_of_host

Figures = Mapping[str, Any]
ERROR_CHARACTERS = 2000


@dataclass
class Day:
    """One part in progress.

    Args:
        part: Name of the part.
        out: Folder for `PART.json` and other files of the part.
        small: Whether to use sizes for a CPU, so that every row can be tried on any machine.
        seconds: Time after which no further row is started.
        only: Regular expression; rows whose names do not match it are left out."""

    part: str
    out: Path
    small: bool
    seconds: float
    only: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        return self.out / f"{self.part}.json"

    @property
    def left(self) -> float:
        """Returns the seconds left, at least 0."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def tpu(self) -> bool:
        """Whether the device is a TPU. Opens no device, because children need it whole."""
        return not self.small and accelerators_of_host().kind == "tpu"

    def row(
        self, name: str, measure: Callable[[], Figures], *, gpu: bool = False, shares: bool = False
    ) -> None:
        """Runs `measure` and keeps its figures, or its error, as a row.

        Args:
            gpu: The row has a meaning on a GPU only.
            shares: Two processes share the device, which a TPU does not allow.
        """
        if not re.search(self.only, name):
            return None
        if gpu and (self.small or self.tpu):
            return self._keep(name, 0.0, {"skipped": "only on a GPU"})
        if shares and self.tpu:
            return self._keep(name, 0.0, {"skipped": "a TPU chip belongs to one process"})
        if not self.left:
            return self._keep(name, 0.0, {"skipped": f"the part's {self.seconds:g} s were over"})
        started = time.monotonic()
        try:
            figures = dict(measure())
        except BaseException as error:
            last = traceback.format_exc()[-ERROR_CHARACTERS:]
            self._keep(name, time.monotonic() - started, {"error": repr(error)[:300], "at": last})
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            self._keep(name, time.monotonic() - started, figures)
        return None

    def write(self, machine: Mapping[str, object]) -> None:
        """Writes the description of the machine at the head of the file."""
        self._machine = dict(machine)
        self._write()

    _machine: dict[str, object] = field(default_factory=dict, init=False)

    def _keep(self, name: str, seconds: float, figures: Figures) -> None:
        row = {"row": name, **figures, "seconds": round(seconds, 2)}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self._write()

    def _write(self) -> None:
        """Writes the whole file by a rename, so that a killed part leaves its complete rows."""
        text = json.dumps({"machine": self._machine, "rows": self.rows}, indent=1, default=str)
        with _replaced(self.path) as file:
            file.write_text(text + "\n")


def run_whole(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, log: Path
) -> int:
    """Runs a command whose output goes to `log`, and returns its exit status. Ends the command's
    own children too, which would otherwise keep the device's memory.

    Raises:
        subprocess.TimeoutExpired: The command runs longer than `seconds`.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(timeout=max(1.0, seconds))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    yield new
    os.replace(new, path)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a line for each row: name, outcome and figures."""
    lines = []
    for row in rows:
        figures = {key: value for key, value in row.items() if key not in ("row", "seconds", "at")}
        state = next((word for word in ("error", "skipped") if word in figures), "done")
        shown = "  ".join(f"{key} {_short(value)}" for key, value in figures.items())
        lines.append(f"{row['row']:44s} {state:7s} {row['seconds']:7.1f} s  {shown}")
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]
