"""OpenTelemetry spans of the work that a process does for requests.

If the client sends W3C trace context (`jdisagg/messages/trace_context.py`), the root span is a
child of the client's span. Calls to workers contain the trace context. Within a process, most code
has only a key: the id of a hand-off, an offer or a reservation. Code that has both the key and its
owner (a trace context or another key) registers the two with `own`.

Spans are created when their work is complete. Times of the observer's clock are converted to times
since the epoch, by one comparison with the wall clock at the start. An instant is a span without
duration, with the attribute `instant`.

If there is no OpenTelemetry provider, no spans are created, stored or sent. OpenTelemetry's
environment variables are not read."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from jdisagg import __version__
from jdisagg.errors import ConfigError

Key = tuple[Hashable, ...]
Value = str | int | float | bool

OWNERS_KEPT = 1 << 16
PARKED_KEPT = 1 << 12
OTLP_QUEUE_SPANS = 1 << 14
OTLP_BATCH_SPANS = 512
OTLP_SECONDS = 5.0

_REQUEST = otel.create_key("jdisagg.request")


def request_key(tenant: str, request_id: str) -> Key:
    return ("request", tenant, request_id)


def handoff_key(handoff_id: int) -> Key:
    return ("handoff", handoff_id)


def offer_key(offer_id: int) -> Key:
    return ("offer", offer_id)


def reservation_key(worker: str, reservation_id: int) -> Key:
    """Returns a reservation's key. Reservation ids are unique only within a worker."""
    return ("reservation", worker, reservation_id)


def of_request(context: Context, request_id: str) -> Context:
    return otel.set_value(_REQUEST, request_id, context)


class Tracing:
    """Creates the spans of a process. Callers check the attribute `on` before they compute values
    that are needed only for a span.

    Args:
        provider: OpenTelemetry's provider. None turns tracing off.
        every: Whether to record requests whose client sent no sampling decision. If False, a
            request is recorded only if its client requests tracing.
    """

    def __init__(
        self,
        provider: TracerProvider | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        every: bool = True,
    ) -> None:
        self._every = every
        self.on = provider is not None
        self._provider = provider
        self._tracer = (
            provider.get_tracer("jdisagg", __version__) if provider else trace.NoOpTracer()
        )
        self._epoch = wall() - now()
        self._owners: OrderedDict[Key, Context] = OrderedDict()
        self._parked: OrderedDict[Key, list[tuple[str, float, float, dict[str, Value]]]] = (
            OrderedDict()
        )

    def start(
        self,
        name: str,
        started: float,
        owner: Key | Context | None,
        request_id: str = "",
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        **attributes: Value,
    ) -> tuple[trace.Span, Context]:
        """Starts a span, which `end` ends. Returns the span, and its context for child spans."""
        parent = self.owner(owner) if isinstance(owner, tuple) else owner
        parent = otel.get_current() if parent is None else parent
        if request_id:
            parent = of_request(parent, request_id)
        if not self._wanted(parent):
            # The caller's context is passed on, so that a worker with tracing decides on its own.
            return trace.INVALID_SPAN, parent
        if (request := parent.get(_REQUEST)) is not None:
            attributes["request"] = str(request)
        span = self._tracer.start_span(name, parent, kind, attributes, None, self._ns(started))
        return span, trace.set_span_in_context(span, parent)

    def end(self, span: trace.Span, ended: float, **attributes: Value) -> None:
        if span.is_recording():
            span.set_attributes(attributes)
            span.end(self._ns(ended))

    def span(
        self,
        name: str,
        started: float,
        ended: float,
        owner: Key | Context | None = None,
        **attributes: Value,
    ) -> None:
        """Records a span whose work is complete.

        Args:
            started, ended: Times of the observer's clock.
            owner: Trace context or key to which the span belongs.
            **attributes: Attributes of the span.
        """
        if not self.on:
            return
        if isinstance(owner, tuple):
            known = self._owners.get(owner)
            if known is None:
                self._park(owner, (name, started, ended, attributes))
                return
            owner = known
        self._emit(name, started, ended, owner or otel.Context(), attributes)

    def instant(
        self, name: str, at: float, owner: Key | Context | None = None, **attributes: Value
    ) -> None:
        if self.on:
            self.span(name, at, at, owner, instant=True, **attributes)

    def own(self, key: Key, owner: Key | Context | None) -> None:
        """Registers that `key` (such as a hand-off's id) belongs to `owner`. When too many keys are
        stored, the oldest are dropped."""
        context = self.owner(owner) if isinstance(owner, tuple) else owner
        if not self.on or context is None:
            return
        self._owners[key] = context
        if len(self._owners) > OWNERS_KEPT:
            self._owners.popitem(last=False)
        for name, started, ended, attributes in self._parked.pop(key, ()):
            self._emit(name, started, ended, context, attributes)

    def owner(self, key: Key) -> Context | None:
        return self._owners.get(key)

    def flush(self) -> None:
        """Passes all spans to the exporters, including those whose owner is not registered. Do not
        call this method on the event loop, because an exporter may wait for the network."""
        self._emit_parked()
        if self._provider:
            self._provider.force_flush()

    def close(self) -> None:
        """Passes all spans to the exporters and stops these. Spans that a collector has not taken
        within `OTLP_SECONDS` are lost, so that a process can end without its collector."""
        self._emit_parked()
        if self._provider:
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(OTLP_SECONDS)

    def _emit_parked(self) -> None:
        while self._parked:
            for name, started, ended, attributes in self._parked.popitem(last=False)[1]:
                self._emit(name, started, ended, otel.Context(), attributes)

    def _park(self, key: Key, span: tuple[str, float, float, dict[str, Value]]) -> None:
        self._parked.setdefault(key, []).append(span)
        if len(self._parked) > PARKED_KEPT:
            for name, started, ended, attributes in self._parked.popitem(last=False)[1]:
                self._emit(name, started, ended, otel.Context(), attributes)

    def _emit(
        self, name: str, started: float, ended: float, parent: Context, attributes: dict[str, Value]
    ) -> None:
        if not self._wanted(parent):
            return
        if (request := parent.get(_REQUEST)) is not None:
            attributes["request"] = str(request)
        span = self._tracer.start_span(
            name, parent, attributes=attributes, start_time=self._ns(started)
        )
        span.end(self._ns(max(started, ended)))

    def _wanted(self, parent: Context) -> bool:
        context = trace.get_current_span(parent).get_span_context()
        return context.trace_flags.sampled if context.is_valid else self._every

    def _ns(self, instant: float) -> int:
        return round((instant + self._epoch) * 1e9)


def tracer_provider(process: str, processors: Sequence[SpanProcessor]) -> TracerProvider:
    """Returns an OpenTelemetry provider that applies the caller's sampling decision. If a caller
    has sent none, it records all spans. `process` is the process's name."""
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=Resource(
            {
                "service.name": "jdisagg",
                "service.instance.id": process,
                "service.version": __version__,
            }
        ),
        span_limits=SpanLimits(max_attributes=64, max_attribute_length=4096),
        shutdown_on_exit=False,
    )
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Returns a processor that sends spans to an OTLP collector over gRPC, in a separate thread.
    Spans that do not fit into its queue are dropped.

    Args:
        endpoint: URL of the collector, `http://host:port`, or `https://host:port` for TLS.

    Raises:
        ConfigError: The exporter package is not installed, or the endpoint is not such a URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_endpoint must begin with http:// or https://, got {endpoint!r}; the usual port"
            " is 4317"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs an exporter that is not installed ({error}); install"
            " jdisagg[otel], or omit the flag"
        ) from error
    exporter = OTLPSpanExporter(
        endpoint, insecure=endpoint.startswith("http://"), timeout=int(OTLP_SECONDS)
    )
    return BatchSpanProcessor(
        exporter,
        max_queue_size=OTLP_QUEUE_SPANS,
        schedule_delay_millis=1000.0 * OTLP_SECONDS,
        max_export_batch_size=OTLP_BATCH_SPANS,
        export_timeout_millis=1000.0 * OTLP_SECONDS,
    )
