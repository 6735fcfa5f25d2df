"""What a process is observed with, and the wrappers that do it: the one object that assembly code needs.

    observer = Observer("decode-0", trace=True)
    peers = {peer: ObservedPeerPort("decode-0", port, observer) for peer, port in peers.items()}
    worker = DecodeWorker("decode-0", ObservedExecutor("decode-0", executor, observer), ..., peers, ...)
    observer.metrics.watch_worker("decode-0", worker.status, worker.counters, lambda: executor.programs.compilations)

    ports = {name: ObservedDecodePort(name, port, observer) for name, port in ports.items()}
    path = ObservedPath(RequestPath(..., ports, ...), observer)

Each wrapper has the protocol of what it wraps. Nothing observed knows that it is.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from jdisagg.observe.metrics import Metrics
from jdisagg.observe.timeline import OFF, Recorder, Timeline

_CAUSES_KEPT = 4096


class Causes:
    """Why the latest attempt at a request ended, kept until the next attempt asks. The oldest are forgotten."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def put(self, tenant: str, request_id: str, cause: str) -> None:
        self._causes[(tenant, request_id)] = cause
        if len(self._causes) > _CAUSES_KEPT:
            self._causes.popitem(last=False)

    def take(self, tenant: str, request_id: str) -> str:
        return self._causes.get((tenant, request_id), "unknown")


class Observer:
    """`now` is the clock of everything that is observed; `trace` keeps a timeline besides the metrics."""

    def __init__(
        self,
        process: str,
        trace: bool = False,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.process = process
        self.now = now
        self.metrics = Metrics(process)
        self.timeline: Recorder = Timeline(process, now, wall) if trace else OFF
        self.causes = Causes()

    def write_timeline(self, directory: str | Path) -> Path | None:
        """Where there is one; see `Timeline.write`."""
        return self.timeline.write(directory) if isinstance(self.timeline, Timeline) else None
