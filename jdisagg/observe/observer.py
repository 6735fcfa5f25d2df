"""The observer of a process, which assembly code passes to `wrap.py`.

    observer = Observer("decode-0", [otlp_processor("http://host:4317")])
    executor = wrap.mesh("decode-0", executor, observer)
    port = wrap.decode("decode-0", port, observer)
    path = wrap.path(path, observer)

If the observer is None, the functions of `wrap` return their argument unchanged."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from jdisagg.observe.metrics import Metrics
from jdisagg.observe.recent_requests import RecentRequests
from jdisagg.observe.tracing import Tracing, tracer_provider

_CAUSES_KEPT = 4096
# The cause of an attempt with which a client resumes a stream of another server. It is no failure.
RESUMED = "resumed"


class Causes:
    """Stores why the latest attempt of each request ended, for the metrics and the tracing span of
    the next attempt. When the store is full, the oldest entry is dropped."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def put(self, tenant: str, request_id: str, cause: str) -> None:
        self._causes[(tenant, request_id)] = cause
        if len(self._causes) > _CAUSES_KEPT:
            self._causes.popitem(last=False)

    def latest(self, tenant: str, request_id: str) -> str:
        return self._causes.get((tenant, request_id), "")


class Observer:
    """The metrics of a process, and its tracing spans if requested.

    Args:
        process: Name of this process in metrics, logs and spans.
        processors: Receivers of all spans.
        now: Monotonic clock of all measurements, in seconds.
        wall: Clock that returns seconds since the epoch.
        recent: Whether to store the spans of the latest traced requests for the web page. Without
            other processors, a request is traced only if its client requests this.
    """

    def __init__(
        self,
        process: str,
        processors: Sequence[SpanProcessor] = (),
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        recent: bool = False,
    ) -> None:
        self.process = process
        self.now = now
        self.metrics = Metrics(process)
        self.causes = Causes()
        self.recent = RecentRequests() if recent else None
        own = () if self.recent is None else (SimpleSpanProcessor(self.recent),)
        provider = tracer_provider(process, (*processors, *own)) if processors or own else None
        self.tracing = Tracing(provider, now, wall, every=bool(processors))
