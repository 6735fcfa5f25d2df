"""From the timelines of many processes to one trace in the Trace Event Format, which Perfetto and chrome://tracing read.

Clocks are aligned by each file's pair (monotonic, wall): exact within a host, as good as the hosts' wall clocks between hosts.
An event's request is found by following links through all files. Complete events ("X") of one thread row must nest, so rows that
overlap are spread over lanes: each is a `tid` of its own with a name. Times are whole microseconds from the first event on: rounding
whole instants keeps what nests nested.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.observe.timeline import FILE_SUFFIX, Event, Ref

_LINKS_FOLLOWED = 8

Json = str | int | float | bool | dict[str, "Json"] | list["Json"] | None
TraceEvent = dict[str, Json]


@dataclass(frozen=True, slots=True)
class TimelineFile:
    """One process. `wall_offset` added to its monotonic instants gives wall time."""

    process: str
    pid: int
    wall_offset: float
    links: tuple[tuple[Ref, Ref], ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """An event of a process, in microseconds, with its row's name and its request."""

    pid: int
    row: str
    event: Event
    started: int
    ended: int
    request: str


def read_timelines(directory: str | Path) -> list[TimelineFile]:
    """All timelines in a folder. Raises ConfigError where there is none, or one that cannot be read."""
    paths = sorted(Path(directory).glob(f"*{FILE_SUFFIX}"))
    if not paths:
        raise ConfigError(f"inputs {str(directory)!r} holds no *{FILE_SUFFIX}; give the folder that the processes wrote their timelines to")
    return [_read(path) for path in paths]


def merge(files: Sequence[TimelineFile], request: str | None = None) -> dict[str, Json]:
    """The trace; of one request alone where `request` is given."""
    owners = {ref: owner for file in files for ref, owner in file.links}
    pids = _distinct_pids(files)
    placed = [
        _place(pid, file, event, _request_of(event.ref, owners)) for pid, file in zip(pids, files, strict=True) for event in file.events
    ]
    if request is not None:
        placed = [one for one in placed if one.request == request]
    origin = min((one.started for one in placed), default=0)
    events: list[TraceEvent] = []
    for pid, file in zip(pids, files, strict=True):
        mine = [one for one in placed if one.pid == pid]
        if mine:
            events.append(_metadata(pid, 0, "process_name", file.process))
            events += _rows(pid, mine, origin)
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def _read(path: Path) -> TimelineFile:
    try:
        content = json.loads(path.read_text())
        anchor = content["anchor"]
        events = tuple(
            Event(name, started, ended, None if ref is None else (ref[0], ref[1]), track, args)
            for name, started, ended, ref, track, args in content["events"]
        )
        links = tuple(((ref[0], ref[1]), (owner[0], owner[1])) for ref, owner in content["links"])
        return TimelineFile(content["process"], content["pid"], anchor["wall"] - anchor["monotonic"], links, events)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"timeline {str(path)!r} cannot be read: {type(error).__name__}: {error}; remove it") from error


def _request_of(ref: Ref | None, owners: dict[Ref, Ref]) -> str:
    """The request that `ref` belongs to, or nothing where no link says so."""
    for _ in range(_LINKS_FOLLOWED):
        if ref is None or ref[0] == "request":
            break
        ref = owners.get(ref)
    return ref[1] if ref is not None and ref[0] == "request" else ""


def _distinct_pids(files: Sequence[TimelineFile]) -> list[int]:
    """Process ids, which two hosts (or one host over time) may both have used."""
    pids: list[int] = []
    for file in files:
        pid = file.pid
        while pid in pids:
            pid += 1 << 22  # beyond Linux's largest pid
        pids.append(pid)
    return pids


def _place(pid: int, file: TimelineFile, event: Event, request: str) -> _Placed:
    started = round((event.started + file.wall_offset) * 1e6)
    ended = started if event.ended is None else round((event.ended + file.wall_offset) * 1e6)
    row = event.track or (f"request {request}" if request else "unattributed")
    return _Placed(pid, row, event, started, ended, request)


def _rows(pid: int, placed: Iterable[_Placed], origin: int) -> list[TraceEvent]:
    rows: dict[str, list[_Placed]] = {}
    for one in sorted(placed, key=lambda one: (one.started, -one.ended)):
        rows.setdefault(one.row, []).append(one)
    events: list[TraceEvent] = []
    next_tid = 1
    for row, members in rows.items():
        lanes = _lanes(members)
        for lane in range(max(lanes) + 1):
            name = row if lane == 0 else f"{row} ({lane + 1})"
            events.append(_metadata(pid, next_tid + lane, "thread_name", name))
        events += [_trace_event(one, next_tid + lane, origin) for one, lane in zip(members, lanes, strict=True)]
        next_tid += max(lanes) + 1
    return events


def _lanes(members: Sequence[_Placed]) -> list[int]:
    """For each event, by start and longest first, the first lane where it nests in what is open there. Instants take lane 0."""
    lanes_open: list[list[int]] = []
    return [0 if one.event.ended is None else _lane(lanes_open, one) for one in members]


def _lane(lanes_open: list[list[int]], one: _Placed) -> int:
    for lane, ends in enumerate(lanes_open):
        while ends and ends[-1] <= one.started:
            ends.pop()
        if not ends or ends[-1] >= one.ended:
            ends.append(one.ended)
            return lane
    lanes_open.append([one.ended])
    return len(lanes_open) - 1


def _trace_event(one: _Placed, tid: int, origin: int) -> TraceEvent:
    args: dict[str, Json] = dict(one.event.args)
    if one.request:
        args["request"] = one.request
    shared: TraceEvent = {"name": one.event.name, "cat": "jdisagg", "pid": one.pid, "tid": tid, "ts": one.started - origin, "args": args}
    if one.event.ended is None:
        return {**shared, "ph": "i", "s": "t"}
    return {**shared, "ph": "X", "dur": one.ended - one.started}


def _metadata(pid: int, tid: int, kind: str, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
