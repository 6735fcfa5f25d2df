"""What a process is observed with, and how its parts are wrapped: all that assembly code needs.

    observer = Observer("decode-0", timelines=True)
    executor = observed_executor("decode-0", executor, observer)
    port = observed_decode("decode-0", port, observer)
    path = observed_path(path, observer)

Each wrapper has the protocol of what it wraps; nothing observed knows that it is. Without an
observer (None) everything is returned as it is."""

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
# Not a failure: a client goes on with a stream that began elsewhere.
RESUMED = "resumed"


class Causes:
    """Why the latest attempt at a request ended, kept until the next attempt asks. The oldest are
    forgotten."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def put(self, tenant: str, request_id: str, cause: str) -> None:
        self._causes[(tenant, request_id)] = cause
        if len(self._causes) > _CAUSES_KEPT:
            self._causes.popitem(last=False)

    def latest(self, tenant: str, request_id: str) -> str:
        """Empty where none is known."""
        return self._causes.get((tenant, request_id), "")


class Observer:
    """Metrics, and spans where somebody wants them.

    Args:
      process: The name under which this process is seen.
      timelines: Whether the newest spans are kept for a timeline.
      otlp_endpoint: An OTLP collector that spans are sent to; empty: none.
      now: The clock of everything that is observed.
      wall: Seconds since the epoch.
      recent: Whether the latest traced requests are kept for the web page. Without a timeline and
        a collector those alone are traced whose client asks for it.
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
