"""W3C trace context between processes: `traceparent` out with every call made, and in with every
call served.

What is current is OpenTelemetry's (a context variable of the task); without a trace there is
nothing to send and nothing is sent. Knows headers, not gRPC."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")


def outgoing() -> tuple[tuple[str, str], ...]:
    """The headers of a call made now; none outside of a trace."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ()
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return tuple(headers.items())


def incoming(headers: Mapping[str, str | bytes]) -> Context | None:
    """What the caller of a call is part of; None where it says nothing that can be read."""
    if _HEADERS[0] not in headers:
        return None
    return _W3C.extract(
        {name: text for name in _HEADERS if isinstance(text := headers.get(name), str)}
    )


@contextmanager
def within(context: Context | None) -> Iterator[None]:
    """Makes `context` the current one; None changes nothing."""
    if context is None:
        yield
        return
    token = otel.attach(context)
    try:
        yield
    finally:
        otel.detach(token)
