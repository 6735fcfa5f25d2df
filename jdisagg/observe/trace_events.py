"""Timelines: spans in the Trace Event Format for https://ui.perfetto.dev and chrome://tracing.

`TraceEventExporter` is an OpenTelemetry exporter. It stores a process's newest spans in a ring
buffer and writes them to a file that viewers open directly. `merge` joins the files of several
processes.

In the timeline of a process, each request that it served has a row, and each mesh has a row with
all its commands. The format requires that complete events ("X") of one `tid` are nested or do not
overlap. Events of a row that overlap in another way are therefore put into several lanes, each with
its own `tid` and name. Times are whole microseconds since the epoch, or since the first event in a
merged trace. Nested events stay nested when times are rounded. Processes are aligned by wall clock.
The alignment is exact within a host. Between hosts it is as accurate as their clock
synchronization."""

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from jdisagg.errors import ConfigError

CAPACITY_EVENTS = 1 << 17
FILE_SUFFIX = ".timeline.json"

Value = str | int | float | bool


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """An event in the Trace Event Format. `ph` is X for a complete event (with `dur`), i for an
    instant, and M for metadata."""

    name: str
    ph: str
    pid: int
    tid: int
    args: dict[str, Value]
    ts: int | None = None
    dur: int | None = None
    cat: str = ""
    s: str = ""


class Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]
    displayTimeUnit: str = "ms"


class _Kept(NamedTuple):
    """A stored span and the row in which it is drawn. Times are in microseconds. `ended` is None
    for an instant."""

    row: str
    name: str
    started: int
    ended: int | None
    args: dict[str, Value]


class TraceEventExporter(SpanExporter):
    """Span exporter that stores the newest spans of a process. `write` may be called at any time
    from any thread.

    Args:
        process: Name of the process.
        capacity_events: Largest number of spans to store.
    """

    def __init__(self, process: str, capacity_events: int = CAPACITY_EVENTS) -> None:
        self.process = process
        self._kept: deque[_Kept] = deque(maxlen=capacity_events)

    def __len__(self) -> int:
        return len(self._kept)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            args: dict = dict(span.attributes or {})
            track, instant = args.pop("track", ""), args.pop("instant", False)
            request = args.get("request")
            row = track or (f"request {request}" if request else "unattributed")
            started = round((span.start_time or 0) / 1000)
            ended = None if instant else round((span.end_time or 0) / 1000)
            self._kept.append(_Kept(row, span.name, started, ended, args))
        return SpanExportResult.SUCCESS

    def write(self, directory: str | Path) -> Path:
        """Writes all stored spans to a file in `directory`, and returns its path. The file's name
        contains the process's name. The file is replaced atomically.

        Events are encoded one by one, because one long call of an encoder would hold the
        interpreter lock and block other threads."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        safe = "".join(
            letter if letter.isalnum() or letter in "-_." else "_" for letter in self.process
        )
        path = folder / f"{safe}-{os.getpid()}{FILE_SUFFIX}"
        partial = path.with_suffix(".partial")
        encoder, separator = msgspec.json.Encoder(), b"\n"
        with partial.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            for event in _events(self.process, os.getpid(), list(self._kept)):
                file.write(separator + encoder.encode(event))
                separator = b",\n"
            file.write(b"\n]}\n")
        partial.replace(path)
        return path


def read_timelines(directory: str | Path) -> list[Trace]:
    """Reads all timelines in a folder. Raises ConfigError if the folder has none, or if one is
    unreadable."""
    paths = sorted(Path(directory).glob(f"*{FILE_SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"inputs {str(directory)!r} has no *{FILE_SUFFIX}; give the folder with the processes'"
            " timelines"
        )
    return [_read(path) for path in paths]


def slowest(traces: Sequence[Trace], count: int) -> tuple[str, ...]:
    """Returns the ids of the `count` slowest requests, slowest first."""
    seconds: dict[str, int] = {}
    for event in (event for trace in traces for event in trace.traceEvents):
        if event.name == "request" and event.dur is not None:
            request = str(event.args.get("request", ""))
            seconds[request] = max(event.dur, seconds.get(request, 0))
    return tuple(sorted(seconds, key=lambda request: -seconds[request])[:count])


def merge(traces: Sequence[Trace], requests: Collection[str] | None = None) -> Trace:
    """Joins the timelines of several processes. If `requests` is given, the result has only the
    events of the requests with these ids."""
    merged: list[TraceEvent] = []
    pids: set[int] = set()
    for trace in traces:
        shown = [
            event
            for event in trace.traceEvents
            if event.ph != "M" and (requests is None or event.args.get("request") in requests)
        ]
        rows = {(event.pid, event.tid) for event in shown}
        names = [
            event
            for event in trace.traceEvents
            if event.ph == "M"
            and ((event.pid, event.tid) in rows or (event.name == "process_name" and rows))
        ]
        # Two hosts, or one host over time, may use the same process id.
        pid = next((event.pid for event in trace.traceEvents), 0)
        while pid in pids:
            pid += 1 << 22  # beyond Linux's largest pid
        if shown:
            pids.add(pid)
        merged += [msgspec.structs.replace(event, pid=pid) for event in (*names, *shown)]
    origin = min((event.ts for event in merged if event.ts is not None), default=0)
    for event in merged:
        if event.ts is not None:
            event.ts -= origin
    return Trace(merged)


def _read(path: Path) -> Trace:
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=Trace)
        if any(event.ph != "M" and event.ts is None for event in trace.traceEvents):
            raise ValueError("an event has no time")
        return trace
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"timeline {str(path)!r} cannot be read: {type(error).__name__}: {error}; remove it"
        ) from error


def _events(process: str, pid: int, kept: Sequence[_Kept]) -> Iterator[TraceEvent]:
    rows: dict[str, list[_Kept]] = {}
    for one in sorted(kept, key=lambda one: (one.started, -(one.ended or one.started))):
        rows.setdefault(one.row, []).append(one)
    if rows:
        yield TraceEvent("process_name", "M", pid, 0, {"name": process})
    next_tid = 1
    for row, members in rows.items():
        lanes = _lanes(members)
        for lane in range(max(lanes) + 1):
            name = row if lane == 0 else f"{row} ({lane + 1})"
            yield TraceEvent("thread_name", "M", pid, next_tid + lane, {"name": name})
        for one, lane in zip(members, lanes, strict=True):
            tid = next_tid + lane
            if one.ended is None:
                yield TraceEvent(
                    one.name, "i", pid, tid, one.args, one.started, cat="jdisagg", s="t"
                )
            else:
                seconds = one.ended - one.started
                yield TraceEvent(
                    one.name, "X", pid, tid, one.args, one.started, seconds, cat="jdisagg"
                )
        next_tid += max(lanes) + 1


def _lanes(members: Sequence[_Kept]) -> list[int]:
    """Returns a lane for each event, so that events of one lane are nested or do not overlap.
    Events must be ordered by start, and the longest first if they start together. Instants are in
    lane 0."""
    lanes_open: list[list[int]] = []
    return [
        0 if one.ended is None else _lane(lanes_open, one.started, one.ended) for one in members
    ]


def _lane(lanes_open: list[list[int]], started: int, ended: int) -> int:
    for lane, ends in enumerate(lanes_open):
        while ends and ends[-1] <= started:
            ends.pop()
        if not ends or ends[-1] >= ended:
            ends.append(ended)
            return lane
    lanes_open.append([ended])
    return len(lanes_open) - 1
