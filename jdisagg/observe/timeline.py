"""A process's timeline: a ring of spans and instants, and the links that say whose they are.

An event names what it belongs to by a `Ref`: the request itself, or a hand-off, an offer, a reservation. Whoever learns what such a
number stands for records a link, in this process or in another; the merge (`trace_events.py`) follows the links through all
files. So nobody passes request ids around for the timeline's sake, and a sender's chunk finds its request by the offer it made.

Recording is one append to a ring; when the ring is full the oldest goes. `OFF` records nothing. Times are seconds of the local
monotonic clock; the file carries one pair (monotonic, wall) by which the merge aligns processes.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Ref = tuple[str, str]
Value = str | int | float | bool

CAPACITY_EVENTS = 1 << 17
FILE_SUFFIX = ".timeline.json"


def request_ref(request_id: str) -> Ref:
    return ("request", request_id)


def handoff_ref(handoff_id: int) -> Ref:
    return ("handoff", str(handoff_id))


def offer_ref(offer_id: int) -> Ref:
    return ("offer", str(offer_id))


def reservation_ref(worker: str, reservation_id: int) -> Ref:
    """Reservations are numbered by each worker for itself."""
    return (f"reservation@{worker}", str(reservation_id))


class Recorder(Protocol):
    """Where events go. Callers ask `on` before they compute what only the timeline needs."""

    on: bool

    def span(self, name: str, started: float, ended: float, ref: Ref | None = None, track: str = "", **args: Value) -> None:
        """Something that took from `started` to `ended`. Shown in its request's row, or in `track` where that is given."""
        ...

    def instant(self, name: str, at: float, ref: Ref | None = None, track: str = "", **args: Value) -> None: ...

    def link(self, ref: Ref, owner: Ref) -> None:
        """`ref` is part of `owner`."""
        ...


class Off:
    """Records nothing."""

    on = False

    def span(self, name: str, started: float, ended: float, ref: Ref | None = None, track: str = "", **args: Value) -> None:
        pass

    def instant(self, name: str, at: float, ref: Ref | None = None, track: str = "", **args: Value) -> None:
        pass

    def link(self, ref: Ref, owner: Ref) -> None:
        pass


OFF = Off()


@dataclass(frozen=True, slots=True)
class Event:
    """`ended` None: an instant."""

    name: str
    started: float
    ended: float | None
    ref: Ref | None
    track: str
    args: dict[str, Value]


class Timeline:
    """Implements `Recorder` in memory. `write` may be called at any time, from the thread that records."""

    on = True

    def __init__(
        self,
        process: str,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        capacity_events: int = CAPACITY_EVENTS,
    ) -> None:
        self.process = process
        self._now = now
        self._wall = wall
        self._events: deque[Event] = deque(maxlen=capacity_events)
        self._links: deque[tuple[Ref, Ref]] = deque(maxlen=capacity_events)

    def span(self, name: str, started: float, ended: float, ref: Ref | None = None, track: str = "", **args: Value) -> None:
        self._events.append(Event(name, started, max(started, ended), ref, track, args))

    def instant(self, name: str, at: float, ref: Ref | None = None, track: str = "", **args: Value) -> None:
        self._events.append(Event(name, at, None, ref, track, args))

    def link(self, ref: Ref, owner: Ref) -> None:
        self._links.append((ref, owner))

    def __len__(self) -> int:
        return len(self._events)

    def write(self, directory: str | Path) -> Path:
        """Writes all that the ring holds to a file of this process's own, whole or not at all."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.process)
        path = folder / f"{safe}-{os.getpid()}{FILE_SUFFIX}"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content(), separators=(",", ":")))
        partial.replace(path)
        return path

    def _content(self) -> dict[str, object]:
        return {
            "version": 1,
            "process": self.process,
            "pid": os.getpid(),
            "anchor": {"monotonic": self._now(), "wall": self._wall()},
            "links": list(self._links),
            "events": [[event.name, event.started, event.ended, event.ref, event.track, event.args] for event in self._events],
        }
