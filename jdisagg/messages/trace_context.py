"""W3C trace context between processes: each call sends a `traceparent` header, and each server
reads it.

OpenTelemetry holds the current context in a context variable of the task. A call that belongs to no
trace sends no header. This module does not import gRPC."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")


def outgoing() -> tuple[tuple[str, str], ...]:
    if not trace.get_current_span().get_span_context().is_valid:
        return ()
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return tuple(headers.items())


def incoming(headers: Mapping[str, str | bytes]) -> Context | None:
    if _HEADERS[0] not in headers:
        return None
    return _W3C.extract(
        {name: text for name in _HEADERS if isinstance(text := headers.get(name), str)}
    )


@contextmanager
def within(context: Context | None) -> Iterator[None]:
    """Context manager in which `context` is the current trace context. With None, the current
    context does not change."""
    if context is None:
        yield
        return
    token = otel.attach(context)
    try:
        yield
    finally:
        otel.detach(token)
