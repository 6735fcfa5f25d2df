"""The observer of a process, which assembly code passes to `wrap.py`.

    observer = Observer("decode-0", timelines=True)
    executor = wrap.mesh("decode-0", executor, observer)
    port = wrap.decode("decode-0", port, observer)
    path = wrap.path(path, observer)

Each wrapper has the protocol of what it wraps, and wrapped code does not know that it is observed.
Without an observer (None) everything is returned unchanged."""

import time
from collections import OrderedDict
from collections.abc import Callable

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from jdisagg.observe.metrics import Metrics
from jdisagg.observe.recent_requests import RecentRequests
from jdisagg.observe.trace_events import TraceEventExporter
from jdisagg.observe.tracing import Tracing, otlp_processor, tracer_provider

_CAUSES_KEPT = 4096
# Not a failure: a client resumes a stream that began at another server.
RESUMED = "resumed"


class Causes:
    """Why the latest attempt at each request ended, for the next attempt. The oldest entries are
    dropped."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def put(self, tenant: str, request_id: str, cause: str) -> None:
        self._causes[(tenant, request_id)] = cause
        if len(self._causes) > _CAUSES_KEPT:
            self._causes.popitem(last=False)

    def latest(self, tenant: str, request_id: str) -> str:
        """Returns "" if no cause is known."""
        return self._causes.get((tenant, request_id), "")


class Observer:
    """Metrics, and spans if requested.

    Args:
        process: Name of this process in metrics, logs and timelines.
        timelines: Whether to keep the newest spans for a timeline.
        otlp_endpoint: OTLP collector for spans, or "".
        now: Clock of all measurements.
        wall: Seconds since the epoch.
        recent: Whether to keep the latest traced requests for the web page. Without a timeline and
            a collector, only requests whose client asks for it are traced.
    """

    def __init__(
        self,
        process: str,
        timelines: bool = False,
        otlp_endpoint: str = "",
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        recent: bool = False,
    ) -> None:
        self.process = process
        self.now = now
        self.metrics = Metrics(process)
        self.causes = Causes()
        self.timeline = TraceEventExporter(process) if timelines else None
        self.recent = RecentRequests() if recent else None
        processors: list[SpanProcessor] = []
        if self.timeline is not None:
            processors.append(SimpleSpanProcessor(self.timeline))
        if otlp_endpoint:
            processors.append(otlp_processor(otlp_endpoint))
        every = bool(processors)
        if self.recent is not None:
            processors.append(SimpleSpanProcessor(self.recent))
        self.tracing = Tracing(
            tracer_provider(process, processors) if processors else None, now, wall, every
        )
