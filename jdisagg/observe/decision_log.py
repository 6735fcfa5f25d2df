"""Writes the router's placement decisions to a file, one JSON object per line.
`router.decision_record.replay` can repeat each decision.

    with DecisionLog("decisions.jsonl") as log:
        RequestPath(..., settings=PlacerSettings(events=log))

If a write fails, the error is logged once and recording ends. The router continues."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from jdisagg.dispatch.router_events import NoRouterEvents
from jdisagg.errors import ConfigError
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import PlacementOutcome, PlacementPolicy, PlacementQuery
from jdisagg.router.decision_record import record_of

_log = logging.getLogger(__name__)


class DecisionLog(NoRouterEvents):
    """Appends each placement decision to a file. Raises ConfigError if the file cannot be
    opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ConfigError(
                f"decision log {path!r} cannot be written ({error}); name a file in a folder that"
                " exists"
            ) from error
        self.failed = False

    def answered(
        self,
        state: ClusterState,
        query: PlacementQuery,
        now: float,
        policy: PlacementPolicy,
        answer: PlacementOutcome,
    ) -> None:
        if self.failed:
            return
        try:
            self._file.write(
                json.dumps(
                    record_of(state, query, now, policy, answer),
                    allow_nan=False,
                    separators=(",", ":"),
                )
                + "\n"
            )
            self._file.flush()
        except (OSError, ValueError) as error:
            self.failed = True
            _log.warning("decision log %s: %s; recording stopped", self._path, error)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a decision log. An incomplete last line, whose writing was interrupted,
    is skipped. Raises ConfigError if the file cannot be read or a line is not a JSON object."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"decision log {path!r} cannot be read ({error}); give one that --decision_log wrote"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ConfigError(
                f"decision log {path!r}, line {number}: {error}; give one that --decision_log wrote"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"decision log {path!r}, line {number} holds a {type(record).__name__}, not an"
                " object"
            )
        yield record
