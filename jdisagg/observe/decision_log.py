"""Writes the router's placement decisions to a file, one JSON object per line.

    with DecisionLog("decisions.jsonl") as log:
        RequestPath(..., settings=PlacerSettings(events=log))

A line has the time on the router's clock, what was asked (`PlacementQuery`), and the answer under
`decision` or `refusal`. Infinite limits are null. It contains lengths and worker names, but neither
token ids nor the names of tenants. If a write fails, the error is logged once and recording ends.
The router continues."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from jdisagg.errors import ConfigError
from jdisagg.router.decision import NoRouterEvents, PlacementOutcome, PlacementQuery

_log = logging.getLogger(__name__)


class DecisionLog(NoRouterEvents):
    """Appends each placement decision to a file. Raises ConfigError if the file cannot be
    opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = Path(path).expanduser().open("ab")
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home
            raise ConfigError(
                f"decision log {path!r} cannot be written ({error}); name a file in a folder that"
                " exists"
            ) from error
        self.failed = False

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        if self.failed:
            return
        entry = {"now": now, "query": query, type(answer).__name__.lower(): answer}
        try:
            self._file.write(msgspec.json.encode(entry, enc_hook=_plain) + b"\n")
            self._file.flush()
        except OSError as error:
            self.failed = True
            _log.warning("decision log %s: %s; recording stopped", self._path, error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, at which the last line is tried again
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> dict[str, int] | float:
    return dict(value) if isinstance(value, Mapping) else float(value)
